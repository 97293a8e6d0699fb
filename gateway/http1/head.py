"""Collects, parses and encodes the heads of HTTP/1.1 messages: RFC 9112, sections 2 to 6.

A head that could be read in two ways is rejected, also where the RFC lets a server be lenient.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http1 import native
from gateway.sizes import CACHED_LINES, QUOTED_NAME
from gateway.system.bounded_cache import BoundedCache

MAX_HEAD: Final = 64 * 1024
"""Maximum bytes of a head."""

MAX_CACHED_HEAD: Final = 2048
"""Maximum bytes of a cached head."""

_MAX_HEADERS: Final = 128
"""Maximum number of header lines."""

_MAX_CACHED_LINE: Final = 256
"""Maximum bytes of a cached line. With ``CACHED_LINES`` of them, a cache takes 3 MB at most."""

_MAX_CACHED_NAME: Final = 64
"""Maximum bytes of a cached header name."""

_CACHED_FIELDS: Final = 64
"""Cached headers of whole heads. With ``_MAX_CACHED_FIELDS`` each, they take 5 MB at most."""

_MAX_CACHED_FIELDS: Final = 32
"""Maximum lines of a head whose headers are cached."""

_CHECKED_START: Final = 256
"""Bytes of an incomplete line that are checked. Each read checks them again."""

_HEAD_END: Final = b"\r\n\r\n"

_MAX_LENGTH_DIGITS: Final = 20
"""Maximum digits of a Content-Length."""

_MAX_LENGTH: Final = 2**64 - 1
"""Maximum Content-Length: larger ones overflow in other servers."""

METHODS: Final = frozenset(
    b"ACL BIND CHECKOUT CONNECT COPY DELETE GET HEAD LINK LOCK M-SEARCH MERGE MKACTIVITY MKCALENDAR"
    b" MKCOL MOVE NOTIFY OPTIONS PATCH POST PROPFIND PROPPATCH PURGE PUT QUERY REBIND REPORT SEARCH"
    b" SOURCE SUBSCRIBE TRACE UNBIND UNLINK UNLOCK UNSUBSCRIBE".split()
)
"""The known methods: those of Node.js. Another first word is most likely another protocol."""

ABSOLUTE_FORM: Final = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
"""The start of a request target in absolute form: RFC 9112, section 3.2.2."""

STATUSES_WITHOUT_BODY: Final = (204, 304)
"""Their responses have no body, whatever their headers say: RFC 9112, section 6.3."""

# RFC 9110, section 5.6.2.
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# RFC 9110, section 5.5: all but a tab. A value never spans lines: RFC 9112, section 5.2.
_CR: Final = ord("\r")
_SPACE: Final = ord(" ")
_CONTROLS: Final = bytes([*range(9), *range(10, 32), 127])
# A path or *, or a URL whose authority has only characters of RFC 3986, section 3.2.
_TARGET: Final = rb"[/*][!-~]*|[A-Za-z]+://(?:@?[A-Za-z0-9._~!$&'()*+,;=:%\[\]-])*@?(?:[/?][!-~]*)?"
_REQUEST_LINE: Final = re.compile(rb"([A-Z-]+) +(%s) +HTTP/1\.([01])\r" % _TARGET)
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t -~\x80-\xff]*))?\r")
_OTHER_VERSION: Final = re.compile(rb"\bHTTP/(?!1\.[01](?![0-9.]))[0-9]")
# RFC 3986, section 3.2: a host and a port. RFC 9110, section 4.2.4, forbids user names.
_AUTHORITY: Final = re.compile(
    r"(?:\[[0-9A-Za-z:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?", re.ASCII
)

# How a header is classified by its name: see HeadParser.
_PASSED: Final = 0
_KEYED: Final = 1
_NOTED: Final = 2  # together with _KEYED: both

# What a header line means for the framing of its message, and for the connection.
_NOTHING: Final = 0
_HOST: Final = 1
_INVALID_HOST: Final = 2  # only requests are rejected for it
_LENGTH: Final = 3
_CHUNKED: Final = 4
_CLOSE: Final = 5
_KEEP_ALIVE: Final = 6
_KEEP_ALIVE_TIMEOUT: Final = 7

_NO_CRLF: Final = "a line that does not end with CRLF"
_TWO_FRAMINGS: Final = "Content-Length beside Transfer-Encoding"

_FRAMING_NAMES: Final = ("host", "content-length", "transfer-encoding", "connection", "keep-alive")

# Not of an RFC, but Node.js, Apache and nginx send it: "timeout=5, max=100".
_TIMEOUT_PARAMETER: Final = re.compile(r"(?:^|[,;\s])timeout\s*=\s*\"?([0-9]{1,9})", re.IGNORECASE)


class MalformedError(ValueError):
    """The received bytes are not valid HTTP/1.1; the message says why."""


class AnotherProtocolError(MalformedError):
    """A whole first line that has neither a method nor a version: its sender speaks no HTTP."""


class _HeaderName:
    """The name of a header: as it came, in lower case, and what it means to a parser."""

    def __init__(self, text: str, lower: str, handling: int) -> None:
        self.text: Final = text
        self.lower: Final = lower
        self.handling: Final = handling
        self.frames: Final = lower in _FRAMING_NAMES


class HeaderField:
    """A header line; immutable, as those that repeat are cached.

    ``name`` and ``value`` are as they came, without the white space around the value; latin-1
    preserves every byte. ``lower`` is the name in lower case. ``line`` is the whole line, with its
    CRLF. ``handling`` and ``meaning`` are for the parser.
    """

    def __init__(
        self, name: str, lower: str, value: str, line: bytes, handling: int, meaning: int
    ) -> None:
        self.name: Final = name
        self.lower: Final = lower
        self.value: Final = value
        self.line: Final = line
        self.handling: Final = handling
        self.meaning: Final = meaning


class RequestLine:
    """The first line of a request; ``host`` is that of a target in absolute form."""

    def __init__(self, line: bytes, method: str, target: str, http_1_0: bool, host: str) -> None:
        self.line: Final = line
        self.method: Final = method
        self.target: Final = target
        self.http_1_0: Final = http_1_0
        self.host: Final = host


class StatusLine:
    """The first line of a response."""

    def __init__(self, line: bytes, http_1_0: bool, status: int, reason: str) -> None:
        self.line: Final = line
        self.http_1_0: Final = http_1_0
        self.status: Final = status
        self.reason: Final = reason


class HeaderFields:
    """The headers of a message, and what they say of it; those of equal heads share one object.

    Raises MalformedError if they contradict each other.
    """

    def __init__(self, fields: list[HeaderField]) -> None:
        self.all: Final = tuple(fields)
        self.length: int | None = None
        self.chunked = False
        self.hosts = 0
        self.has_invalid_host = False
        self.close = False
        self.asks_keep_alive = False
        self.keep_alive_timeout: float | None = None
        keyed: list[bytes] = []
        noted: list[HeaderField] = []
        passed: list[bytes] = []
        for field in fields:
            handling = field.handling
            if handling == _PASSED:
                passed.append(field.line)
            else:
                if handling & _KEYED:
                    keyed.append(field.line)
                if handling & _NOTED:
                    noted.append(field)
            if field.meaning:
                self._frame(field)
        self.keyed: Final = tuple(keyed)
        self.noted: Final = tuple(noted)
        self.passed: Final = b"".join(passed)

    def note(self, values: list[str | bytes]) -> tuple[HeaderField, ...]:
        """Return the noted fields with other values; for each not keyed, that and its line.

        Raises MalformedError.
        """
        noted: list[HeaderField] = []
        number = 0
        for field in self.noted:
            if field.handling == _NOTED:
                value, line = values[number], values[number + 1]
                number += 2
                assert isinstance(value, str)
                assert isinstance(line, bytes)
                meaning = _meaning_of(field.lower, value) if field.meaning else _NOTHING
                field = HeaderField(field.name, field.lower, value, line, _NOTED, meaning)
            noted.append(field)
        return tuple(noted)

    def length_in(self, noted: tuple[HeaderField, ...]) -> int | None:
        """Return the length of a body, as noted fields or else the others say."""
        for field in noted:
            if field.meaning == _LENGTH:
                return int(field.value)
        return self.length

    def _frame(self, field: HeaderField) -> None:
        """Take in a field that says how the message is framed."""
        meaning = field.meaning
        if meaning == _LENGTH:
            if self.length is not None:
                raise MalformedError("more than one Content-Length")
            if self.chunked:
                raise MalformedError(_TWO_FRAMINGS)
            self.length = int(field.value)
        elif meaning == _CHUNKED:
            if self.chunked:
                raise MalformedError("more than one Transfer-Encoding")
            if self.length is not None:
                raise MalformedError(_TWO_FRAMINGS)
            self.chunked = True
        elif meaning == _CLOSE:
            self.close = True
        elif meaning == _KEEP_ALIVE:
            self.asks_keep_alive = True
        elif meaning == _KEEP_ALIVE_TIMEOUT:
            match = _TIMEOUT_PARAMETER.search(field.value)
            self.keep_alive_timeout = None if match is None else float(match[1])
        else:
            self.hosts += 1
            self.has_invalid_host |= meaning == _INVALID_HOST


class MessageHead:
    """What the heads of requests and responses have in common.

    Two heads of one parser with the same ``key`` differ in ``noted`` and ``passed`` alone.
    ``passed`` is the passed lines as they came. ``noted`` and ``length`` replace those of
    ``fields``.
    """

    def __init__(
        self,
        first_line: bytes,
        http_1_0: bool,
        fields: HeaderFields,
        noted: tuple[HeaderField, ...],
        length: int | None,
    ) -> None:
        self.http_1_0 = http_1_0
        self.length = length
        self.chunked = fields.chunked
        self.keep_alive_timeout = fields.keep_alive_timeout
        """Seconds after which the sender closes the idle connection; None if it does not say."""
        self._fields = fields
        self._headers: CIMultiDictProxy[str] | None = None
        self.key = (first_line, *fields.keyed)
        self.noted = noted
        self.passed = fields.passed
        # RFC 9112, section 9.3.
        self.keep_alive = not fields.close and (not http_1_0 or fields.asks_keep_alive)

    @property
    def fields(self) -> list[HeaderField]:
        """All fields in order."""
        noted = iter(self.noted)
        return [next(noted) if each.handling & _NOTED else each for each in self._fields.all]

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The fields by name; they are collected at the first access."""
        if self._headers is None:
            pairs = [(field.name, field.value) for field in self.fields]
            self._headers = CIMultiDictProxy(CIMultiDict(pairs))
        return self._headers

    @property
    def keyed_headers(self) -> list[tuple[str, str]]:
        """The names and values of the keyed fields."""
        return [(field.name, field.value) for field in self.fields if field.handling & _KEYED]


class RequestHead(MessageHead):
    """The head of a request; compared by identity.

    ``length`` is that of the body in bytes: 0 without a body, None if it is chunked. A host in the
    target has replaced that of Host (RFC 9112, section 3.2.2).
    """

    def __init__(
        self,
        first: RequestLine,
        fields: HeaderFields,
        noted: tuple[HeaderField, ...],
        length: int | None,
        parser: HeadParser,
    ) -> None:
        super().__init__(first.line, first.http_1_0, fields, noted, length)
        self.parser = parser
        """Its parser: keys of heads of different parsers must not be compared."""
        self._first = first
        self.method = first.method
        self.target = first.target
        if fields.hosts != 1 and (fields.hosts or not first.http_1_0):
            raise MalformedError("more than one Host" if fields.hosts else "no Host")
        if self.chunked and first.http_1_0:
            raise MalformedError("Transfer-Encoding in HTTP/1.0")
        if self.length is None and not self.chunked:
            self.length = 0

    def with_noted(self, values: list[str | bytes]) -> RequestHead:
        """Return a head with other values of the fields that are noted alone; see ``note``."""
        fields = self._fields
        noted = fields.note(values)
        return RequestHead(self._first, fields, noted, fields.length_in(noted), self.parser)


class ResponseHead(MessageHead):
    """The head of a response; compared by identity.

    ``length`` is that of the body in bytes, None if it is chunked or ends with the connection.
    """

    def __init__(
        self,
        first: StatusLine,
        method: str,
        fields: HeaderFields,
        noted: tuple[HeaderField, ...],
        length: int | None,
    ) -> None:
        super().__init__(first.line, first.http_1_0, fields, noted, length)
        self.status = status = first.status
        self.reason = first.reason
        if status < 200 or method == "HEAD" or status in STATUSES_WITHOUT_BODY:
            self.length, self.chunked = 0, False
        elif self.chunked and first.http_1_0:
            # RFC 9112, section 6.1: with HTTP/1.0, the end of a chunked body may be misframed.
            self.keep_alive = False


_request_lines: Final[BoundedCache[bytes, RequestLine]] = BoundedCache(CACHED_LINES)
_status_lines: Final[BoundedCache[bytes, StatusLine]] = BoundedCache(CACHED_LINES)


class HeadParser:
    """Parses heads line by line, and caches the lines, as most of them repeat.

    Each header is classified by its name in lower case. ``keyed`` are those whose value decides how
    the message is handled. ``noted`` are read from each message; they mostly differ, and are not
    cached unless they are keyed, too. All others are ``passed`` on. Of the headers that frame a
    message, only Content-Length may be noted alone.

    The headers of whole heads are cached, too, by their text without the values of noted ones.
    """

    def __init__(self, keyed: Collection[str] = (), noted: Collection[str] = ()) -> None:
        self._handling = dict.fromkeys(keyed, _KEYED)
        for name in noted:
            self._handling[name] = self._handling.get(name, _PASSED) | _NOTED
        alone = [name.encode() for name, each in self._handling.items() if each == _NOTED]
        self._noted_names: tuple[bytes, ...] = tuple(alone)
        self.noted_names: Final = frozenset(alone)
        """Names of headers that are noted alone."""
        self._known: BoundedCache[bytes, HeaderField] = BoundedCache(CACHED_LINES)
        self._names: BoundedCache[bytes, _HeaderName] = BoundedCache(CACHED_LINES)
        self._fields: BoundedCache[bytes, HeaderFields] = BoundedCache(_CACHED_FIELDS)

    def parse_request(self, head: bytes) -> RequestHead:
        """Parse the head of a request, including the empty line at its end.

        Raises MalformedError.
        """
        text = b""
        if (split := self._split(head)) is not None:
            line, text, values = split
            known = self._fields.get(text)
            if known is not None and not (first := _read_request_line(line)).host:
                noted = known.note(values)
                return RequestHead(first, known, noted, known.length_in(noted), self)
        lines = _split_lines(head)
        first = _read_request_line(lines[0])
        fields = self._parse_fields(lines)
        for field in fields:
            if field.meaning == _INVALID_HOST:
                raise _invalid_host(field.value)
        if first.host:
            self._replace_host(fields, first)
            text = b""
        known = self._collect(fields, text)
        return RequestHead(first, known, known.noted, known.length, self)

    def parse_response(self, head: bytes, method: str) -> ResponseHead:
        """Parse the head of a response to a request of this method.

        Raises MalformedError.
        """
        text = b""
        if (split := self._split(head)) is not None:
            line, text, values = split
            if (known := self._fields.get(text)) is not None:
                first, noted = _read_status_line(line), known.note(values)
                return ResponseHead(first, method, known, noted, known.length_in(noted))
        lines = _split_lines(head)
        first = _read_status_line(lines[0])
        known = self._collect(self._parse_fields(lines), text)
        return ResponseHead(first, method, known, known.noted, known.length)

    def _split(self, head: bytes) -> tuple[bytes, bytes, list[str | bytes]] | None:
        """Return the first line of a head, and the text of its headers without noted values."""
        if len(head) > MAX_CACHED_HEAD:
            return None
        return native.split_head(head, self._noted_names)

    def _collect(self, fields: list[HeaderField], text: bytes) -> HeaderFields:
        """Return the headers of a head; they are cached by a text that is not empty."""
        collected = HeaderFields(fields)
        if text and len(fields) <= _MAX_CACHED_FIELDS and not collected.has_invalid_host:
            self._fields.put(text, collected)
        return collected

    def _parse_fields(self, lines: list[bytes]) -> list[HeaderField]:
        known = self._known.recent
        return [known.get(line) or self._parse_field(line) for line in lines[1:-2]]

    def _parse_field(self, line: bytes) -> HeaderField:
        """Parse a header line, with its CR; raises MalformedError."""
        raw_name, colon, raw_value = line.partition(b":")
        if not colon:
            raise _invalid_name(line.removesuffix(b"\r"))
        name = self._names.recent.get(raw_name) or self._parse_name(raw_name)
        if name.handling != _NOTED and (known := self._known.get(line)) is not None:
            return known
        value = _parse_value(raw_name, raw_value)
        meaning = _meaning_of(name.lower, value) if name.frames else _NOTHING
        field = HeaderField(name.text, name.lower, value, line + b"\n", name.handling, meaning)
        if name.handling != _NOTED and len(line) <= _MAX_CACHED_LINE:
            self._known.put(line, field)
        return field

    def _parse_name(self, raw_name: bytes) -> _HeaderName:
        if (known := self._names.get(raw_name)) is not None:
            return known
        if not _TOKEN.fullmatch(raw_name):
            raise _invalid_name(raw_name)
        text = raw_name.decode("ascii")
        lower = text.lower()
        name = _HeaderName(text, lower, self._handling.get(lower, _PASSED))
        if len(raw_name) <= _MAX_CACHED_NAME:
            self._names.put(raw_name, name)
        return name

    def _replace_host(self, fields: list[HeaderField], first: RequestLine) -> None:
        """Replace Host by the host of the target, unless Host is missing in HTTP/1.1."""
        host = self._parse_field(b"Host: %s\r" % first.host.encode())
        places = [i for i, field in enumerate(fields) if field.lower == "host"]
        if places:
            fields[places[0]] = host
        elif first.http_1_0:
            fields.append(host)


def _read_request_line(line: bytes) -> RequestLine:
    """Parse the first line of a request, unless it is cached; raises MalformedError."""
    if (first := _request_lines.get(line)) is None:
        first = _parse_request_line(line)
        if len(line) <= _MAX_CACHED_LINE:
            _request_lines.put(line, first)
    return first


def _read_status_line(line: bytes) -> StatusLine:
    """Parse the first line of a response, unless it is cached; raises MalformedError."""
    if (first := _status_lines.get(line)) is None:
        first = _parse_status_line(line)
        if len(line) <= _MAX_CACHED_LINE:
            _status_lines.put(line, first)
    return first


class HeadReader:
    """Collects the bytes of a head until it is complete; it rejects garbage before that."""

    def __init__(self, is_request: bool) -> None:
        self._is_request = is_request
        self.received = b""
        """The bytes of a partial head, which may be malformed."""
        self._checked = 0

    def reset(self) -> None:
        """Drop a partial head."""
        self.received, self._checked = b"", 0

    def feed(self, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview] | None:
        """Add received data; return the complete head and the bytes after it, None before that.

        Raises MalformedError.
        """
        if not self.received:
            # Usually the head is complete. Large data after it is not copied.
            if (cut := native.cut_head(data, MAX_CACHED_HEAD)) is not None:
                return cut
            data = bytes(data).lstrip(b"\r\n")  # RFC 9112, section 2.2
        before = len(self.received)
        received = self.received + data
        end = received.find(_HEAD_END, max(0, before - len(_HEAD_END)), MAX_HEAD)
        if end >= 0:
            self.reset()
            end += len(_HEAD_END)
            return received[:end], received[end:]
        if len(received) >= MAX_HEAD:
            raise MalformedError(f"a head of more than {MAX_HEAD} bytes")
        self.received = received
        self._check(received)
        return None

    def _check(self, received: bytes) -> None:
        """Check the lines that are complete by now, and the start of the next one."""
        while (end := received.find(b"\n", self._checked)) >= 0:
            line = received[self._checked : end]
            if self._checked:
                _check_field(line, is_whole=True)
            elif self._is_request:
                _parse_request_line(line)
            else:
                _parse_status_line(line)
            self._checked = end + 1
        start = received[self._checked : self._checked + _CHECKED_START].removesuffix(b"\r")
        if not start:
            return
        if self._checked:
            _check_field(start + (b"\r" if b":" in start else b":\r"), is_whole=False)
        elif self._is_request:
            _check_request_line_start(start)
        else:
            _parse_status_line(start + b"HTTP/1.1 200 "[len(start) :] + b"\r")


def _check_field(line: bytes, is_whole: bool) -> None:
    """Check a header line with its CR, or the completed start of one; raises MalformedError."""
    name, colon, value = line.partition(b":")
    if not (colon and _TOKEN.fullmatch(name)):
        raise _invalid_name(name if colon else name.removesuffix(b"\r"))
    text = _parse_value(name, value)
    lower = name.decode("ascii").lower()
    if is_whole and lower in _FRAMING_NAMES:
        _meaning_of(lower, text)


def _check_request_line_start(start: bytes) -> None:
    """Check that a request line can begin like this; raises MalformedError."""
    method, space, rest = start.partition(b" ")
    known = method in METHODS if space else any(each.startswith(method) for each in METHODS)
    target, _, version = rest.lstrip(b" ").decode("latin-1").partition(" ")
    version = version.lstrip(" ")
    if (
        not known
        or not (target.isascii() and target.isprintable())
        or not ("HTTP/1.1".startswith(version) or "HTTP/1.0".startswith(version))
    ):
        raise _request_line_error(start)


def _parse_request_line(line: bytes) -> RequestLine:
    """Parse the first line of a request, with its CR; raises MalformedError."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None or match[1] not in METHODS or match[1] == b"CONNECT":
        if _is_another_protocol(line):
            raise AnotherProtocolError("this is not HTTP")
        raise _request_line_error(line)
    target = match[2].decode("latin-1")
    host = ""
    if absolute := ABSOLUTE_FORM.match(target):
        host = absolute[1]
        if not host:
            raise MalformedError("a request target without a host")
        if not _AUTHORITY.fullmatch(host):
            raise _invalid_host(host)
    return RequestLine(line, match[1].decode("latin-1"), target, match[3] == b"0", host)


def _parse_status_line(line: bytes) -> StatusLine:
    """Parse the first line of a response, with its CR; raises MalformedError."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        if not line.startswith(b"HTTP/"):
            raise MalformedError("this is not HTTP")
        if _OTHER_VERSION.match(line):
            raise MalformedError("only HTTP/1.1 and HTTP/1.0 are supported")
        raise MalformedError("the first line is not a version, a status of 100 to 999 and a reason")
    return StatusLine(line, match[1] == b"0", int(match[2]), (match[3] or b"").decode("latin-1"))


def encode_head(first_line: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode a head; names and values must be valid."""
    return encode_head_lines(first_line, headers) + b"\r\n"


def encode_head_lines(first_line: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode a head without the empty line at its end, so that lines can be added."""
    lines = [first_line, *[f"{name}: {value}" for name, value in headers], ""]
    return "\r\n".join(lines).encode("latin-1")


def parse_lines(lines: bytes) -> tuple[tuple[str, str], ...]:
    """Parse header lines that were checked before, each with its CRLF."""
    parsed = [line.partition(":") for line in lines.decode("latin-1").split("\r\n") if line]
    return tuple([(name, value.strip(" \t")) for name, _, value in parsed])


def _split_lines(head: bytes) -> list[bytes]:
    """Return the lines of a complete head with their CRs, an empty one, and nothing."""
    most = _MAX_HEADERS + 2
    lines = head.split(b"\n", most)
    if len(lines) < 3 or lines[-1] or lines[-2] != b"\r":
        too_many = len(lines) > most
        raise MalformedError(
            f"more than {_MAX_HEADERS} headers" if too_many else "no complete head"
        )
    return lines


def _parse_value(name: bytes, value: bytes) -> str:
    """Return the value of a header as text, without the white space around it and its CR."""
    end = len(value) - 1
    if end < 0 or value[end] != _CR:
        raise _invalid_value(name, value)
    start = 1 if value[0] == _SPACE else 0  # as nearly all write it
    text = value[start:end].decode("latin-1")
    # Fast for most; the other way takes tabs and what is not ASCII.
    is_plain = text.isascii() and text.isprintable()
    if not is_plain and len(value.translate(None, _CONTROLS)) != end:
        raise _invalid_value(name, value)
    if start < end and value[start] > _SPACE and value[end - 1] > _SPACE:
        return text
    return text.strip(" \t")


def _meaning_of(lower: str, value: str) -> int:
    """Return what a header of ``_FRAMING_NAMES`` means for the framing of its message."""
    if lower == "host":
        return _HOST if _AUTHORITY.fullmatch(value) else _INVALID_HOST
    if lower == "content-length":
        if len(value) > _MAX_LENGTH_DIGITS:
            raise MalformedError(f"a Content-Length of {len(value)} characters")
        is_number = value.isascii() and value.isdigit()
        if not is_number or (len(value) == _MAX_LENGTH_DIGITS and int(value) > _MAX_LENGTH):
            raise MalformedError(f"invalid Content-Length: {value!r}")
        return _LENGTH
    if lower == "transfer-encoding":
        if value.lower() != "chunked":
            raise MalformedError("a Transfer-Encoding other than chunked")
        return _CHUNKED
    if lower == "keep-alive":
        return _KEEP_ALIVE_TIMEOUT
    options = [option.strip() for option in value.lower().split(",")]
    if "close" in options:
        return _CLOSE
    return _KEEP_ALIVE if "keep-alive" in options else _NOTHING


def _is_another_protocol(line: bytes) -> bool:
    method = line.removesuffix(b"\r").partition(b" ")[0]
    if b"HTTP/" in line.upper() or method in METHODS:
        return False
    return bool(_TOKEN.fullmatch(method))


def _request_line_error(line: bytes) -> MalformedError:
    """Say what is wrong with a request line, or with the start of one."""
    method, _, rest = line.partition(b" ")
    if method == b"CONNECT":
        # The bytes after it are for the tunnel, and must not be parsed as a request.
        target = rest.partition(b" ")[0][:QUOTED_NAME].decode("latin-1")
        return MalformedError(f"CONNECT {target}: tunnels are not supported")
    if not _TOKEN.fullmatch(method) or b" HTTP/" not in line:
        return MalformedError("this is not HTTP")
    if _OTHER_VERSION.search(line):
        return MalformedError("only HTTP/1.1 and HTTP/1.0 are supported")
    if method not in METHODS:
        return MalformedError(f"unknown method {_quoted(method)}")
    if _REQUEST_LINE.fullmatch(line + b"\r"):
        return MalformedError(_NO_CRLF)
    return MalformedError("the first line is not a method, a request target and a version")


def _invalid_name(name: bytes) -> MalformedError:
    """Say what is wrong with what should be a header name."""
    if name.startswith((b" ", b"\t")):
        return MalformedError("a header line that begins with white space")  # obs-fold
    if name.endswith((b" ", b"\t")) and _TOKEN.fullmatch(name.rstrip(b" \t")):
        return MalformedError(f"white space between the header name {_quoted(name)} and its colon")
    if _TOKEN.fullmatch(name):
        return MalformedError(f"a header line without a colon: {_quoted(name)}")
    return MalformedError(f"invalid header name: {_quoted(name)}")


def _invalid_value(name: bytes, value: bytes) -> MalformedError:
    """Say what is wrong with the value of a header."""
    if not value.endswith(b"\r"):
        return MalformedError(_NO_CRLF)
    return MalformedError(f"a control character in the value of {_quoted(name)}")


def _invalid_host(host: str) -> MalformedError:
    return MalformedError(f"invalid host and port: {host[:80]!r}")


def _quoted(text: bytes) -> str:
    return repr(text[:QUOTED_NAME].decode("latin-1"))
