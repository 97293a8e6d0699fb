from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http1.head import (
    MAX_HEAD,
    HeadParser,
    HeadReader,
    MalformedError,
    RequestHead,
    ResponseHead,
)
from gateway.sizes import CACHED_LINES
from tests.http1.heads import ALMOST_HEADS, HOST, head_text, heads
from tests.http1.splits import LAW, PLACES, all_splits, bytewise, cut

FIRSTS = (b"POST /x HTTP/1.1", b"HTTP/1.1 200 OK")
BOTH = pytest.mark.parametrize("first", FIRSTS)


def _request(*lines: bytes, first: bytes = b"POST /x HTTP/1.1") -> RequestHead:
    """Parse the head of a request, with a Host if the lines have none."""
    has_host = any(line.lower().startswith(b"host:") for line in lines)
    return HeadParser().parse_request(
        head_text(*lines, *(() if has_host else (HOST,)), first=first)
    )


def _response(
    *lines: bytes, first: bytes = b"HTTP/1.1 200 OK", method: str = "POST"
) -> ResponseHead:
    return HeadParser().parse_response(head_text(*lines, first=first), method)


def _message(*lines: bytes, first: bytes) -> RequestHead | ResponseHead:
    if first.startswith(b"HTTP"):
        return _response(*lines, first=first)
    return _request(*lines, first=first)


# ---------------------------------------------------------------------------------- first lines


@pytest.mark.parametrize(
    "target",
    [
        *("/", "*", "//x", "/v2/models/a%2Fb/infer", "/%zz", "/a?b=c&d=e", "/a?b?c", "/a?b#c"),
        *('/"<>{}|\\^`[', "http://host/path?query", "http://host:80/", "http://[::1]:80/"),
        "/" + "a" * 60_000,
    ],
)
def test_method_and_target_are_not_changed(target: str) -> None:
    for method in ("GET", "M-SEARCH"):
        head = _request(first=f"{method} {target} HTTP/1.1".encode())
        assert (head.method, head.target) == (method, target)


@pytest.mark.parametrize(
    "host",
    # RFC 9112, section 3.2: an empty one is what a client sends that asks for no authority.
    [
        "",
        "host",
        "host:80",
        "host:",
        "127.0.0.1:8080",
        "[::1]",
        "[2001:db8::1]:443",
        "a_b.-",
        "%4~",
    ],
)
def test_host_is_accepted(host: str) -> None:
    assert _request(b"Host: " + host.encode()).headers["Host"] == host


@pytest.mark.parametrize(
    "host",
    [
        *(b"a b", b"a, b", b"a/b", b"a?b", b"a#b", b"user@a", b"a:b", b"a:80:80", b"a:-1"),
        *(b"::1", b"[::1", b"[::1]x", b'"a"', b"<a>", b"a\\b", b"h\xc3\xb4te", b"http://a"),
    ],
)
def test_invalid_host_is_rejected(host: bytes) -> None:
    # RFC 9112, section 3.2: a server must, whatever it takes the host from.
    for first in (b"GET /x HTTP/1.1", b"GET http://other/path HTTP/1.1"):
        with pytest.raises(MalformedError, match="invalid host and port"):
            _request(b"Host: " + host, first=first)


def test_request_has_one_host_and_none_only_in_http_1_0() -> None:
    for first in (b"GET /x HTTP/1.1", b"GET http://host/ HTTP/1.1"):
        with pytest.raises(MalformedError, match="no Host"):
            HeadParser().parse_request(head_text(b"X: a", first=first))
    assert "Host" not in HeadParser().parse_request(head_text(first=b"GET / HTTP/1.0")).headers
    for version in (b"1.0", b"1.1"):
        with pytest.raises(MalformedError, match="more than one Host"):
            _request(b"Host: a", b"X: x", b"hOST: a", first=b"GET / HTTP/" + version)


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://other/path", "other"),
        ("HTTPS://other:443", "other:443"),
        ("http://[::1]:80?x", "[::1]:80"),
    ],
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_host_of_the_target_replaces_host(target: str, host: str, version: str) -> None:
    headers = _request(
        b"X: a", HOST, b"Y: b", first=f"GET {target} HTTP/{version}".encode()
    ).headers
    assert list(headers.items()) == [("X", "a"), ("Host", host), ("Y", "b")]


@pytest.mark.parametrize(
    "target", ["http:///path", "http://?x", "http://user@host/", "https://user:word@host"]
)
def test_target_with_an_invalid_host_is_rejected(target: str) -> None:
    with pytest.raises(MalformedError, match="host"):
        _request(first=f"GET {target} HTTP/1.1".encode())


@pytest.mark.parametrize(
    "first",
    [
        *(b"", b"GET", b"GET ", b"GET /", b"GET / ", b"GET  HTTP/1.1", b"GET ?x HTTP/1.1"),
        *(b"GET / HTTP/0.9", b"GET / HTTP/1.2", b"GET / HTTP/1.10", b"GET / HTTP/2.0"),
        *(b"GET / HTTP/3.0", b"GET / HTTP/1", b"GET / http/1.1", b"GET / HTTPS/1.1"),
        *(b"GET / HTTP/1.1 ", b"GET / HTTP/1.1\r", b"GET\t/ HTTP/1.1", b" GET / HTTP/1.1"),
        *(b"GET /\t HTTP/1.1", b"GET /\x00 HTTP/1.1", b"GET /\x7f HTTP/1.1", b"GET /\xff HTTP/1.1"),
        *(b"get / HTTP/1.1", b"GETS / HTTP/1.1", b"HTTP/1.1 200 OK", b"GET /\nX: a"),
        *(b"GET / RTSP/1.0", b"SOURCE / ICE/1.0"),
    ],
)
def test_invalid_request_line_is_rejected(first: bytes) -> None:
    with pytest.raises(MalformedError):
        _request(b"Host: a", first=first)


@pytest.mark.parametrize(
    ("first", "status", "reason"),
    [
        (b"HTTP/1.1 200 OK", 200, "OK"),
        (b"HTTP/1.1 200 ", 200, ""),
        (b"HTTP/1.1 200", 200, ""),
        (b"HTTP/1.1 299 So So", 299, "So So"),
        (b"HTTP/1.1 404  Not Found ", 404, " Not Found "),
        (b"HTTP/1.1 500 a\tb", 500, "a\tb"),
        (b"HTTP/1.1 500 \x80\xff", 500, "\x80\xff"),
        (b"HTTP/1.1 999 x", 999, "x"),
    ],
)
def test_status_and_reason_are_parsed(first: bytes, status: int, reason: str) -> None:
    head = _response(b"X: a", first=first)
    assert (head.status, head.reason) == (status, reason)


@pytest.mark.parametrize(
    "first",
    [
        *(b"", b"200 OK", b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/0.9 200 OK", b"HTTP/1.2 200 OK"),
        *(b"HTTP/2.0 200 OK", b"HTTP/2 200 OK", b"http/1.1 200 OK", b" HTTP/1.1 200 OK"),
        *(b"HTTP/1.1  200 OK", b"HTTP/1.1\t200 OK", b"HTTP/1.1 200\tOK", b"HTTP/1.1 200OK"),
        *(b"HTTP/1.1 abc OK", b"HTTP/1.1 +20 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 2000 OK"),
        *(b"HTTP/1.1 000 OK", b"HTTP/1.1 099 OK", b"HTTP/1.1 200 a\x00", b"HTTP/1.1 200 a\x1b[0m"),
        *(b"HTTP/1.1 200 a\x7f", b"HTTP/1.1 200 a\rb", b"HTTP/1.1 200 OK\nX: a"),
        *(b"GET / HTTP/1.1", b"RTSP/1.0 200 OK", b"ICE/1.0 200 OK"),
    ],
)
def test_invalid_status_line_is_rejected(first: bytes) -> None:
    with pytest.raises(MalformedError):
        _response(b"X: a", first=first)


# ---------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    ("lines", "pairs"),
    [
        ([], []),
        ([b"X:a", b"Y:"], [("X", "a"), ("Y", "")]),
        # Only the white space around a value is dropped.
        ([b"X: \t "], [("X", "")]),
        ([b"X: \t a\tb \t"], [("X", "a\tb")]),
        ([b"X: :a:"], [("X", ":a:")]),
        ([b"X: ", b"Y: 2", b"x: 1", b"X: 1"], [("X", ""), ("Y", "2"), ("x", "1"), ("X", "1")]),
        ([b"!#$%&'*+-.^_`|~09aZ: a"], [("!#$%&'*+-.^_`|~09aZ", "a")]),
        ([b"X: \x80\xff\xc3\xa9"], [("X", "\x80\xff\xc3\xa9")]),
    ],
)
def test_headers_are_parsed(lines: list[bytes], pairs: list[tuple[str, str]]) -> None:
    for first in FIRSTS:
        headers = _message(*lines, first=first).headers
        assert [pair for pair in headers.items() if pair[1] != "host"] == pairs


@BOTH
def test_number_of_headers_is_limited(first: bytes) -> None:
    lines = [HOST, *[b"X: a"] * 127]
    assert len(_message(*lines, first=first).headers) == 128
    with pytest.raises(MalformedError, match="more than 128 headers"):
        _message(*lines, b"X: a", first=first)


# ---------------------------------------------------------------------------------- classes


def _classified(*lines: bytes, parser: HeadParser | None = None) -> RequestHead:
    parser = parser or HeadParser(keyed=("x-key", "x-both"), noted=("x-note", "x-both"))
    return parser.parse_request(head_text(HOST, *lines))


def test_headers_are_classified_by_their_names() -> None:
    head = _classified(b"X-Both: 1", b"X: 2", b"X-KEY:3", b"x-note: 4 ", b"Y:", b"X-Key: 5")
    assert head.key == (b"POST /x HTTP/1.1\r", b"X-Both: 1\r\n", b"X-KEY:3\r\n", b"X-Key: 5\r\n")
    assert head.keyed_headers == [("X-Both", "1"), ("X-KEY", "3"), ("X-Key", "5")]
    assert [(field.lower, field.value) for field in head.noted] == [
        ("x-both", "1"),
        ("x-note", "4"),
    ]
    assert head.passed == b"Host: host\r\nX: 2\r\nY:\r\n"
    names = [field.name for field in head.fields]
    assert names == ["Host", "X-Both", "X", "X-KEY", "x-note", "Y", "X-Key"]
    assert list(head.headers.items()) == [(field.name, field.value) for field in head.fields]


def test_host_of_the_target_is_in_the_key() -> None:
    parser = HeadParser(keyed=("host",))
    head = parser.parse_request(head_text(HOST, first=b"GET http://other/ HTTP/1.1"))
    assert head.key == (b"GET http://other/ HTTP/1.1\r", b"Host: other\r\n")


def test_lines_are_cached_unless_they_are_only_noted_or_long() -> None:
    parser = HeadParser(keyed=("x-key", "x-both"), noted=("x-note", "x-both"))
    long = (b"Long: " + b"a" * 256, b"L" * 300 + b": a")
    lines = (b"X: 1", b"X-Key: 2", b"X-Both: 3", b"X-Note: 4", *long)
    # A head that differs in more than noted values is parsed line by line.
    one, other = (_classified(*lines, b"Y: %d" % n, parser=parser).fields for n in range(2))
    repeated = {a.name for a, b in zip(one, other, strict=True) if a is b}
    assert repeated == {"Host", "X", "X-Key", "X-Both"}


def test_cache_of_lines_is_bounded() -> None:
    parser = HeadParser()
    for number in range(2 * CACHED_LINES + 10):
        head = _classified(b"X: %d" % number, parser=parser)
        assert head.headers["X"] == str(number)
        assert len(parser._known) <= CACHED_LINES


def test_cached_line_is_checked_again_in_each_head() -> None:
    parser = HeadParser()
    for _ in range(2):
        with pytest.raises(MalformedError, match="more than one Content-Length"):
            _classified(b"Content-Length: 5", b"Content-Length: 5", parser=parser)
        with pytest.raises(MalformedError, match="invalid host and port"):
            parser.parse_request(head_text(b"Host: a b"))
        # A response may have a Host of any form.
        parser.parse_response(head_text(b"Host: a b", first=b"HTTP/1.1 200 OK"), "GET")


# ---------------------------------------------------------------------------------- framing

LENGTHS: list[tuple[list[bytes], int]] = [
    ([b"Content-Length: 0"], 0),
    ([b"Content-Length: 5"], 5),
    ([b"content-length:5"], 5),
    ([b"CONTENT-LENGTH: \t5 \t"], 5),
    ([b"Content-Length: 005"], 5),
    ([b"Content-Length: 18446744073709551615"], 2**64 - 1),
]

CHUNKED: list[list[bytes]] = [
    [b"Transfer-Encoding: chunked \t"],
    [b"transfer-encoding:Chunked"],
    [b"TRANSFER-ENCODING: \tCHUNKED"],
]

_LENGTH, _CODING = b"Content-Length: ", b"Transfer-Encoding: "

BROKEN_FRAMING: list[list[bytes]] = [
    *([_LENGTH + value] for value in (b"5, 5", b"", b"a", b"+5", b"-5", b"5.0", b"0x5", b"5 5")),
    *([_LENGTH + value] for value in (b"1_0", b"5;", b"\xb2", b"5\xa0", b"18446744073709551616")),
    [_LENGTH + b"9" * 5000],
    *([_CODING + value] for value in (b"", b"gzip", b"identity", b"gzip, chunked", b"chunked,")),
    *([_CODING + value] for value in (b"chunked, gzip", b"chunked, chunked", b",chunked")),
    *([_CODING + value] for value in (b"xchunked", b"chunkedx", b"chunked;a=b", b'"chunked"')),
    *([_CODING + value] for value in (b"\x0bchunked", b"chunked\xa0")),
    [_LENGTH + b"5", _CODING + b"chunked"],
    [_CODING + b"chunked", _LENGTH + b"5"],
    [_LENGTH + b"0", _CODING + b"chunked"],
    [_LENGTH + b"5", _CODING + b"identity"],
    [_LENGTH + b"5", _CODING],
    [_LENGTH + b"5", _LENGTH + b"5"],
    [_LENGTH + b"5", b"content-length: 6"],
    [_CODING + b"chunked", _CODING + b"chunked"],
    [_CODING + b"gzip", _CODING + b"chunked"],
    [_CODING + b"chunked", _CODING + b"gzip"],
]


@pytest.mark.parametrize(("lines", "length"), [([], None), *LENGTHS])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_length_is_parsed(lines: list[bytes], length: int | None, version: bytes) -> None:
    assert _request(*lines, first=b"POST / HTTP/" + version).length == (length or 0)
    head = _response(*lines, first=b"HTTP/" + version + b" 200 OK")
    assert (head.length, head.chunked) == (length, False)


@pytest.mark.parametrize("lines", CHUNKED)
def test_chunked_message_has_no_length(lines: list[bytes]) -> None:
    assert _request(*lines).length is None
    head = _response(*lines)
    assert (head.length, head.chunked) == (None, True)
    with pytest.raises(MalformedError, match=r"in HTTP/1\.0"):
        _request(*lines, first=b"POST / HTTP/1.0")
    kept = b"Connection: keep-alive"
    assert not _response(*lines, kept, first=b"HTTP/1.0 200 OK").keep_alive


@pytest.mark.parametrize("lines", BROKEN_FRAMING)
def test_invalid_framing_is_rejected(lines: list[bytes]) -> None:
    for first in FIRSTS:
        with pytest.raises(MalformedError):
            _message(*lines, first=first)
    for method, status in (("HEAD", 200), ("GET", 204), ("GET", 100)):  # those without a body
        with pytest.raises(MalformedError):
            _response(*lines, first=b"HTTP/1.1 %d X" % status, method=method)


@pytest.mark.parametrize(
    ("method", "status"),
    [("HEAD", 200), ("HEAD", 404), *(("POST", each) for each in (100, 101, 102, 199, 204, 304))],
)
def test_responses_without_a_body_have_length_0(method: str, status: int) -> None:
    for lines in ([], *CHUNKED, *(lines for lines, _ in LENGTHS)):
        head = _response(*lines, first=b"HTTP/1.1 %d X" % status, method=method)
        assert (head.length, head.chunked) == (0, False)


# ---------------------------------------------------------------------------------- keep-alive


@pytest.mark.parametrize(
    ("lines", "of_1_0", "of_1_1"),
    [
        ([], False, True),
        ([b"connection: CLOSE"], False, False),
        ([b"connection: Keep-Alive"], True, True),
        ([b"Connection: closed"], False, True),
        ([b"Connection: not-keep-alive"], False, True),
        ([b"Connection: x ,\tKeep-Alive\t, y "], True, True),
        ([b"Connection: ,close,"], False, False),
        ([b"Connection: close, keep-alive"], False, False),
        ([b"Connection: close", b"Connection: keep-alive"], False, False),
        ([b"Connection: x", b"connection: Keep-Alive"], True, True),
        ([b"Keep-Alive: timeout=5"], False, True),
        ([b"Proxy-Connection: keep-alive"], False, True),
    ],
)
def test_keep_alive_depends_on_version_and_connection(
    lines: list[bytes], of_1_0: bool, of_1_1: bool
) -> None:
    for version, kept in ((b"1.0", of_1_0), (b"1.1", of_1_1)):
        assert _request(*lines, first=b"GET / HTTP/" + version).keep_alive is kept
        assert _response(*lines, first=b"HTTP/" + version + b" 200 OK").keep_alive is kept


# ---------------------------------------------------------------------------------- other protocols


_UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c")


def test_upgrade_is_ignored() -> None:
    head = _request(*_UPGRADE, b"HTTP2-Settings: AAMAAABk", b"Content-Length: 5", b"X: a")
    assert (head.method, head.target, head.length, head.keep_alive) == ("POST", "/x", 5, True)
    assert (head.headers["Upgrade"], head.headers["X"]) == ("h2c", "a")
    assert _response(*_UPGRADE, first=b"HTTP/1.1 101 Switching Protocols").status == 101


def test_connect_is_rejected() -> None:
    for target, line in (("host:80", b"X: \x00"), ("/x", b"Content-Length: 5")):
        with pytest.raises(MalformedError, match=f"CONNECT {target}"):
            _request(b"Host: a", line, first=f"CONNECT {target} HTTP/1.1".encode())


# ---------------------------------------------------------------------------------- messages


_FIRST = b"GET / HTTP/1.1\r\n"
_NO_LINE = "the first line is not a method, a request target and a version"
_CONTROL = "a control character in the value of 'X'"
_NO_CRLF = "a line that does not end with CRLF"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\x16\x03\x01 / HTTP/1.1", "this is not HTTP"),
        (b"DESCRIBE / RTSP/1.0", "this is not HTTP"),
        (b"PRI * HTTP/2.0", "only HTTP/1.1 and HTTP/1.0 are supported"),
        (b"FETCH / HTTP/1.1", "unknown method 'FETCH'"),
        (b"GET /a b HTTP/1.1", _NO_LINE),
        (b"GET x HTTP/1.1", _NO_LINE),
        (_FIRST + b"X: a\r\n b", "a header line that begins with white space"),
        (_FIRST + b"X : a", "white space between the header name 'X ' and its colon"),
        (_FIRST + b"X", "a header line without a colon: 'X'"),
        (_FIRST + b"X(): a", "invalid header name: 'X()'"),
        (_FIRST + b"X: a\rY: b", _CONTROL),
        (_FIRST + b"X: \x00", _CONTROL),
        (_FIRST + b"X: a\nY: b", _NO_CRLF),
        (b"GET / HTTP/1.1\nX: a", _NO_CRLF),
        (_FIRST + b"Content-Length: +5", "invalid Content-Length: '+5'"),
        (_FIRST + b"Content-Length: 5\r\nContent-Length: 5", "more than one"),
        (
            _FIRST + b"Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Content-Length beside Transfer-Encoding",
        ),
    ],
)
def test_message_says_what_is_wrong_with_a_request(text: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=f"^{re.escape(message)}"):
        HeadParser().parse_request(text + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6", "this is not HTTP"),
        (b"HTTP/2 200", "only HTTP/1.1 and HTTP/1.0 are supported"),
        (b"HTTP/1.1 20", "the first line is not a version, a status of 100 to 999 and a reason"),
    ],
)
def test_message_says_what_is_wrong_with_a_response(first: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=f"^{re.escape(message)}$"):
        _response(first=first)


# ---------------------------------------------------------------------------------- HeadReader

TOO_LARGE = "a head of more than 65536 bytes"


def _read(is_request: bool, pieces: list[bytes]) -> tuple[bytes, bytes] | str | None:
    """Return a valid head and the rest; what is wrong with it; or None if the head is partial.

    How much of a line has come decides what is said of it, but not of a head that is too large.
    """
    reader = HeadReader(is_request)
    try:
        for number, piece in enumerate(pieces):
            if (found := reader.feed(piece)) is not None:
                text, rest = found
                if is_request:
                    HeadParser().parse_request(text)
                else:
                    HeadParser().parse_response(text, "POST")
                return text, bytes(rest) + b"".join(pieces[number + 1 :])
    except MalformedError as error:
        return str(error) if str(error) == TOO_LARGE else "malformed"
    return None


READERS = pytest.mark.parametrize("is_request", [True, False])


@READERS
@LAW
@given(text=st.one_of(heads(), ALMOST_HEADS), places=PLACES)
@example(text=b"GET / HTTP/1.1\r\n\r\n\r\n\r\n", places=[16, 17, 18, 19, 20])
@example(text=b"GET /\n\r\n\r\n", places=[6, 8])
@example(text=b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\nX", places=[1, 2, 3, 4])
def test_heads_do_not_depend_on_how_bytes_arrive(
    is_request: bool, text: bytes, places: list[int]
) -> None:
    whole = _read(is_request, [text])
    assert _read(is_request, cut(text, places)) == whole
    assert _read(is_request, bytewise(text)) == whole


@pytest.mark.parametrize(
    ("is_request", "first"), [(True, b"GET /x HTTP/1.1"), (False, b"HTTP/1.1 200 OK")]
)
@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n\n", b"\r\n\r\n\r\n"])
@pytest.mark.parametrize("rest", [b"", b"\r\n", b"rest", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_reader_separates_head_and_rest(
    is_request: bool, first: bytes, before: bytes, rest: bytes
) -> None:
    text = head_text(HOST, b"X: a", b"Y:", first=first)
    for pieces in all_splits(before + text + rest):
        assert _read(is_request, pieces) == (text, rest)


def test_reader_reads_several_heads() -> None:
    reader = HeadReader(is_request=True)
    one, other = head_text(b"X: 1"), head_text(b"X: 2")
    found = reader.feed(one + other + one[:9])
    assert found == (one, other + one[:9])
    assert reader.feed(found[1]) == (other, one[:9])
    assert reader.feed(one[:9]) is None
    assert reader.feed(one[9:]) == (one, b"")


@pytest.mark.parametrize(
    ("is_request", "start", "garbage"),
    [
        (True, b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        (True, b"", b"{"),
        (True, b"", b"get / HTTP/1.1"),
        (True, b"S", b"SH-2.0-OpenSSH_9.6\r\n"),
        (True, b"", b"HTTP/1.1 200 OK"),
        (True, b"GET / HTTP/1.1", b"\n"),
        (True, b"GET / HT", b"X"),
        (True, b"GET /", b"\x00"),
        (True, b"GET / HTTP/1.1\r\n", b" "),
        (True, b"GET / HTTP/1.1\r\nX", b" "),
        (True, b"GET / HTTP/1.1\r\nX: a", b"\x00"),
        (True, b"GET / HTTP/1.1\r\nX: a\r\nContent-Length: ", b"x\r\n"),
        (False, b"", b"\x15\x03\x01\x00\x02\x02\x46"),
        (False, b"", b"<html>"),
        (False, b"HTTP/1.1 ", b"x"),
        (False, b"HTTP/1.1 200 OK", b"\n"),
        (False, b"HTTP/1.1 200 OK\r\n", b"\x00\x01"),
        (False, b"HTTP/1.1 200 OK\r\nX: a", b"\x7f"),
    ],
)
def test_garbage_is_rejected_before_the_head_is_complete(
    is_request: bool, start: bytes, garbage: bytes
) -> None:
    for place in range(len(start) + 1):
        reader = HeadReader(is_request)
        assert reader.feed(start[:place]) is None
        assert reader.feed(start[place:]) is None
        with pytest.raises(MalformedError):
            reader.feed(garbage)


def _of_size(size: int) -> bytes:
    text = head_text(HOST, b"X: ")
    return head_text(HOST, b"X: " + b"a" * (size - len(text)))


@pytest.mark.parametrize("size", [MAX_HEAD - 1, MAX_HEAD])
@pytest.mark.parametrize("rest", [b"", b"rest", b"\r\n\r\n"])
def test_head_of_the_maximum_size_is_accepted(size: int, rest: bytes) -> None:
    text = _of_size(size)
    for place in (0, 1, 40_000, *range(size - 6, size)):
        assert _read(True, cut(text + rest, [place])) == (text, rest)


@pytest.mark.parametrize(
    "text", [_of_size(MAX_HEAD + 1), _of_size(MAX_HEAD + 3), _of_size(3 * MAX_HEAD)]
)
def test_head_over_the_maximum_size_is_rejected(text: bytes) -> None:
    for place in (0, 1, 40_000, *range(MAX_HEAD - 6, MAX_HEAD + 1)):
        assert _read(True, cut(text, [place])) == TOO_LARGE


def test_empty_lines_before_a_head_are_not_buffered() -> None:
    reader = HeadReader(is_request=True)
    for empty in (b"", b"\r", b"\n", *[b"\r\n" * 1000] * 100):
        assert reader.feed(empty) is None
        assert not reader.received
    assert reader.feed(b"G") is None
    assert reader.received == b"G"


def _only_malformed(call: Callable[..., object], *args: object) -> None:
    with suppress(MalformedError):
        call(*args)


@LAW
@given(st.one_of(st.binary(max_size=60), ALMOST_HEADS, heads()), PLACES)
def test_parsing_raises_only_malformed_error(text: bytes, places: list[int]) -> None:
    _only_malformed(HeadParser().parse_request, text)
    for method in ("GET", "HEAD"):
        _only_malformed(HeadParser().parse_response, text, method)
    for is_request in (True, False):
        reader = HeadReader(is_request)
        for piece in cut(text, places):
            _only_malformed(reader.feed, piece)
