"""Heads of HTTP/2 as heads of HTTP/1.1, and the other way round."""

import pytest

from gateway.http2.hpack import HeaderList
from gateway.listener.http2_messages import encode_fields, encode_request_head, response_fields
from gateway.proxy.interfaces import ResponseTemplate


def head_of(*more: tuple[bytes, bytes], body_size: int = 0, method: bytes = b"POST") -> list[str]:
    pseudo = (b":method", method), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"h:1")
    headers = HeaderList((*pseudo, *more), False)
    head = encode_request_head(headers, body_size).decode()
    assert head.endswith("\r\n\r\n")
    return head.removesuffix("\r\n\r\n").split("\r\n")


def test_authority_is_the_host() -> None:
    assert head_of((b"host", b"H:1"), (b"a", b"1")) == ["POST /x HTTP/1.1", "Host: h:1", "a: 1"]


def test_host_stands_without_authority() -> None:
    fields = (b":method", b"GET"), (b":path", b"/"), (b"host", b"there")
    head = encode_request_head(HeaderList(fields, False), 0)
    assert head == b"GET / HTTP/1.1\r\nHost: there\r\n\r\n"


def test_cookies_are_one_line() -> None:
    lines = head_of((b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2"))
    assert lines[2:] == ["x: y", "Cookie: a=1; b=2"]


@pytest.mark.parametrize(
    ("body_size", "line"),
    [(-1, ["Transfer-Encoding: chunked"]), (0, []), (7, ["Content-Length: 7"])],
)
def test_framing_without_content_length(body_size: int, line: list[str]) -> None:
    assert head_of(body_size=body_size)[2:] == line


@pytest.mark.parametrize("body_size", [-1, 0, 5])
def test_content_length_is_written_once(body_size: int) -> None:
    length = (b"content-length", b"5")
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
