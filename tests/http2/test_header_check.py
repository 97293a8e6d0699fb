from __future__ import annotations

import pytest

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.header_check import check_request, check_response, check_trailers
from gateway.http2.hpack import Header
from gateway.sizes import CACHED_LINES

Fields = tuple[Header, ...]

METHOD = (b":method", b"POST")
SCHEME = (b":scheme", b"http")
PATH = (b":path", b"/v2")
AUTHORITY = (b":authority", b"a.test:80")
REQUEST = (METHOD, SCHEME, PATH, AUTHORITY)
OK = (b":status", b"200")


def without(name: Header) -> Fields:
    return tuple(each for each in REQUEST if each != name)


VALID_REQUESTS: list[tuple[Fields, int]] = [
    (REQUEST, -1),
    (without(AUTHORITY), -1),
    ((*without(AUTHORITY), (b"host", b"b.test")), -1),
    ((*REQUEST, (b"host", b"A.TEST:80")), -1),
    ((*REQUEST, (b"host", b"a.test:80"), (b"host", b"a.test:80")), -1),
    ((*REQUEST, (b"te", b"trailers")), -1),
    ((*REQUEST, (b"content-length", b"17")), 17),
    ((*REQUEST, (b"content-length", b"017"), (b"content-length", b"17")), 17),
    ((*REQUEST, (b"x-empty", b"")), -1),
    ((*REQUEST, (b"x-text", b"a b\tc \xe4")), -1),
    ((*REQUEST, (b"x!#$%&'*+-.^_`|~9", b"a")), -1),
    (((b":method", b"OPTIONS"), SCHEME, (b":path", b"*"), AUTHORITY), -1),
    (((b":method", b"CONNECT"), AUTHORITY, (b"content-length", b"5")), -1),
    (((b":method", b"M-SEARCH"), SCHEME, (b":path", b"/?q=%20#"), (b":authority", b"[::1]:1")), -1),
]


@pytest.mark.parametrize(("fields", "length"), VALID_REQUESTS)
def test_valid_requests(fields: Fields, length: int) -> None:
    for _ in range(2):  # what is valid is cached
        assert check_request(fields, 1) == length


INVALID_REQUESTS: list[tuple[Fields, str]] = [
    (without(METHOD), ":method is missing"),
    (without(SCHEME), ":scheme is missing"),
    (without(PATH), ":path is missing"),
    ((*without(METHOD), (b":method", b"GET /")), "invalid ':method'"),
    ((*without(SCHEME), (b":scheme", b"http://")), "invalid ':scheme'"),
    ((*without(PATH), (b":path", b"v2")), "invalid ':path'"),
    ((*without(PATH), (b":path", b"/ HTTP/1.1")), "invalid ':path'"),
    ((*without(PATH), (b":path", b"/\r\nx: y")), "invalid ':path'"),
    ((*without(PATH), (b":path", b"*")), ":path must begin with /"),
    ((*without(AUTHORITY), (b":authority", b"user@a.test")), "invalid ':authority'"),
    ((*without(AUTHORITY), (b"host", b"user@a.test")), "invalid host"),
    ((*REQUEST, (b"host", b"b.test")), ":authority and host differ"),
    ((*REQUEST, (b"host", b"a.test:80"), (b"host", b"b.test")), "more than one host"),
    ((*without(AUTHORITY), (b"host", b"a.test"), (b"host", b"b.test")), "more than one host"),
    ((*REQUEST, METHOD), "more than one ':method'"),
    ((METHOD, SCHEME, PATH, (b"a", b"b"), AUTHORITY), "':authority' after a regular field"),
    ((*REQUEST, OK), "':status' has no place here"),
    ((*REQUEST, (b":protocol", b"websocket")), "':protocol' has no place here"),
    (((b":method", b"CONNECT"), SCHEME, AUTHORITY), "CONNECT needs"),
    (((b":method", b"CONNECT"), PATH, AUTHORITY), "CONNECT needs"),
    (((b":method", b"CONNECT"), (b":authority", b"")), "CONNECT needs"),
    ((*REQUEST, (b"content-length", b"1"), (b"content-length", b"2")), "content-length twice"),
]
INVALID_FIELDS: list[tuple[Header, str]] = [
    ((b"Accept", b"a"), "the name 'Accept' has upper-case letters"),
    ((b"", b"a"), "invalid name ''"),
    ((b"a:b", b"a"), "invalid name 'a:b'"),
    ((b"\xe4", b"a"), "invalid name"),
    ((b"x-a", b"a\r\nb: c"), "the value of 'x-a' has control characters"),
    ((b"x-a", b"a\0b"), "control characters"),
    ((b"x-a", b"\x7f"), "control characters"),
    ((b"connection", b"close"), "'connection' has no meaning in HTTP/2"),
    ((b"proxy-connection", b"close"), "no meaning"),
    ((b"keep-alive", b"timeout=5"), "no meaning"),
    ((b"transfer-encoding", b"chunked"), "no meaning"),
    ((b"upgrade", b"h2c"), "no meaning"),
    ((b"te", b"gzip"), "'te' may only be trailers"),
    ((b"content-length", b""), "invalid content-length"),
    ((b"content-length", b"+1"), "invalid content-length"),
    ((b"content-length", b"9" * 19), "invalid content-length"),
    ((b"A" * 10_000, b""), f"the name '{'A' * 60}' has upper-case letters"),
]


def refusal(fields: Fields, check: object) -> str:
    """Return why a check refuses fields; it is an error of their stream."""
    assert callable(check)
    with pytest.raises(Http2Error) as raised:
        check(fields, 7)
    assert raised.value.code == ErrorCode.PROTOCOL_ERROR
    assert raised.value.stream_id == 7
    return raised.value.reason


@pytest.mark.parametrize(("fields", "reason"), INVALID_REQUESTS)
def test_invalid_requests(fields: Fields, reason: str) -> None:
    for _ in range(2):
        assert reason in refusal(fields, check_request)


@pytest.mark.parametrize(("field", "reason"), INVALID_FIELDS)
def test_invalid_fields(field: Header, reason: str) -> None:
    for _ in range(2):
        assert reason in refusal((*REQUEST, field), check_request)
        assert reason in refusal((OK, field), check_response)
        assert reason in refusal((field,), check_trailers)


@pytest.mark.parametrize("value", [b" a", b"a\t", b" \t", b"Bearer "])
@pytest.mark.parametrize("name", [b"x-a", b"authorization"])
def test_white_space_around_a_value_is_that_of_requests_alone(name: bytes, value: bytes) -> None:
    field = (name, value)
    for _ in range(2):
        assert check_request((*REQUEST, field), 1) == -1
        check_trailers((field,), 1, is_request=True)
        assert "white space" in refusal((OK, field), check_response)
        assert "white space" in refusal((field,), check_trailers)


def test_white_space_is_no_part_of_the_values_that_are_checked() -> None:
    fields = ((b"content-length", b" 5\t"), (b"host", b"a.test:80 "), (b"te", b"trailers "))
    assert check_request((*REQUEST, *fields), 1) == 5
    assert ":authority and host differ" in refusal((*REQUEST, (b"host", b"b.test ")), check_request)
    assert "has no meaning" in refusal((*REQUEST, (b"connection", b" close ")), check_request)
    assert "invalid ':path'" in refusal((METHOD, SCHEME, (b":path", b"/ ")), check_request)
    assert "white space" in refusal((*REQUEST, (b"x-a", b" \0 ")), check_request)


def test_status_of_responses() -> None:
    length, other = (b"content-length", b"5"), (b"a", b"b")
    for status in (b"100", b"599", b"999"):
        assert check_response(((b":status", status), other), 1) == (int(status), -1)
        assert check_response(((b":status", status), length), 1) == (int(status), 5)
    for status in (b"", b"20", b"2000", b"099", b"+20", b"\xb2\xb2\xb2"):
        assert "invalid ':status'" in refusal(((b":status", status),), check_response)
    for fields, reason in (
        ((), ":status is missing"),
        (((b":status", b"101"),), "101 has no meaning"),
        ((OK, OK), "more than one ':status'"),
        ((OK, METHOD), "':method' has no place here"),
        ((other, OK), "':status' after a regular field"),
    ):
        assert reason in refusal(fields, check_response)


def test_trailers_have_no_pseudo_header_fields() -> None:
    check_trailers(((b"grpc-status", b"0"), (b"grpc-message", b"")), 1)
    for field in (OK, *REQUEST, (b":x", b"")):
        assert "has no place here" in refusal((field,), check_trailers)
        assert "after a regular field" in refusal(((b"a", b"b"), field), check_trailers)


@pytest.mark.parametrize("name", [b"x-any", b"traceparent"])
def test_field_is_valid_without_control_characters_and_space_around_it(name: bytes) -> None:
    for byte in range(256):
        for value in (b"a%cb" % byte, b"%c" % byte, b"%cb" % byte, b"a%c" % byte):
            is_control = byte != 9 and (byte < 32 or byte == 127)
            is_around = byte in b" \t" and len(value) < 3
            for _ in range(2):
                if is_control or is_around:
                    assert "control characters" in refusal((OK, (name, value)), check_response)
                else:
                    assert check_response((OK, (name, value)), 1) == (200, -1)


def test_bad_field_is_refused_after_good_ones_that_were_seen_before() -> None:
    good = ((b"x-good", b"1"), (b"traceparent", b"00-1"))
    for _ in range(2):
        assert check_request((*REQUEST, *good), 1) == -1
        for bad, reason in INVALID_FIELDS:
            assert reason in refusal((*REQUEST, *good, bad), check_request)
        assert "has no place here" in refusal((OK, *good), check_request)
        assert "has no place here" in refusal((*REQUEST, *good), check_response)
        assert "more than one" in refusal((METHOD, METHOD, SCHEME, PATH), check_request)


def test_many_fields_do_not_fill_the_cache() -> None:
    for number in range(2 * CACHED_LINES):
        check_trailers(((b"x-%d" % number, b"a"), (b"x-large", b"v" * 1000)), 1)
    from gateway.http2 import header_check

    assert len(header_check._known) <= 2 * CACHED_LINES
    assert header_check._known.get((b"x-large", b"v" * 1000)) is None
