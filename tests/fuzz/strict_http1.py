"""A strict reader of HTTP/1.1 requests: what RFC 9112 lets a server see in a stream of bytes.

It is slow, plain and independent of the gateway and of any library. Where the RFC leaves a choice,
it refuses, but for what says nothing of where a message ends: empty lines before a request, more
than one space between the words of its first line, bytes beyond ASCII in its target, and the order
of the parts of a chunk's extension.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_HEAD = 64 * 1024
MAX_FIELDS = 128
"""Of a client's request; for the server, the gateway adds some."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIRST = re.compile(rb"(%s) +([!-~\x80-\xff]+) +HTTP/1\.([01])" % _TOKEN)
_FIELD = re.compile(rb"(%s):[ \t]*((?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)[ \t]*" % _TOKEN)
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_CHUNK = re.compile(rb"([0-9A-Fa-f]+)(?:;(?:[;=]|%s|%s)*)?" % (_TOKEN, _QUOTED))
# RFC 3986, section 3.2, without user names.
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)

Fields = list[tuple[bytes, bytes]]


class RefusedError(ValueError):
    """What came is no HTTP/1.1 request."""


@dataclass(frozen=True)
class Request:
    """A request, whole; ``size`` is that of all of it as it came."""

    method: bytes
    target: bytes
    fields: Fields
    body: bytes
    size: int
    last: bool
    """Nothing that follows on its connection is a request."""

    @property
    def path(self) -> bytes | None:
        """Return its path and query; None where it asks for no resource of a server."""
        path = self.target
        if absolute := _ABSOLUTE.fullmatch(path):
            path = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
        return path if path.startswith(b"/") and b"#" not in path else None


@dataclass
class Reading:
    """All requests of a stream, and how it ends: ``open``, ``last``, ``refused`` or ``cut``."""

    requests: list[Request] = field(default_factory=list)
    end: str = "open"


def read_all(stream: bytes) -> Reading:
    """Read a stream to its end, or to where nothing more is a request."""
    reading = Reading()
    while stream := stream.lstrip(b"\r\n"):
        try:
            request = next_request(stream)
        except RefusedError:
            reading.end = "refused"
            return reading
        if request is None:
            reading.end = "cut"
            return reading
        if len(request.fields) > MAX_FIELDS:
            reading.end = "refused"
            return reading
        reading.requests.append(request)
        if request.last:
            reading.end = "last"
            return reading
        stream = stream[request.size :]
    return reading


def next_request(stream: bytes) -> Request | None:
    """Read the request at the start of a stream; None where it is not whole.

    Raises RefusedError.
    """
    start = len(stream) - len(stream.lstrip(b"\r\n"))
    end = stream.find(b"\r\n\r\n", start)
    if end < 0 or end - start >= MAX_HEAD:
        if len(stream) - start >= MAX_HEAD:
            raise RefusedError("a long head")
        return None
    first, *lines = stream[start:end].split(b"\r\n")
    words = _FIRST.fullmatch(first)
    if not words or words[1] == b"CONNECT":
        raise RefusedError("no request line")
    fields = read_fields(lines)
    _check_host(words[2], words[3], fields)
    rest = end + 4
    if (length := _length(fields, words[3])) is None:
        found = chunked(stream, rest)
        if found is None:
            return None
        body, rest = found
    elif len(stream) - rest < length:
        return None
    else:
        body, rest = stream[rest : rest + length], rest + length
    return Request(words[1], words[2], fields, body, rest, _is_last(fields, words[3]))


def read_fields(lines: list[bytes]) -> Fields:
    """Read the lines of a head, or of a trailer; raises RefusedError."""
    found: Fields = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if not match:
            raise RefusedError(f"no field: {line[:80]!r}")
        found.append((match[1].lower(), match[2]))
    return found


def all_of(fields: Fields, name: bytes) -> list[bytes]:
    """Return every value of a field, by its name in lower case."""
    return [value for each, value in fields if each == name]


def _check_host(target: bytes, version: bytes, fields: Fields) -> None:
    hosts = all_of(fields, b"host")
    if len(hosts) > 1 or (version == b"1" and not hosts):
        raise RefusedError("not one Host")
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute:
        if not absolute[1]:
            raise RefusedError("a URL without a host")
        hosts.append(absolute[1])
    if not all(map(_HOST.fullmatch, hosts)):
        raise RefusedError("no host")


def _length(fields: Fields, version: bytes) -> int | None:
    """Return the size of the body, None where it is chunked."""
    codings = all_of(fields, b"transfer-encoding")
    lengths = all_of(fields, b"content-length")
    if codings:
        if lengths or version == b"0" or [each.lower() for each in codings] != [b"chunked"]:
            raise RefusedError("a coding in doubt")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,20}", lengths[0]):
        raise RefusedError("a length in doubt")
    return int(lengths[0])


def chunked(stream: bytes, at: int) -> tuple[bytes, int] | None:
    """Return a chunked body and where it ends; None where it is not whole; raises RefusedError."""
    parts: list[bytes] = []
    while True:
        end = stream.find(b"\r\n", at)
        if end < 0:
            return None
        match = _CHUNK.fullmatch(stream, at, end)
        if not match:
            raise RefusedError("no chunk size")
        size = int(match[1], 16)
        at = end + 2
        if not size:
            return _trailers(stream, at, b"".join(parts))
        parts.append(stream[at : at + size])
        at += size
        if stream[at : at + 2] != b"\r\n":
            if b"\r\n".startswith(stream[at : at + 2]):
                return None
            raise RefusedError("no line end behind a chunk")
        at += 2


def _trailers(stream: bytes, at: int, body: bytes) -> tuple[bytes, int] | None:
    lines = []
    while (end := stream.find(b"\r\n", at)) != at:
        if end < 0:
            return None
        lines.append(stream[at:end])
        at = end + 2
    names = {name for name, _ in read_fields(lines)}
    if names & {b"content-length", b"transfer-encoding"}:
        raise RefusedError("a trailer that tells of the body")
    return body, at + 2


def _is_last(fields: Fields, version: bytes) -> bool:
    options = b",".join(all_of(fields, b"connection")).lower().split(b",")
    words = {option.strip(b" \t") for option in options}
    return b"close" in words or (version == b"0" and b"keep-alive" not in words)
