"""Fuzzing HTTP/1.1: a server sees the requests that a strict reader sees, and no others."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.end_to_end.connections.smuggled_requests import ACCEPTED, INNER, REFUSED
from tests.fuzz.http1_comparison import Stream, check_streams, recording
from tests.fuzz.http1_streams import any_stream, with_odd_byte
from tests.fuzz.strict_http1 import read_all
from tests.support.scale import fuzz_seconds

pytestmark = [
    # On one loop only: these tests take their time.
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.usefixtures("clean"),
]


def _post(*lines: bytes, body: bytes = b"", first: bytes = b"POST /a HTTP/1.1") -> bytes:
    """Write a request, and another one behind it."""
    head = b"\r\n".join((first, b"Host: x", *lines, b"", b""))
    return head + body + b"GET /behind HTTP/1.1\r\nHost: x\r\n\r\n"


def _coded(body: bytes, *lines: bytes) -> bytes:
    return _post(b"Transfer-Encoding: chunked", *lines, body=body)


# ------------------------------------------------------------------------------- the reader itself


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_the_strict_reader_refuses_what_is_refused(data: bytes) -> None:
    reading = read_all(data)
    assert (reading.requests, reading.end in ("refused", "cut")) == ([], True)


@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED)
async def test_the_strict_reader_reads_what_is_accepted(case: object) -> None:
    data, first, body = (getattr(case, name) for name in ("data", "first", "body"))
    (request,) = read_all(data).requests
    assert request.path is not None
    assert [request.method.decode(), request.path.decode(), "HTTP/1.1"] == first.split()
    assert request.body == body
    assert request.size == len(data.lstrip(b"\r\n"))


# ------------------------------------------------------------------------------- framings

# Beside those of test_malformed_http.py, which has what is refused.
SERVED = {
    "a body that begins as a request": _post(b"Content-Length: %d" % len(INNER), body=INNER),
    "an extension of 8 KB": _coded(b"5;a=" + b"b" * 8000 + b"\r\nhello\r\n0\r\n\r\n"),
    "Connection that names each framing header": _post(
        b"Connection: content-length, transfer-encoding, host, te, trailer",
        b"Content-Length: 5",
        body=b"hello",
    ),
    "126 headers": _post(*[b"X: y"] * 126),
    "a head of nearly 64 KiB": _post(*[b"X: " + b"y" * 8100] * 8),
    "HTTP/1.0 without a host": b"GET /a HTTP/1.0\r\n\r\nGET /behind HTTP/1.0\r\n\r\n",
    "many in a row": _post() * 60,
}


def _variants(data: bytes) -> Iterator[Stream]:
    """Send a stream as a whole, in two pieces, and byte by byte as far as that is worthwhile."""
    yield Stream(data, plain=True)
    yield Stream(data, (len(data) // 2,), plain=True)
    yield Stream(data, tuple(range(1, min(len(data), 2000))), plain=True)


@pytest.mark.parametrize("data", SERVED.values(), ids=SERVED)
async def test_a_valid_request_is_served(data: bytes) -> None:
    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, _variants(data))


# ------------------------------------------------------------------------------- by chance


async def test_an_odd_byte_anywhere_is_read_as_by_the_strict_reader() -> None:
    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, with_odd_byte())


async def test_generated_streams_are_read_as_by_the_strict_reader() -> None:
    end = time.monotonic() + fuzz_seconds(6)

    def streams() -> Iterator[Stream]:
        chance, number = random.Random(9112), 0
        while time.monotonic() < end:
            yield any_stream(chance, number)
            number += 1

    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, streams())
