from __future__ import annotations

from email.utils import parsedate_to_datetime

import pytest

from gateway.listener.messages import encode_response
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
        (304, "", (), b"", "304 Not Modified", []),
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


@pytest.mark.parametrize("header", [("SERVER", "triton"), ("date", "then")])
def test_only_the_missing_one_of_server_and_date_is_added(header: tuple[str, str]) -> None:
    template = ResponseTemplate(200, "", (header,))
    names = [
        line.partition(b":")[0].lower()
        for line in _encoded(template, b"", b"", False).split(b"\r\n")
    ]
    assert (names.count(b"server"), names.count(b"date")) == (1, 1)


def test_length_of_a_304_is_that_of_the_body_that_is_not_sent() -> None:
    template = ResponseTemplate(304, "", ())
    data = _encoded(template, b"Content-Length: 5\r\n", b"", False)
    assert data.endswith(b"\r\nContent-Length: 5\r\n\r\n")
    assert data.count(b"Content-Length") == 1


def test_cached_head_gets_the_length_of_each_body() -> None:
    template = ResponseTemplate(200, "OK", JSON)
    for body in (b"", b"one", b"three", b"one"):
        data = _encoded(template, b"", body, False)
        assert data.endswith(b"\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


@pytest.mark.parametrize("status", [204, 304])
def test_response_without_a_body_has_none(status: int) -> None:
    """The client would take it for the start of the next response."""
    template = ResponseTemplate(status, "", (("Content-Type", "application/json"),))
    assert _encoded(template, b"", b'{"error":"x"}', last=False).endswith(b"\r\n\r\n")
