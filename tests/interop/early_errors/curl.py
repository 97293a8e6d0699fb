"""Sends requests by the program curl, a process each: curl.py CURL URL CA SIZE ROUNDS."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile


def main() -> None:
    """Print each response as a line of JSON: its status and its body, or 0 and the error."""
    curl, url, ca, size, rounds = sys.argv[1:]
    with tempfile.NamedTemporaryFile() as body:
        body.write(bytes(int(size)))
        body.flush()
        command = [curl, "--silent", "--show-error", "--http2", "--max-time", "20", "--cacert", ca]
        command += ["--header", "Content-Type: application/octet-stream"]
        command += ["--data-binary", f"@{body.name}", "--write-out", "\n%{http_code}", url]
        for _ in range(int(rounds)):
            done = subprocess.run(command, capture_output=True, text=True)
            text, _, status = done.stdout.rpartition("\n")
            if done.returncode:
                status, text = "0", done.stderr
            print(json.dumps([int(status), text]))


main()
