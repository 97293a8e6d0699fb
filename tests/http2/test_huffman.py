from __future__ import annotations

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.huffman import huffman_decode, huffman_encode
from tests.http1.splits import LAW

_ORACLE = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


def test_each_symbol_has_the_code_of_the_rfc() -> None:
    assert huffman_encode(b"") == huffman_decode(b"") == b""
    for symbol in range(256):
        for text in (bytes([symbol]), bytes([symbol]) * 30, b"a%c0" % symbol):
            encoded = huffman_encode(text)
            assert encoded == _ORACLE.encode(text)
            assert huffman_decode(encoded) == text


@LAW
@given(st.one_of(st.binary(max_size=200), st.text("abcdefgh-/:0123456789").map(str.encode)))
def test_any_string_is_encoded_as_by_hpack(text: bytes) -> None:
    encoded = huffman_encode(text)
    assert encoded == _ORACLE.encode(text)
    assert huffman_decode(encoded) == text


def _decode(encoded: bytes) -> bytes | None:
    try:
        return huffman_decode(encoded)
    except Http2Error as error:
        caught = error
    assert caught.code is ErrorCode.COMPRESSION_ERROR
    assert caught.ends_connection
    return None


def _oracle_decode(encoded: bytes) -> bytes | None:
    try:
        return bytes(decode_huffman(encoded))
    except Exception:
        return None


@LAW
@given(st.binary(max_size=120))
def test_any_bytes_are_decoded_as_by_hpack(encoded: bytes) -> None:
    assert _decode(encoded) == _oracle_decode(encoded)


def test_each_last_byte_is_decoded_as_by_hpack() -> None:
    for start in (b"", b"\x00", b"\x1c\x64", b"\xff\xff\xfe", b"\xfe\x01"):
        for byte in range(256):
            encoded = start + bytes([byte])
            assert _decode(encoded) == _oracle_decode(encoded)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        # "a" is 00011: then the padding has zeros, or more than seven ones.
        ("18", "invalid padding"),
        ("1e", "invalid padding"),
        ("1fff", "invalid padding"),
        ("ff", "invalid padding"),
        ("ffffff", "invalid padding"),
        # EOS, alone and before "a".
        ("ffffffff", "EOS"),
        ("fffffffc63", "EOS"),
    ],
)
def test_invalid_string_is_rejected(encoded: str, reason: str) -> None:
    with pytest.raises(Http2Error, match=reason):
        huffman_decode(bytes.fromhex(encoded))


def test_decoded_string_has_at_most_8_fifths_of_the_bytes() -> None:
    assert huffman_decode(b"\x00" * 1000) == b"0" * 1600
