from __future__ import annotations

from email.utils import parsedate_to_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http1.head import HeadParser, RequestHead
from gateway.http2.hpack import Header, HeaderList
from gateway.listener.messages import (
    encode_fields,
    encode_request_head,
    encode_response,
    response_fields,
    split_request_head,
)
from gateway.proxy.interfaces import HeaderLines, ResponseTemplate

JSON: HeaderLines = (("Content-Type", "application/json"),)


def _encoded(template: ResponseTemplate, lines: bytes, body: bytes, last: bool) -> bytes:
    return b"".join(encode_response(template, lines, body, last))


def _written(
    status: int, reason: str, headers: HeaderLines, lines: bytes, body: bytes, last: bool
) -> tuple[str, list[str], bytes]:
    """Return the status line, the header lines without Date, and the body."""
    template = ResponseTemplate(status, reason, headers)
    head, _, rest = _encoded(template, lines, body, last).partition(b"\r\n\r\n")
    first, *written = head.decode("latin-1").split("\r\n")
    (date,) = [line for line in written if line.startswith("Date: ")]
    assert parsedate_to_datetime(date.removeprefix("Date: ")).tzinfo is not None
    return first, [line for line in written if line != date], rest


@pytest.mark.parametrize(
    ("status", "reason", "headers", "body", "first", "lines"),
    [
        (200, "OK", JSON, b"{}", "200 OK", ["Content-Type: application/json", "2"]),
        (200, "Fine", (), b"", "200 Fine", ["0"]),
        (404, "", JSON, b"abc", "404 Not Found", ["Content-Type: application/json", "3"]),
        (799, "", (), b"", "799 ", ["0"]),
        (200, "", (("X", "1"), ("x", "2")), b"a", "200 OK", ["X: 1", "x: 2", "1"]),
        (200, "", (("X", "caf\xe9"),), b"\r\n\r\n", "200 OK", ["X: caf\xe9", "4"]),
        (204, "", (), b"", "204 No Content", []),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_buffered_response_is_encoded(
    status: int,
    reason: str,
    headers: HeaderLines,
    body: bytes,
    first: str,
    lines: list[str],
    last: bool,
) -> None:
    """A number among the lines stands for the added Content-Length."""
    expected = [f"Content-Length: {line}" if line.isdigit() else line for line in lines]
    expected += ["X-Y: caf\xe9", "Server: tensorgate", *(["Connection: close"] if last else [])]
    for _ in range(2):
        got_first, got, rest = _written(status, reason, headers, b"X-Y: caf\xe9\r\n", body, last)
        assert got_first == f"HTTP/1.1 {first}"
        assert sorted(got) == sorted(expected)
        assert rest == body


def test_server_and_date_of_the_upstream_are_preserved() -> None:
    headers: HeaderLines = (("server", "triton"), ("DATE", "then"))
    data = _encoded(ResponseTemplate(200, "", headers), b"", b"", False)
    assert data == b"HTTP/1.1 200 OK\r\nserver: triton\r\nDATE: then\r\nContent-Length: 0\r\n\r\n"
    only_date = _encoded(ResponseTemplate(200, "", headers[1:]), b"", b"", False)
    assert (only_date.count(b"\r\nServer: "), only_date.lower().count(b"\r\ndate: ")) == (1, 1)


def test_response_without_a_body_has_none() -> None:
    """The client would take it for the start of the next response.

    The length of a 304 is that of the body that is not sent.
    """
    data = _encoded(ResponseTemplate(304, "", ()), b"Content-Length: 5\r\n", b"{}", False)
    assert data.endswith(b"\r\nContent-Length: 5\r\n\r\n")
    assert data.count(b"Content-Length") == 1
    data = _encoded(ResponseTemplate(204, "", JSON), b"", b'{"error":"x"}', False)
    assert data.endswith(b"\r\n\r\n")


# ---------------------------------------------------------------------------------- HTTP/2


def head_of(*more: tuple[bytes, bytes], body_size: int = 0, method: bytes = b"POST") -> list[str]:
    pseudo = (b":method", method), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"h:1")
    headers = HeaderList((*pseudo, *more), False)
    head = encode_request_head(headers, body_size).decode()
    assert head.endswith("\r\n\r\n")
    return head.removesuffix("\r\n\r\n").split("\r\n")


def test_authority_is_the_host() -> None:
    assert head_of((b"host", b"H:1"), (b"a", b"1")) == ["POST /x HTTP/1.1", "Host: h:1", "a: 1"]


NOTED_NAMES = ("content-length", "traceparent", "x-request-id")
TEXTS = st.sampled_from([b"", b"1", b" 1", b"1 \t", b"\xe4", b"00-2"])
VARIANTS: list[list[Header]] = [
    [(b"traceparent", b"")],
    [(b"x-request-id", b"")],
    [(b"content-length", b"5"), (b"content-length", b"05 ")],
    [(b"x", b"1"), (b"x", b"2")],
    [(b"cookie", b"a"), (b"cookie", b"b")],
    [(b"host", b"h:1")],
]
"""Fields of which a list has one each; a value that is empty here may be any."""


def fields_of(draw: st.DrawFn, chosen: list[list[Header]]) -> tuple[Header, ...]:
    pseudo = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/x"),
        (b":authority", b"h:1"),
    )
    drawn = [draw(st.sampled_from(each)) for each in chosen]
    return (*pseudo, *[(name, value or draw(TEXTS)) for name, value in drawn])


@st.composite
def similar_lists(draw: st.DrawFn) -> list[tuple[HeaderList, int]]:
    """Draw header lists with sizes of bodies, most of them with the same names."""
    names = draw(st.lists(st.sampled_from(VARIANTS), max_size=5))
    sizes = st.sampled_from([-1, 0, 5, 7])
    some = st.sampled_from([names, names, names[1:]])
    return [
        (HeaderList(fields_of(draw, draw(some)), False), draw(sizes))
        for _ in range(draw(st.integers(2, 5)))
    ]


def told_by(head: RequestHead) -> tuple[object, ...]:
    noted = [(each.name, each.lower, each.value) for each in head.noted]
    lines = [(each.lower, each.value) for each in head.fields]
    framing = head.length, head.chunked, head.keep_alive
    return head.key, head.passed, noted, lines, framing, list(head.headers.items())


@given(similar_lists(), st.sampled_from([(), ("content-length",), ("x", "traceparent")]))
def test_heads_of_lists_that_differ_in_noted_values_are_made_of_one(
    lists: list[tuple[HeaderList, int]], keyed: tuple[str, ...]
) -> None:
    parser = HeadParser(keyed, NOTED_NAMES)
    known: dict[tuple[object, ...], RequestHead] = {}
    for headers, size in lists:
        key, noted = split_request_head(headers, size, parser.noted_names)
        expected = HeadParser(keyed, NOTED_NAMES).parse_request(encode_request_head(headers, size))
        assert noted is not None
        if key in known:
            assert told_by(known[key].with_noted(noted)) == told_by(expected)
        known[key] = expected


def test_large_noted_values_are_not_taken_for_a_cached_head() -> None:
    headers = HeaderList(((b":method", b"GET"), (b"traceparent", b"x" * 5000)), False)
    assert split_request_head(headers, 0, frozenset((b"traceparent",)))[1] is None


def test_host_stands_without_authority() -> None:
    fields = (b":method", b"GET"), (b":path", b"/"), (b"host", b"there")
    head = encode_request_head(HeaderList(fields, False), 0)
    assert head == b"GET / HTTP/1.1\r\nHost: there\r\n\r\n"


def test_cookies_are_one_line() -> None:
    lines = head_of((b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2"))
    assert lines[2:] == ["x: y", "Cookie: a=1; b=2"]


def test_content_length_is_written_once_or_the_framing_without_it() -> None:
    framing = {-1: ["Transfer-Encoding: chunked"], 0: [], 7: ["Content-Length: 7"]}
    length = (b"content-length", b"5")
    for body_size, line in framing.items():
        assert head_of(body_size=body_size)[2:] == line
        assert head_of(length, length, body_size=body_size)[2:] == ["Content-Length: 5"]


def test_fields_are_in_lower_case_and_without_those_of_connections() -> None:
    lines = [("X-Name", " v "), ("Connection", "close"), ("Transfer-Encoding", "chunked")]
    assert encode_fields([*lines, ("Upgrade", "x"), ("Keep-Alive", "5")]) == [(b"x-name", b"v")]


def test_fields_of_a_template() -> None:
    template = ResponseTemplate(200, "OK", (("Content-Type", "a/b"), ("Date", "now")))
    fields = response_fields(template, b"X-Request-Id: 1\r\n", 3)
    assert fields == (
        (b":status", b"200"),
        (b"content-type", b"a/b"),
        (b"date", b"now"),
        (b"server", b"tensorgate"),
        (b"x-request-id", b"1"),
        (b"content-length", b"3"),
    )
    assert response_fields(template, b"", 0)[-1] == (b"content-length", b"0")


def test_date_and_server_are_added() -> None:
    template = ResponseTemplate(204, "", (("Server", "theirs"),))
    fields = dict(response_fields(template, b"", 0))
    assert fields[b"server"] == b"theirs"
    assert fields[b"date"].endswith(b" GMT")
    assert b"content-length" not in fields
