"""Sends requests by the libcurl of PycURL, on a connection each: libcurl.py URL CA SIZE ROUNDS."""

from __future__ import annotations

import io
import json
import sys

import pycurl  # type: ignore[import-untyped]


def send(url: str, ca: str, body: bytes) -> tuple[int, str]:
    """Return the status and the body of the response, or 0 and the error."""
    response = io.BytesIO()
    curl = pycurl.Curl()
    curl.setopt(pycurl.URL, url)
    curl.setopt(pycurl.CAINFO, ca)
    curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_2_0)
    curl.setopt(pycurl.POST, 1)
    curl.setopt(pycurl.POSTFIELDSIZE_LARGE, len(body))
    curl.setopt(pycurl.READDATA, io.BytesIO(body))
    curl.setopt(pycurl.WRITEDATA, response)
    curl.setopt(pycurl.TIMEOUT, 20)
    try:
        curl.perform()
        status = curl.getinfo(pycurl.RESPONSE_CODE)
        version = curl.getinfo(pycurl.INFO_HTTP_VERSION)
    except pycurl.error as error:
        return 0, str(error)
    finally:
        curl.close()
    if version != pycurl.CURL_HTTP_VERSION_2_0:
        return 0, f"this was not HTTP/2 but {version}"
    return status, response.getvalue().decode()


def main() -> None:
    """Print each response as a line of JSON."""
    url, ca, size, rounds = sys.argv[1:]
    for _ in range(int(rounds)):
        print(json.dumps(send(url, ca, bytes(int(size)))))


main()
