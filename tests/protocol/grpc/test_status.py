from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ErrorKind
from gateway.protocol.grpc.status import (
    MAX_ENCODED_MESSAGE,
    GrpcStatus,
    decode_message,
    encode_message,
    http_status,
)
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))

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
    assert decode_message(value) == text


@LAW
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_message_of_any_text_is_valid_and_decodes_to_the_text(text: str) -> None:
    encoded = encode_message(text)
    assert PERCENT_ENCODED.fullmatch(encoded)
    assert decode_message(encoded) == text


@pytest.mark.parametrize("character", ["a", "ö", "\n", "€", "😀"])
def test_long_message_is_cut_to_whole_characters(character: str) -> None:
    one = len(encode_message(character))
    for start in ("", "a", "ab"):
        text = start + character * 2 * MAX_ENCODED_MESSAGE
        encoded = encode_message(text)
        assert MAX_ENCODED_MESSAGE - one < len(encoded) <= MAX_ENCODED_MESSAGE
        decoded = decode_message(encoded)
        assert decoded.endswith("...")
        assert text.startswith(decoded.removesuffix("..."))


def test_message_that_fits_exactly_is_not_cut() -> None:
    text = "ö" * (MAX_ENCODED_MESSAGE // 6) + "a" * (MAX_ENCODED_MESSAGE % 6)
    assert len(encode_message(text)) == MAX_ENCODED_MESSAGE
    assert decode_message(encode_message(text)) == text
    assert decode_message(encode_message(text + "a")).endswith("...")
    assert encode_message("a" * MAX_ENCODED_MESSAGE) == "a" * MAX_ENCODED_MESSAGE
