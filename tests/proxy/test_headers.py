"""Headers that pass, that routes change, and those of errors."""

import re

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.observe.call_record import CallRecord
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.errors import end_dropped_call, error_body, is_grpc_content
from gateway.proxy.headers import (
    ResponseHeaderPolicy,
    end_to_end,
    server_timing,
    to_server,
    with_body,
)


def _headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    "name",
    [
        "Connection",
        "Expect",
        "Keep-Alive",
        "Proxy-Authenticate",
        "Proxy-Authentication-Info",
        "Proxy-Authorization",
        "Proxy-Connection",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
    ],
)
@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
def test_hop_by_hop_headers_are_dropped(name: str, spelling: type[str]) -> None:
    assert not end_to_end(_headers((spelling(name), "x"), (spelling(name), "y")))


@pytest.mark.parametrize("value", ["X-A,x-b", " x-a , X-B ", "close, x-a,,x-b", ",x-a,x-b,"])
def test_headers_named_by_connection_are_dropped(value: str) -> None:
    headers = _headers(("X-A", "1"), ("Connection", value), ("X-B", "2"), ("X-C", "3"))
    assert list(end_to_end(headers).items()) == [("X-C", "3")]


@pytest.mark.parametrize(
    "name", ["Host", "Content-Length", "Content-Type", "Content-Encoding", HEADER_LENGTH]
)
def test_end_to_end_headers_cannot_be_named_by_connection(name: str) -> None:
    # RFC 9110, section 7.6.1
    for value in (name, f"close, {name.lower()}", f"x-a,{name.upper()} "):
        headers = _headers((name, "1"), ("Connection", value), ("X-A", "2"))
        assert end_to_end(headers)[name] == "1"


def test_connection_cannot_drop_headers_that_the_gateway_adds() -> None:
    headers = _headers(("Connection", "x-request-id, via"), ("Via", "1.1 a"), ("X-Request-Id", "a"))
    added_headers = (("X-Request-Id", "b"), ("Via", "1.1 a, 1.1 b"))
    dropped_headers = frozenset(("x-request-id", "via"))
    assert tuple(to_server(headers, dropped_headers, added_headers).items()) == added_headers


def test_other_headers_keep_their_order_and_repetition() -> None:
    pairs = [("X-Two", "a"), ("Host", "h"), ("x-two", "b"), ("Content-Length", "7")]
    assert list(end_to_end(_headers(*pairs)).items()) == pairs


def test_with_body_sets_and_drops_headers() -> None:
    old = (("Content-Length", "7"), (HEADER_LENGTH, "5"), ("TE", "x"))
    headers = _headers(*old, ("content-type", "a"), ("Content-Type", "b"), ("ETag", "c"))
    changed = {"Content-Type": "d", "ETag": None, HEADER_LENGTH: "3"}
    assert dict(with_body(headers, changed)) == {"Content-Type": "d", HEADER_LENGTH: "3"}


@pytest.mark.parametrize(
    ("said", "vary"),
    [
        ([], "Accept-Encoding"),
        ([""], "Accept-Encoding"),
        (["Origin"], "Origin, Accept-Encoding"),
        (["Origin", "Accept"], "Origin, Accept, Accept-Encoding"),
        (["Origin, accept-encoding"], "Origin, accept-encoding"),
        (["*"], "*"),
    ],
)
def test_vary_names_accept_encoding(said: list[str], vary: str) -> None:
    headers = CIMultiDict([("X-A", "1"), *(("Vary", value) for value in said)])
    policy = ResponseHeaderPolicy(adds_vary=True)
    assert policy.apply_to_lines(tuple(headers.items())) == (("X-A", "1"), ("Vary", vary))
    policy.apply(headers)
    assert list(headers.items()) == [("X-A", "1"), ("Vary", vary)]


# W3C Server Timing, section 3.2, with one parameter only.
_VALUE = re.compile(r"[a-z-]+;dur=\d+\.\d+(, [a-z-]+;dur=\d+\.\d+)*")


def _record(**known: float | str) -> CallRecord:
    record = CallRecord("POST", "/v2/models/m/infer")
    for name, value in known.items():
        setattr(record, name, value)
    return record


@pytest.mark.parametrize(
    ("known", "response_seconds", "value"),
    [
        ({}, None, ""),
        (
            {"prepare_seconds": 0.0012344, "queue_seconds": 0.25, "server_form": "binary"},
            None,
            "queue;dur=250.0, convert-request;dur=1.234",
        ),
        (
            {
                "prepare_seconds": 0.0,
                "queue_seconds": 1e-7,
                "first_byte_seconds": 12.5,
                "server_form": "json",
            },
            0.0008,
            "queue;dur=0.0, convert-request;dur=0.0, server;dur=12500.0, convert-response;dur=0.8",
        ),
        (
            {"prepare_seconds": 0.001, "first_byte_seconds": 0.01},
            0.001,
            "queue;dur=0.0, server;dur=10.0",
        ),
    ],
    ids=["not queued yet", "sent", "converted", "passed untouched"],
)
def test_value_has_the_metrics_that_are_known(
    known: dict[str, float | str], response_seconds: float | None, value: str
) -> None:
    assert server_timing(_record(**known), response_seconds) == value
    assert not value or _VALUE.fullmatch(value)


@pytest.mark.parametrize("has_started", [False, True])
def test_dropped_call_ends_with_unavailable_and_its_error(has_started: bool) -> None:
    record = CallRecord("POST", "/a.b/c")
    record.error = "100 % über"
    lines = end_dropped_call(record, has_started)
    assert lines[-2:] == (("grpc-status", "14"), ("grpc-message", "100 %25 %C3%BCber"))
    assert lines[:-2] == (
        () if has_started else ((":status", "200"), ("content-type", "application/grpc"))
    )
    assert (record.status, record.grpc_status) == (503, 14)


def test_content_of_grpc_is_recognized() -> None:
    assert is_grpc_content(b"application/grpc")
    assert is_grpc_content(b"application/grpc+proto")
    assert not is_grpc_content(b"application/grpc-web")
    assert not is_grpc_content(b"application/\xff")


def test_error_body_is_a_json_object() -> None:
    assert error_body("say “what”\n") == '{"error":"say “what”\\n"}'.encode()
    # How aiohttp decodes a header that is not UTF-8.
    assert error_body("caf\udce9") == b'{"error":"caf?"}'
