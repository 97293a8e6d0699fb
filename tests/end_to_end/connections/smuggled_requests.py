"""Requests that two readers could parse differently, and some that only look so."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.http_messages import chunk, chunked
from tests.support.inference_messages import HEADER_LENGTH

INNER = b"GET /v2/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


"""What an attacker wants to be taken for a request."""


SIZE = len(INNER)


def _post(*lines: bytes, body: bytes = b"", target: bytes = b"/v2/x") -> bytes:
    return b"\r\n".join((b"POST " + target + b" HTTP/1.1", b"Host: x", *lines, b"", body))


def _get(*lines: bytes, first: bytes = b"GET /v2/x HTTP/1.1") -> bytes:
    """Return a request with another one behind it."""
    return b"\r\n".join((first, b"Host: x", *lines, b"", INNER))


def _with_a_length(coding: bytes) -> bytes:
    """Return a request with a length and a coding, and another one behind it.

    A reader of the length sees a body that contains it; a reader of the coding sees two requests.
    """
    body = b"0\r\n\r\n" + INNER
    return _post(b"Content-Length: %d" % len(body), coding, body=body)


# Spellings of a coding that one reader knows and another does not.
CODINGS = [
    *(
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding : chunked",
        b" Transfer-Encoding: chunked",
    ),
    *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding:\r\n chunked", b"Transfer-Encoding:"),
    *(b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: CHUNKED"),
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x",
    b"X: y\nTransfer-Encoding: chunked",
    b"X: y\rTransfer-Encoding: chunked",
]


_AND_A_LENGTH = {f"a length and {coding!r}": _with_a_length(coding) for coding in CODINGS}


LENGTHS = [
    *(b"Content-Length: %d, %d", b"Content-Length: %d ,%d", b"Content-Length: %d %d"),
    *(b"Content-Length: %d\r\nContent-Length: %d", b"Content-Length: %d\r\ncontent-length: %d"),
    b"Content-Length: %d\r\nX: y\r\nContent-Length: %d",
]


_LENGTHS = {
    f"{form.decode()!r} of {one} and {two}": _post(form % (one, two), body=INNER)
    for form in LENGTHS
    for one, two in ((SIZE, SIZE), (SIZE, 0), (0, SIZE))
}


_ODD_LENGTHS = {
    repr(line): _post(line, body=INNER)
    for line in (
        *(b"Content-Length: +%d" % SIZE, b"Content-Length: five", b"Content-Length:"),
        *(b"Content-Length : %d" % SIZE, b"Content-Length:\r\n %d" % SIZE),
        *(b"Content-Length: %d\nX: y" % SIZE, b"X: y\rContent-Length: %d" % SIZE),
        b"Content-Length: 18446744073709551616",
    )
}


_HEADS = {
    "a length behind a coding": _post(
        b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n" + INNER
    ),
    "bare LF throughout": b"GET /v2/x HTTP/1.1\nHost: x\n\n" + INNER,
    "bare CR in a header": _get(b"X: y\rY: z"),
    "a folded header": _get(b"X: a\r\n b"),
    "two hosts": _get(b"Host: y"),
    "129 headers": _get(*[b"X: y"] * 128),
    "a header of 70 KB": _get(b"X: " + b"y" * 70_000),
    "chunked in HTTP/1.0": b"POST /v2/x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + INNER,
    "CONNECT": _get(first=b"CONNECT x:80 HTTP/1.1"),
}


def _chunks(body: bytes) -> bytes:
    return _post(b"Transfer-Encoding: chunked", body=body)


_CHUNKS = {
    "a negative size": _chunks(b"-5\r\nhello\r\n0\r\n\r\n" + INNER),
    "a size beyond 64 bits that is 0 in them": _chunks(b"10000000000000000\r\n\r\n" + INNER),
    "bare LF throughout": _chunks(b"5\nhello\n0\n\n" + INNER),
    "other bytes behind a chunk": _chunks(b"5\r\nhelloXX0\r\n\r\n" + INNER),
    "a coding in a trailer": _chunks(
        b"0\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(INNER)
    ),
}  # fmt: skip


REFUSED = {
    **_AND_A_LENGTH,
    **_LENGTHS,
    **_ODD_LENGTHS,
    **{f"head: {name}": data for name, data in _HEADS.items()},
    **{f"chunks: {name}": data for name, data in _CHUNKS.items()},
}


@dataclass(frozen=True)
class Accepted:
    """What is sent, and what the server gets."""

    data: bytes
    first: str = "POST /v2/x HTTP/1.1"
    body: bytes = INNER
    headers: tuple[tuple[str, str | None], ...] = ()
    """The relevant headers at the server; None for a missing one."""


CHUNKED = (("transfer-encoding", "chunked"), ("content-length", None))


SIZED = (("content-length", str(SIZE)), ("transfer-encoding", None))


def _sized(*lines: bytes, first: bytes = b"POST /v2/x HTTP/1.1") -> bytes:
    return b"\r\n".join((first, b"Host: x", b"Content-Length: %d" % SIZE, *lines, b"", INNER))


def _coded(body: bytes, *lines: bytes) -> bytes:
    return _post(*(lines or (b"Transfer-Encoding: chunked",)), body=body)


ACCEPTED = {
    "a body": Accepted(_sized(), headers=SIZED),
    "a body of GET": Accepted(
        _sized(first=b"GET /v2/x HTTP/1.1"), "GET /v2/x HTTP/1.1", headers=SIZED
    ),
    "a header that looks like a coding": Accepted(
        _sized(b"Transfer_Encoding: chunked", b"X-Transfer-Encoding: chunked"), headers=SIZED
    ),
    "a length that Connection names": Accepted(
        _sized(b"Connection: close-not, content-length"), headers=SIZED
    ),
    "a header length that Connection names": Accepted(
        _sized(b"Connection: " + HEADER_LENGTH.encode(), HEADER_LENGTH.encode() + b": 7"),
        headers=(*SIZED, (HEADER_LENGTH.lower(), "7")),
    ),
    "a wish for another protocol": Accepted(
        _sized(
            b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"
        ),
        headers=(*SIZED, ("upgrade", None), ("http2-settings", None), ("connection", None)),
    ),
    "a URL with another host": Accepted(
        _sized(first=b"POST http://y:80/v2/x HTTP/1.1"), headers=(*SIZED, ("host", "y:80"))
    ),
    "a body that is not waited for": Accepted(
        _sized(b"Expect: 100-continue"), headers=(*SIZED, ("expect", None))
    ),
    "empty lines before it": Accepted(b"\r\n\r\n" + _sized(), headers=SIZED),
    "chunks": Accepted(_coded(chunked(INNER)), headers=CHUNKED),
    "chunked in capitals": Accepted(
        _coded(chunked(INNER), b"TRANSFER-ENCODING: CHUNKED"), headers=CHUNKED
    ),
    "a coding that Connection names": Accepted(
        _coded(chunked(INNER), b"Connection: transfer-encoding", b"Transfer-Encoding: chunked"),
        headers=CHUNKED,
    ),
    "extensions": Accepted(
        _coded(b'%x;a;b=c;d="e"\r\n' % SIZE + INNER + b"\r\n0;a\r\n\r\n"),
        headers=CHUNKED,
    ),
    "trailers": Accepted(
        _coded(chunk(INNER) + b"0\r\nX-Trailer: y\r\nHost: z\r\nConnection: close\r\n\r\n"),
        headers=(*CHUNKED, ("x-trailer", None), ("trailer", None), ("host", "x")),
    ),
    "no chunks": Accepted(_coded(chunked()), body=b"", headers=CHUNKED),
}
