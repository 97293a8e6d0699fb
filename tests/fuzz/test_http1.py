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

# Beside those of test_malformed_http.py.
SERVED = {
    "a body that begins as a request": _post(b"Content-Length: %d" % len(INNER), body=INNER),
    "a chunk that holds a request": _coded(b"%X\r\n%s\r\n0\r\n\r\n" % (len(INNER), INNER)),
    "an extension of 8 KB": _coded(b"5;a=" + b"b" * 8000 + b"\r\nhello\r\n0\r\n\r\n"),
    "a quoted extension that looks like chunks": _coded(b'5;a="0;0"\r\nhello\r\n0;b\r\n\r\n'),
    "100 trailers": _coded(b"0\r\n" + b"X: y\r\n" * 100 + b"\r\n"),
    "Connection that names each framing header": _post(
        b"Connection: content-length, transfer-encoding, host, te, trailer",
        b"Content-Length: 5",
        body=b"hello",
    ),
    "Connection that names a coding": _coded(
        b"5\r\nhello\r\n0\r\n\r\n", b"Connection: Transfer-Encoding"
    ),
    "126 headers": _post(*[b"X: y"] * 126),
    "a head of nearly 64 KiB": _post(*[b"X: " + b"y" * 8100] * 8),
    "a URL of IPv6": _post(first=b"POST http://[::1]:80/a HTTP/1.1"),
    "empty lines behind chunks": _coded(b"0\r\n\r\n\r\n\r\n"),
    "HTTP/1.0 without a host": b"GET /a HTTP/1.0\r\n\r\nGET /behind HTTP/1.0\r\n\r\n",
    "many in a row": _post() * 60,
}

NOT_SERVED = {
    "a length with a plus, behind another": _post(
        b"Content-Length: 5", b"Content-Length: +5", body=b"hello"
    ),
    "a length of 2^64 + 5": _post(b"Content-Length: 18446744073709551621", body=b"hello"),
    "a length in a folded line": _post(b"X: y\r\n Content-Length: 5", body=b"hello"),
    "a length of 0 and a coding": _post(
        b"Content-Length: 0", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"
    ),
    "a coding with a parameter": _post(b"Transfer-Encoding: chunked;a=b", body=b"0\r\n\r\n"),
    "a coding in HTTP/1.0": _post(
        *(b"Connection: keep-alive", b"Transfer-Encoding: chunked"),
        body=b"0\r\n\r\n",
        first=b"POST /a HTTP/1.0",
    ),
    "a chunk of 2^64": _coded(b"10000000000000000\r\nhello\r\n0\r\n\r\n"),
    "a chunk with one byte for its line end": _coded(b"5\r\nhello\r0\r\n\r\n"),
    "a chunk extension with LF in quotes": _coded(b'5;a="\n"\r\nhello\r\n0\r\n\r\n'),
    "a trailer that begins with a space": _coded(b"0\r\n X: y\r\n\r\n"),
    "a version of 2.0": _post(first=b"POST /a HTTP/2.0"),
    "a method with a colon": _post(first=b"POST: /a HTTP/1.1"),
    "a host with a null byte": b"GET /a HTTP/1.1\r\nHost: x\0\r\n\r\n",
    "200 headers": _post(*[b"X: y"] * 200),
    "a head of 64 KiB": _post(b"X: " + b"y" * 65_536),
}

# What the grammar allows, and the gateway refuses.
UNKNOWN = {
    "a method of mixed case": _post(first=b"Post /a HTTP/1.1"),
    "a method that nobody knows": _post(first=b"FOO /a HTTP/1.1"),
    "an authority": _post(first=b"POST x:80 HTTP/1.1"),
}

ANSWERED = {
    "the form for all of a server": _post(first=b"OPTIONS * HTTP/1.1"),
    "a fragment": _post(first=b"POST /a#b HTTP/1.1"),
}


def _variants(data: bytes, plain: bool) -> Iterator[Stream]:
    """Send a stream as a whole, in two pieces, and byte by byte as far as that is worthwhile."""
    yield Stream(data, plain=plain)
    yield Stream(data, (len(data) // 2,), plain)
    yield Stream(data, tuple(range(1, min(len(data), 2000))), plain)


@pytest.mark.parametrize("data", SERVED.values(), ids=SERVED)
async def test_a_valid_request_is_served(data: bytes) -> None:
    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, _variants(data, plain=True))


@pytest.mark.parametrize(
    "data", [*NOT_SERVED.values(), *UNKNOWN.values()], ids=[*NOT_SERVED, *UNKNOWN]
)
async def test_an_invalid_request_reaches_no_server(data: bytes) -> None:
    assert (read_all(data).requests == []) is (data in NOT_SERVED.values())
    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, _variants(data, plain=False))
        assert recorder.seen == []


@pytest.mark.parametrize("data", ANSWERED.values(), ids=ANSWERED)
async def test_the_gateway_responds_to_a_target_that_names_no_resource(data: bytes) -> None:
    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, _variants(data, plain=False))
        assert {path for _, path, _ in recorder.seen} == {b"/behind"}


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
