"""The status, the message and the timeout of gRPC calls."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.headers import format_timeout, parse_timeout, read_message
from gateway.protocol.grpc.status import (
    MAX_ENCODED_MESSAGE,
    GrpcStatus,
    encode_message,
    http_status,
)
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))


def decoded(value: str) -> str:
    return read_message([("Grpc-Message", value)])


# Percent-Encoded of PROTOCOL-HTTP2.md.
PERCENT_ENCODED = re.compile(r"(?:[\x20-\x24\x26-\x7E]|%[0-9A-F]{2})*")


def test_undefined_code_is_unknown() -> None:
    assert {http_status(code) for code in (-1, 17, 99, 2**31)} == {500}


CODES_OF_ERRORS = {
    GrpcStatus.INVALID_ARGUMENT: "BAD_REQUEST",
    GrpcStatus.UNAUTHENTICATED: "UNAUTHENTICATED",
    GrpcStatus.PERMISSION_DENIED: "FORBIDDEN",
    GrpcStatus.NOT_FOUND: "NOT_FOUND",
    GrpcStatus.UNIMPLEMENTED: "NOT_ALLOWED UNSUPPORTED_ENCODING UNSUPPORTED",
    GrpcStatus.FAILED_PRECONDITION: "NOT_ACCEPTABLE LOOP",
    GrpcStatus.DEADLINE_EXCEEDED: "CLIENT_TIMEOUT SERVER_TIMEOUT",
    GrpcStatus.RESOURCE_EXHAUSTED: "TOO_LARGE OVERLOADED EXHAUSTED",
    GrpcStatus.INTERNAL: "INTERNAL",
    GrpcStatus.UNAVAILABLE: "BAD_RESPONSE NO_RESPONSE NOT_READY UNREACHABLE",
}


def test_error_of_the_gateway_has_the_code() -> None:
    """``errors`` is below ``protocol``, so its table has plain numbers."""
    for code, names in CODES_OF_ERRORS.items():
        assert {ErrorKind[name].value.grpc_code for name in names.split()} == {code}


# --------------------------------------------------------------------------- grpc-message


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("model 'a' is not ready: ~ /", "model 'a' is not ready: ~ /"),
        ("two\r\nlines\t\x00\x7f", "two%0D%0Alines%09%00%7F"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        # What is no text, as from a file name or a peer.
        ("a\udcffb", "a?b"),
    ],
)
def test_message_is_percent_encoded(text: str, encoded: str) -> None:
    assert encode_message(text) == encoded


@pytest.mark.parametrize(
    ("value", "text"),
    [("gr%c3%b6%C3%9Fe", "größe"), ("%zz%4", "%zz%4"), ("%FF%41", "\ufffdA"), ("ö+b", "ö+b")],
)
def test_invalid_parts_of_a_message_do_not_lose_the_rest(value: str, text: str) -> None:
    assert decoded(value) == text


@LAW
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_message_of_any_text_is_valid_and_decodes_to_the_text(text: str) -> None:
    encoded = encode_message(text)
    assert PERCENT_ENCODED.fullmatch(encoded)
    assert decoded(encoded) == text


@pytest.mark.parametrize("character", ["a", "ö", "\n", "€", "😀"])
def test_long_message_is_cut_to_whole_characters(character: str) -> None:
    one = len(encode_message(character))
    for start in ("", "a", "ab"):
        text = start + character * 2 * MAX_ENCODED_MESSAGE
        encoded = encode_message(text)
        assert MAX_ENCODED_MESSAGE - one < len(encoded) <= MAX_ENCODED_MESSAGE
        assert decoded(encoded).endswith("...")
        assert text.startswith(decoded(encoded).removesuffix("..."))


def test_message_that_fits_exactly_is_not_cut() -> None:
    text = "ö" * (MAX_ENCODED_MESSAGE // 6) + "a" * (MAX_ENCODED_MESSAGE % 6)
    assert len(encode_message(text)) == MAX_ENCODED_MESSAGE
    assert decoded(encode_message(text)) == text
    assert decoded(encode_message(text + "a")).endswith("...")
    assert encode_message("a" * MAX_ENCODED_MESSAGE) == "a" * MAX_ENCODED_MESSAGE


# ---------------------------------------------------------------------------- grpc-timeout

UNITS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "S": Fraction(1),
    "M": Fraction(60),
    "H": Fraction(3600),
}


def exact(value: str) -> Fraction:
    return int(value[:-1]) * UNITS[value[-1]]


@pytest.mark.parametrize(
    "value",
    [
        *("", "1", "S", "1s", "1h", "100000000n", "000000001S", "-1S", "+1S", "1.5S", " 1S", "1 S"),
        *("1S ", "1S\n", "1SS", "1m1S", "0x1S", "١S", "²S", "1_0S", "tomorrow"),
    ],
)
def test_timeout_of_another_form_is_refused_and_quoted(value: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_timeout(value)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message.startswith("grpc-timeout must be 1 to 8 digits and one of H, M, ")
    assert value in caught.value.message or "\\n" in caught.value.message


@pytest.mark.parametrize(
    ("seconds", "value"),
    [
        (0.0, "1n"),
        (100.0, "100000m"),
        (1e8 - 0.5, "99999999S"),
        (1e8, "1666666M"),
        (math.inf, "99999999H"),
    ],
)
def test_timeout_is_written_in_the_smallest_unit_that_fits(seconds: float, value: str) -> None:
    assert format_timeout(seconds) == value


@LAW
@given(
    st.one_of(
        st.floats(1e-9, 1e12),
        st.floats(1e-9, 100),
        st.integers(1, 10**9).map(lambda value: value / 1000),
    )
)
@example(0.29)
@example(0.1)
def test_timeout_is_never_longer_than_what_is_left_and_nearly_as_long(seconds: float) -> None:
    value = format_timeout(seconds)
    assert re.fullmatch(r"[0-9]{1,8}[HMSmun]", value)
    left = min(Fraction(seconds), 99999999 * UNITS["H"])
    assert left - UNITS[value[-1]] < exact(value) <= left
    assert parse_timeout(value) <= seconds
    if seconds < 27 * 3600:
        assert UNITS[value[-1]] <= UNITS["m"]


@LAW
@given(st.integers(0, 10**8 - 1), st.sampled_from(sorted(UNITS)))
def test_seconds_are_the_nearest_to_the_timeout(number: int, unit: str) -> None:
    assert parse_timeout(f"{number}{unit}") == float(number * UNITS[unit])
