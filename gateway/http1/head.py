"""The heads of HTTP/1.1 messages: RFC 9112, sections 2 to 6.

llhttp, by way of httptools, says what is a head. What it takes and the gateway does not pass on is
refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from httptools import (
    HttpParserError,
    HttpParserInvalidMethodError,
    HttpParserUpgrade,
    HttpRequestParser,
    HttpResponseParser,
)
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.sizes import CACHED_HEADS

MAX_HEAD = 64 * 1024
"""Bytes of a head at most."""

_MAX_FIELDS = 128
"""Lines of headers at most."""

MAX_CACHED_HEAD = 2048
"""Bytes of a head that is remembered: whoever sends the same again is given the same object."""

_LONGEST_LENGTH = 20
"""Digits of a Content-Length at most."""

_END = b"\r\n\r\n"
_NO_BODY = (204, 304)
ABSOLUTE_FORM = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
"""How a request target begins that is a URL: RFC 9112, section 3.2.2."""

# RFC 3986, section 3.2: a name or an address, and a port; without user names, as RFC 9110 wants it.
_AUTHORITY = re.compile(
    r"(?:\[[0-9A-Za-z:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?", re.ASCII
)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class MalformedError(ValueError):
    """What came is not HTTP/1.1; the message says what of it."""


class HeadTooLargeError(MalformedError):
    """A head of more than ``MAX_HEAD`` bytes."""

    def __init__(self) -> None:
        super().__init__(f"a head of more than {MAX_HEAD} bytes")


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """What comes before a request's body; compared by identity, as small ones are remembered.

    ``length`` is the body's, in bytes, 0 where there is none, None where it is chunked.
    """

    method: str
    target: str
    http_1_0: bool
    headers: CIMultiDictProxy[str]
    length: int | None
    keep_alive: bool


@dataclass(frozen=True, slots=True, eq=False)
class ResponseHead:
    """What comes before an answer's body; compared by identity, as small ones are remembered.

    ``length`` is the body's, in bytes, None where it is chunked or lasts until the server closes.
    """

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    length: int | None
    chunked: bool
    keep_alive: bool


class HeadReader:
    """Takes a head as it arrives.

    ``parser`` makes the parser that tells early where what comes is no head.
    """

    def __init__(self, parser: type[HttpRequestParser | HttpResponseParser]) -> None:
        self._parser = parser
        self._early: HttpRequestParser | HttpResponseParser | None = None
        self._received = b""

    @property
    def begun(self) -> bool:
        """Tell whether a part of a head is there."""
        return bool(self._received)

    @property
    def size(self) -> int:
        """Give the bytes that are there of a head that is not whole."""
        return len(self._received)

    def forget(self) -> None:
        """Drop what is there of a head that is not whole."""
        self._received, self._early = b"", None

    def feed(self, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview] | None:
        """Give the whole head and what follows it; None while it is not whole.

        Raises MalformedError.
        """
        if not self._received:
            # Most often the head comes whole, and what follows it, if large, need not be copied.
            start = bytes(data[:MAX_CACHED_HEAD])
            end = start.find(_END)
            if end >= 0 and start[0] not in _END:
                end += len(_END)
                rest = data[end:] if len(data) <= MAX_CACHED_HEAD else memoryview(data)[end:]
                return start[:end], rest
            data = bytes(data).lstrip(b"\r\n")  # RFC 9112, section 2.2
        before = len(self._received)
        received = self._received + data
        end = received.find(_END, max(0, before - len(_END)), MAX_HEAD)
        if end >= 0:
            self._received, self._early = b"", None
            end += len(_END)
            return received[:end], received[end:]
        if len(received) >= MAX_HEAD:
            raise HeadTooLargeError
        self._check(data)
        self._received = received
        return None

    def _check(self, data: bytes | memoryview) -> None:
        if self._early is None:
            self._early = self._parser(object())
        try:
            self._early.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise _malformed(error) from None


class _Fields:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.target = b""
        self.reason = b""
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        # As Latin-1, every byte goes out again as it came in.
        self.headers.add(name.decode("latin-1"), value.rstrip(b" \t").decode("latin-1"))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_request_head(head: bytes) -> RequestHead:
    """Read the head of a request, up to and including the empty line.

    Raises MalformedError.
    """
    return _request_head(head) if len(head) <= MAX_CACHED_HEAD else _request_head.__wrapped__(head)


@lru_cache(maxsize=CACHED_HEADS)
def _request_head(head: bytes) -> RequestHead:
    fields = _Fields()
    parser = HttpRequestParser(fields)
    version = _parse(parser, fields, head)
    headers = fields.headers
    target = fields.target.decode("latin-1")
    _settle_host(target, version, headers)
    chunked = _chunked(headers)
    if chunked and version == "1.0":
        raise MalformedError("Transfer-Encoding in HTTP/1.0")
    method = parser.get_method().decode("latin-1")
    if method == "CONNECT":
        # What follows is meant for the tunnel, and is never to be taken for a request.
        raise MalformedError(f"CONNECT {target[:80]}: there are no tunnels here")
    return RequestHead(
        method=method,
        target=target,
        http_1_0=version == "1.0",
        headers=CIMultiDictProxy(headers),
        length=None if chunked else _length(headers.get("Content-Length", "0")),
        keep_alive=_keep_alive(version, headers),
    )


def parse_response_head(head: bytes, method: str) -> ResponseHead:
    """Read the head of an answer to a request of this method.

    Raises MalformedError.
    """
    if len(head) <= MAX_CACHED_HEAD:
        return _response_head(head, method)
    return _response_head.__wrapped__(head, method)


@lru_cache(maxsize=CACHED_HEADS)
def _response_head(head: bytes, method: str) -> ResponseHead:
    fields = _Fields()
    parser = HttpResponseParser(fields)
    version = _parse(parser, fields, head)
    headers = fields.headers
    if _CONTROL.search(fields.reason):
        raise MalformedError("control characters in the reason phrase")
    status = parser.get_status_code()
    if status < 100:
        raise MalformedError(f"status {status}")
    chunked = _chunked(headers)
    length = headers.get("Content-Length")
    if method == "HEAD" or status in _NO_BODY or status < 200:
        length, chunked = "0", False
    return ResponseHead(
        status=status,
        reason=fields.reason.decode("latin-1"),
        headers=CIMultiDictProxy(headers),
        length=None if length is None else _length(length),
        chunked=chunked,
        # RFC 9112, section 6.1: who says 1.0 may not know where a chunked body ends.
        keep_alive=_keep_alive(version, headers) and not (chunked and version == "1.0"),
    )


def encode_head(first_line: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Write a head; names and values must be such as can be sent."""
    return encode_head_lines(first_line, headers) + b"\r\n"


def encode_head_lines(first_line: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Write a head but for the empty line at its end: more lines may follow."""
    lines = [first_line, *[f"{name}: {value}" for name, value in headers], ""]
    return "\r\n".join(lines).encode("latin-1")


def _parse(parser: HttpRequestParser | HttpResponseParser, fields: _Fields, head: bytes) -> str:
    """Collect the fields of a head; give its version."""
    if b"HTTP/" not in head.partition(b"\r\n")[0]:
        raise MalformedError("this is not HTTP")  # but RTSP, say, which the parser knows too
    try:
        parser.feed_data(head)
    except (HttpParserError, HttpParserUpgrade) as error:
        # RFC 9110, section 7.8: a wish for another protocol may be ignored.
        if not fields.complete:
            raise _malformed(error) from None
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise MalformedError("only HTTP/1.1 and HTTP/1.0 are spoken here")
    if len(fields.headers) > _MAX_FIELDS:
        raise MalformedError(f"more than {_MAX_FIELDS} headers")
    return version


def _malformed(error: HttpParserError | HttpParserUpgrade) -> MalformedError:
    if isinstance(error, HttpParserInvalidMethodError | HttpParserUpgrade):
        return MalformedError("this is not HTTP")
    return MalformedError(str(error))


def _settle_host(target: str, version: str, headers: CIMultiDict[str]) -> None:
    """Leave one Host, that of the target if there is one there: RFC 9112, section 3.2."""
    hosts = headers.getall("Host", [])
    if len(hosts) > 1:
        raise MalformedError("more than one Host")
    if not hosts and version == "1.1":
        raise MalformedError("no Host")
    if absolute := ABSOLUTE_FORM.match(target):
        if not absolute[1]:
            raise MalformedError("a request target without a host")
        hosts.append(absolute[1])
        headers["Host"] = absolute[1]
    for host in hosts:
        if not _AUTHORITY.fullmatch(host):
            raise MalformedError(f"no host and port: {host[:80]!r}")


def _length(digits: str) -> int:
    if len(digits) > _LONGEST_LENGTH:
        raise MalformedError(f"a Content-Length of {len(digits)} digits")
    return int(digits)


def _chunked(headers: CIMultiDict[str]) -> bool:
    codings = headers.getall("Transfer-Encoding", None)
    if codings is None:
        return False
    if len(codings) > 1 or codings[0].lower() != "chunked":
        raise MalformedError("a Transfer-Encoding other than chunked")
    return True


def _keep_alive(version: str, headers: CIMultiDict[str]) -> bool:
    """Tell whether the connection stays open after the message: RFC 9112, section 9.3."""
    options = headers.getall("Connection", None)
    if options is None:
        return version == "1.1"
    words = {word.strip().lower() for word in ",".join(options).split(",")}
    return "close" not in words and (version == "1.1" or "keep-alive" in words)
