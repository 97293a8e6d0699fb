"""Sends requests by HTTPX, on a connection each: httpx_client.py URL CA SIZE ROUNDS."""

from __future__ import annotations

import json
import ssl
import sys

import httpx


def send(url: str, context: ssl.SSLContext, body: bytes) -> tuple[int, str]:
    """Return the status and the body of the response, or 0 and the error."""
    try:
        with httpx.Client(http2=True, verify=context, timeout=20) as client:
            response = client.post(url, content=body)
    except httpx.HTTPError as error:
        return 0, repr(error)
    if response.http_version != "HTTP/2":
        return 0, f"this was not HTTP/2 but {response.http_version}"
    return response.status_code, response.text


def main() -> None:
    """Print each response as a line of JSON."""
    url, ca, size, rounds = sys.argv[1:]
    context = ssl.create_default_context(cafile=ca)
    for _ in range(int(rounds)):
        print(json.dumps(send(url, context, bytes(int(size)))))


main()
