"""Prometheus' own checker reads the queries that the documentation shows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.docs.markdown import PAGES, blocks
from tests.interop.programs import program


def test_promtool_accepts_the_queries_of_the_documentation(tmp_path: Path) -> None:
    queries = [block.text for page in PAGES for block in blocks(page) if block.language == "promql"]
    rules = [{"record": f"shown:{number}", "expr": text} for number, text in enumerate(queries)]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "shown", "rules": rules}]}))
    command = [program("promtool"), "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout
