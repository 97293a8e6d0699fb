"""Compares the parser with llhttp, which Node.js uses: the gateway accepts nothing more."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser
from hypothesis import given
from hypothesis import strategies as st

from gateway.http1.head import ABSOLUTE_FORM, HeadParser, MalformedError, RequestHead, ResponseHead
from tests.http1.heads import head_text
from tests.http1.splits import LAW

STRICTER = re.compile(
    "|".join(
        [
            "no Host",
            "more than one Host",
            "invalid host and port",
            "a request target without a host",
            "CONNECT .*: tunnels are not supported",
            "this is not HTTP",  # RTSP, ICE
            "only HTTP/1.1 and HTTP/1.0 are supported",
            "Transfer-Encoding in HTTP/1.0",
            "a Transfer-Encoding other than chunked",
            "more than one Transfer-Encoding",
            "a Content-Length of .* characters",
            # a status below 100, a control character in the reason
            "the first line is not a version, a status of 100 to 999 and a reason",
        ]
    )
)
"""The reasons for which the gateway rejects a head that llhttp accepts."""


@dataclass
class Seen:
    """What llhttp sees of a message; it is a Protocol of httptools."""

    target: bytes = b""
    reason: bytes = b""
    fields: list[tuple[str, str]] = field(default_factory=list)
    has_head: bool = False
    body: bytes = b""
    complete: bool = False

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_status(self, part: bytes) -> None:
        self.reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.decode("latin-1"), value.strip(b" \t").decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        self.complete = True


HEADS = [
    head_text(b"Host: a", b"Content-Length: 5", b"X-Y: z"),
    head_text(b"Host: a", b"Transfer-Encoding: chunked", first=b"POST http://a:1/x?y HTTP/1.1"),
    head_text(b"Connection: keep-alive, x", b"Content-Length: 0", first=b"GET /a?b=c HTTP/1.0"),
    head_text(b"Host: a", b"Connection: close", b"Expect: x", first=b"OPTIONS * HTTP/1.1"),
    head_text(b"Content-Length: 17", b"Date: now", first=b"HTTP/1.1 200 OK"),
    head_text(b"transfer-encoding: Chunked", b"Server:", first=b"HTTP/1.1 503 Not So Well"),
    head_text(b"Connection: Keep-Alive", b"X: \x80\xff", first=b"HTTP/1.0 404 "),
]
PARTS = st.sampled_from(
    [
        *(b"\r", b"\n", b" ", b"\t", b":", b",", b"+", b"-", b"0", b"5", b"\x00", b"\x7f", b"\x80"),
        *(b"/", b"@", b"@@", b"#", b"?", b"http://", b"ftp://x", b"[", b"chunked", b"close"),
        *(b"GET", b"PRI", b"SOURCE", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"ICE/1.0"),
    ]
)
LINES = [
    *(b"Host: b", b"Host:", b"Connection: close", b"Connection: x,close", b"Upgrade: h2c"),
    *(b"Content-Length: 5", b"content-length:05", b"Content-Length: 5, 5", b"Content-Length:"),
    *(b"Content-Length: +5", b"Content-Length: 5 5", b"Content-Length: 0x5"),
    *(b"Content-Length: 18446744073709551615", b"Content-Length: 18446744073709551616"),
    *(b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED ", b"Transfer-Encoding:"),
    *(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, gzip"),
    *(b" folded", b"\tfolded", b"X : y", b"X", b":", b"\xff: y", b"X: \xff", b"X:\x01", b"X: a\r"),
]


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """Draw a head with some bytes and lines inserted, deleted or replaced."""
    first, *lines = draw(st.sampled_from(HEADS)).split(b"\r\n")[:-2]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(lines)))
        lines[place : place + draw(st.integers(0, 1))] = [draw(st.sampled_from(LINES))]
    text = head_text(*lines, first=first)
    for _ in range(draw(st.integers(0, 2))):
        # Most mistakes are made where words begin and end.
        places = [match.start() for match in re.finditer(rb"\b|[\r\n:]", text)]
        place = draw(st.one_of(st.sampled_from(places), st.integers(0, len(text) - 4)))
        part = draw(st.one_of(PARTS, st.just(b""), st.binary(min_size=1, max_size=1)))
        text = text[:place] + part + text[place + draw(st.integers(0, 2)) :]
    return _first_head(text)


def _first_head(text: bytes) -> bytes:
    """Return what HeadReader takes for the head at the start of a text."""
    text = text.lstrip(b"\r\n") + b"\r\n\r\n"
    return text[: text.index(b"\r\n\r\n") + 4]


def _llhttp(head: bytes) -> tuple[HttpRequestParser | HttpResponseParser, Seen, bool]:
    """Parse a head with llhttp; return whether it accepts the head, too."""
    seen = Seen()
    parser = (HttpResponseParser if head.startswith(b"HTTP/") else HttpRequestParser)(seen)
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        pass
    except HttpParserError:
        # It takes a tab for a part of the coding.
        return parser, seen, seen.has_head and bool(re.search(rb"(?i)\tchunked|chunked ?\t", head))
    return parser, seen, seen.has_head


def _gateway(head: bytes) -> RequestHead | ResponseHead | MalformedError:
    parser = HeadParser()
    try:
        if head.startswith(b"HTTP/"):
            return parser.parse_response(head, "POST")
        return parser.parse_request(head)
    except MalformedError as error:
        return error


@LAW
@given(_mutated())
def test_gateway_accepts_what_llhttp_accepts_with_named_exceptions(head: bytes) -> None:
    _check(head)


@pytest.mark.parametrize("head", [HEADS[0], HEADS[4]])
def test_any_byte_at_any_place_is_taken_as_llhttp_takes_it(head: bytes) -> None:
    for place in range(len(head) - 4):
        for code in range(256):
            for end in (place, place + 1):
                _check(_first_head(head[:place] + bytes([code]) + head[end:]))


def _check(head: bytes) -> None:
    parser, seen, accepted = _llhttp(head)
    ours = _gateway(head)
    if isinstance(ours, MalformedError):
        assert not accepted or STRICTER.match(str(ours)), ours
        return
    assert accepted
    assert parser.get_http_version() == ("1.0" if ours.http_1_0 else "1.1")
    fields = [(each.name, each.value) for each in ours.fields]
    if isinstance(ours, RequestHead):
        assert isinstance(parser, HttpRequestParser)
        assert parser.get_method() == ours.method.encode()
        assert seen.target == ours.target.encode()
        if absolute := ABSOLUTE_FORM.match(ours.target):
            hosts = [pair for pair in seen.fields if pair[0].lower() == "host"]
            place = seen.fields.index(hosts[0]) if hosts else len(seen.fields)
            seen.fields[place : place + 1] = [("Host", absolute[1])]
    else:
        assert isinstance(parser, HttpResponseParser)
        assert (parser.get_status_code(), seen.reason) == (
            ours.status,
            ours.reason.encode("latin-1"),
        )
    assert fields == seen.fields


@LAW
@given(_mutated())
def test_gateway_and_llhttp_see_the_same_end_of_a_body(head: bytes) -> None:
    ours = _gateway(head)
    if isinstance(ours, MalformedError) or "Upgrade" in ours.headers:
        return  # with Upgrade, llhttp stops after the head
    parser, seen, _ = _llhttp(head)
    if ours.length is None and not ours.chunked:
        body = b"until the connection closes"
    elif ours.chunked and b"\t" not in head:
        body = b"5\r\nabcde\r\n0\r\n\r\n"
    elif ours.length is not None and ours.length < 1000:
        body = b"x" * ours.length
    else:
        return
    for place in range(len(body)):
        assert not seen.complete
        parser.feed_data(body[place : place + 1])
    assert seen.complete == (ours.chunked or ours.length is not None)


@pytest.mark.parametrize("head", HEADS)
def test_unchanged_heads_are_accepted(head: bytes) -> None:
    assert _llhttp(head)[2]
    assert not isinstance(_gateway(head), MalformedError)
