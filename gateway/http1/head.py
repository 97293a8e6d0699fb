"""Parses and encodes the heads of HTTP/1.1 messages: RFC 9112, sections 2 to 6.

httptools parses with llhttp. This module rejects heads that llhttp accepts and that the gateway
must not forward.
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
"""Maximum bytes of a head."""

_MAX_HEADERS = 128
"""Maximum number of header lines."""

MAX_CACHED_HEAD = 2048
"""Maximum bytes of a cached head. Most heads repeat, and a cached one needs no parsing."""

_MAX_LENGTH_DIGITS = 20
"""Maximum digits of a Content-Length."""

_END = b"\r\n\r\n"
_STATUSES_WITHOUT_BODY = (204, 304)
ABSOLUTE_FORM = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
"""The start of a request target in absolute form: RFC 9112, section 3.2.2."""

# RFC 3986, section 3.2: a host and a port. RFC 9110, section 4.2.4, forbids user names.
_AUTHORITY = re.compile(
    r"(?:\[[0-9A-Za-z:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?", re.ASCII
)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class MalformedError(ValueError):
    """The received bytes are not valid HTTP/1.1; the message says why."""


class HeadTooLargeError(MalformedError):
    """A head of more than ``MAX_HEAD`` bytes."""

    def __init__(self) -> None:
        super().__init__(f"a head of more than {MAX_HEAD} bytes")


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """The head of a request; compared by identity, because small heads are cached.

    ``length`` is that of the body in bytes: 0 without a body, None if it is chunked.
    """

    method: str
    target: str
    http_1_0: bool
    headers: CIMultiDictProxy[str]
    length: int | None
    keep_alive: bool


@dataclass(frozen=True, slots=True, eq=False)
class ResponseHead:
    """The head of a response; compared by identity, because small heads are cached.

    ``length`` is that of the body in bytes, None if it is chunked or ends with the connection.
    """

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    length: int | None
    chunked: bool
    keep_alive: bool


class HeadReader:
    """Collects the bytes of a head until it is complete.

    ``parser`` is the class that validates a partial head, so that garbage is rejected early.
    """

    def __init__(self, parser: type[HttpRequestParser | HttpResponseParser]) -> None:
        self._parser = parser
        self._validator: HttpRequestParser | HttpResponseParser | None = None
        self._received = b""

    @property
    def started(self) -> bool:
        """Whether a part of a head was received."""
        return bool(self._received)

    @property
    def size(self) -> int:
        """The received bytes of a partial head."""
        return len(self._received)

    def reset(self) -> None:
        """Drop a partial head."""
        self._received, self._validator = b"", None

    def feed(self, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview] | None:
        """Add received data; return the complete head and the bytes after it, None before that.

        Raises MalformedError.
        """
        if not self._received:
            # Usually the head is complete. Large data after it is not copied.
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
            self._received, self._validator = b"", None
            end += len(_END)
            return received[:end], received[end:]
        if len(received) >= MAX_HEAD:
            raise HeadTooLargeError
        self._validate(data)
        self._received = received
        return None

    def _validate(self, data: bytes | memoryview) -> None:
        if self._validator is None:
            self._validator = self._parser(object())
        try:
            self._validator.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise _malformed_error(error) from None


class _ParsedHead:
    """The callbacks and results of the parser."""

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
        # Latin-1 preserves every byte.
        self.headers.add(name.decode("latin-1"), value.rstrip(b" \t").decode("latin-1"))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_request_head(head: bytes) -> RequestHead:
    """Parse the head of a request, including the empty line at its end.

    Raises MalformedError.
    """
    return _request_head(head) if len(head) <= MAX_CACHED_HEAD else _request_head.__wrapped__(head)


@lru_cache(maxsize=CACHED_HEADS)
def _request_head(head: bytes) -> RequestHead:
    fields = _ParsedHead()
    parser = HttpRequestParser(fields)
    version = _parse(parser, fields, head)
    headers = fields.headers
    target = fields.target.decode("latin-1")
    _set_host(target, version, headers)
    chunked = _is_chunked(headers)
    if chunked and version == "1.0":
        raise MalformedError("Transfer-Encoding in HTTP/1.0")
    method = parser.get_method().decode("latin-1")
    if method == "CONNECT":
        # The bytes after it are for the tunnel, and must not be parsed as a request.
        raise MalformedError(f"CONNECT {target[:80]}: tunnels are not supported")
    return RequestHead(
        method=method,
        target=target,
        http_1_0=version == "1.0",
        headers=CIMultiDictProxy(headers),
        length=None if chunked else _parse_length(headers.get("Content-Length", "0")),
        keep_alive=_is_keep_alive(version, headers),
    )


def parse_response_head(head: bytes, method: str) -> ResponseHead:
    """Parse the head of a response to a request of this method.

    Raises MalformedError.
    """
    if len(head) <= MAX_CACHED_HEAD:
        return _response_head(head, method)
    return _response_head.__wrapped__(head, method)


@lru_cache(maxsize=CACHED_HEADS)
def _response_head(head: bytes, method: str) -> ResponseHead:
    fields = _ParsedHead()
    parser = HttpResponseParser(fields)
    version = _parse(parser, fields, head)
    headers = fields.headers
    if _CONTROL.search(fields.reason):
        raise MalformedError("control characters in the reason phrase")
    status = parser.get_status_code()
    if status < 100:
        raise MalformedError(f"status {status}")
    chunked = _is_chunked(headers)
    length = headers.get("Content-Length")
    if method == "HEAD" or status in _STATUSES_WITHOUT_BODY or status < 200:
        length, chunked = "0", False
    return ResponseHead(
        status=status,
        reason=fields.reason.decode("latin-1"),
        headers=CIMultiDictProxy(headers),
        length=None if length is None else _parse_length(length),
        chunked=chunked,
        # RFC 9112, section 6.1: with HTTP/1.0, the end of a chunked body may be misframed.
        keep_alive=_is_keep_alive(version, headers) and not (chunked and version == "1.0"),
    )


def encode_head(first_line: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode a head; names and values must be valid."""
    return encode_head_lines(first_line, headers) + b"\r\n"


def encode_head_lines(first_line: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode a head without the empty line at its end, so that lines can be added."""
    lines = [first_line, *[f"{name}: {value}" for name, value in headers], ""]
    return "\r\n".join(lines).encode("latin-1")


def _parse(parser: HttpRequestParser | HttpResponseParser, fields: _ParsedHead, head: bytes) -> str:
    """Parse a head; return its HTTP version."""
    if b"HTTP/" not in head.partition(b"\r\n")[0]:
        raise MalformedError("this is not HTTP")  # llhttp accepts RTSP, too
    try:
        parser.feed_data(head)
    except (HttpParserError, HttpParserUpgrade) as error:
        # RFC 9110, section 7.8: a server may ignore Upgrade.
        if not fields.complete:
            raise _malformed_error(error) from None
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise MalformedError("only HTTP/1.1 and HTTP/1.0 are supported")
    if len(fields.headers) > _MAX_HEADERS:
        raise MalformedError(f"more than {_MAX_HEADERS} headers")
    return version


def _malformed_error(error: HttpParserError | HttpParserUpgrade) -> MalformedError:
    if isinstance(error, HttpParserInvalidMethodError | HttpParserUpgrade):
        return MalformedError("this is not HTTP")
    return MalformedError(str(error))


def _set_host(target: str, version: str, headers: CIMultiDict[str]) -> None:
    """Check Host; a host in the target replaces it: RFC 9112, section 3.2."""
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
            raise MalformedError(f"invalid host and port: {host[:80]!r}")


def _parse_length(digits: str) -> int:
    if len(digits) > _MAX_LENGTH_DIGITS:
        raise MalformedError(f"a Content-Length of {len(digits)} digits")
    return int(digits)


def _is_chunked(headers: CIMultiDict[str]) -> bool:
    codings = headers.getall("Transfer-Encoding", None)
    if codings is None:
        return False
    if len(codings) > 1 or codings[0].lower() != "chunked":
        raise MalformedError("a Transfer-Encoding other than chunked")
    return True


def _is_keep_alive(version: str, headers: CIMultiDict[str]) -> bool:
    """Whether the connection stays open after the message: RFC 9112, section 9.3."""
    options = headers.getall("Connection", None)
    if options is None:
        return version == "1.1"
    words = {word.strip().lower() for word in ",".join(options).split(",")}
    return "close" not in words and (version == "1.1" or "keep-alive" in words)
