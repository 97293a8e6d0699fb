"""Compares the parser with llhttp, which Node.js uses: the gateway accepts nothing more."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from httptools import (
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
    HttpResponseParser,
)
from hypothesis import given
from hypothesis import strategies as st

from gateway.http1.head import (
    ABSOLUTE_FORM,
    HeadParser,
    MalformedError,
    RequestHead,
    ResponseHead,
)
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
PARTS = st.one_of(
    st.binary(min_size=1, max_size=1),
    st.sampled_from(
        [
            *(b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b",", b";", b"+", b"-", b"0", b"5"),
            *(b"\x00", b"\x7f", b"\x80", b"/", b"@", b"@@", b"#", b"?", b"http://", b"ftp://x"),
            *(b"GET", b"PRI", b"SOURCE", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"ICE/1.0"),
            *(b"Host: b\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"),
            *(b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"chunked", b"close", b"9" * 19),
        ]
    ),
)


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """Draw a head with some bytes inserted, deleted or replaced; it ends with an empty line."""
    text = draw(st.sampled_from(HEADS))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(text) - 4))
        part = draw(st.one_of(PARTS, st.just(b"")))
        text = text[:place] + part + text[place + draw(st.integers(0, 2)) :]
    text = text.lstrip(b"\r\n") + b"\r\n\r\n"
    return text[: text.index(b"\r\n\r\n") + 4]


def _llhttp(head: bytes) -> tuple[HttpRequestParser | HttpResponseParser, Seen]:
    """Parse a head as llhttp does. It says only after the head what it dislikes of the body."""
    seen = Seen()
    parser = (HttpResponseParser if head.startswith(b"HTTP/") else HttpRequestParser)(seen)
    with suppress(HttpParserError, HttpParserUpgrade):
        parser.feed_data(head)
    return parser, seen


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
    parser, seen = _llhttp(head)
    ours = _gateway(head)
    if isinstance(ours, MalformedError):
        assert not seen.has_head or STRICTER.match(str(ours)), ours
        return
    assert seen.has_head
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
    parser, seen = _llhttp(head)
    if ours.length is None and not ours.chunked:
        body = b"until the connection closes"
    elif ours.chunked:
        body = b"5\r\nabcde\r\n0\r\n\r\n"
    elif ours.length is not None and ours.length < 1000:
        body = b"x" * ours.length
    else:
        return
    for place in range(len(body)):
        assert not seen.complete
        # llhttp takes a tab after chunked for another coding.
        if re.search(rb"(?i)chunked ?\t", head):
            return
        parser.feed_data(body[place : place + 1])
    assert seen.complete == (ours.chunked or ours.length is not None)


@pytest.mark.parametrize("head", HEADS)
def test_unchanged_heads_are_accepted(head: bytes) -> None:
    assert _llhttp(head)[1].has_head
    assert not isinstance(_gateway(head), MalformedError)
