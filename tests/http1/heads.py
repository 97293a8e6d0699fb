"""Heads of HTTP/1.1 messages: valid ones, and some that almost are."""

from __future__ import annotations

from hypothesis import strategies as st

HOST = b"Host: host"


def head_text(*lines: bytes, first: bytes = b"POST /x HTTP/1.1") -> bytes:
    """Return a head of these lines."""
    return b"\r\n".join((first, *lines, b"", b""))


_WORDS = st.sampled_from(
    [
        *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b",", b"\x00", b"\xff"),
        *(b"GET", b"POST", b"/", b"*", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"RTSP/1.0"),
        *(b"200", b"101", b"204", b"0", b"5", b"OK", b"A: b\r\n", b"A", b"PRI * HTTP/2.0"),
        *(b"GET / HTTP/1.1\r\n", b"HTTP/1.1 200 OK\r\n", b"GET /\n", b"HTTP/1.1 101 X\r\n"),
        *(b"Upgrade: h2c\r\n", b"Connection: upgrade\r\n", b"Connection: close\r\n"),
        *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"),
    ]
)
"""Parts of heads; CONNECT has a test of its own."""

ALMOST_HEADS = st.lists(st.one_of(_WORDS, _WORDS, st.binary(max_size=3)), max_size=12).map(b"".join)

_LINES = st.sampled_from(
    [
        *(b"Host: a", b"X:", b"X: \x80\xff", b"Content-Length: 5", b"Connection: close"),
        *(b"Connection: upgrade", b"Upgrade: h2c", b"Transfer-Encoding: chunked"),
        *(b"X : a", b"X: \x01", b" X: a", b"X: a\nY: b", b"Content-Length: x"),
    ]
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Draw heads, many of them valid, with bytes before and after."""
    firsts = [b"GET / HTTP/1.1", b"POST /x HTTP/1.0", b"CONNECT a:1 HTTP/1.1", b"HTTP/1.1 200 OK"]
    first = draw(st.sampled_from(firsts))
    text = head_text(*draw(st.lists(_LINES, max_size=4)), first=first)
    before = draw(st.sampled_from([b"", b"", b"\r\n", b"\r\n\r\n", b"\n"]))
    after = draw(st.one_of(st.just(b""), st.just(text), st.binary(max_size=8)))
    return before + text + after
