from __future__ import annotations

import tracemalloc
from contextlib import suppress

import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.hpack import (
    MAX_FIELDS,
    MAX_HEADER_LIST,
    NEVER_INDEXED,
    STATIC_FIELDS,
    STATIC_NAMES,
    STATIC_SIZE,
    STATIC_TABLE,
    Decoder,
    DynamicTable,
    Encoder,
    Header,
    field_size,
)
from gateway.http2.huffman import huffman_decode, huffman_encode
from tests.http1.splits import LAW
from tests.support.rfc7541 import EXAMPLES, SIZE_256, Fields


def _dynamic_table(decoder: Decoder) -> Fields:
    """Return the fields of the dynamic table, which a block of one index each shows."""
    found: list[Header] = []
    with suppress(Http2Error):
        while True:
            found += decoder.decode(bytes([0x80 | 62 + len(found)])).fields
    return tuple(found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_decodes_the_examples_of_the_rfc(name: str) -> None:
    size, blocks = EXAMPLES[name]
    decoder = Decoder()
    if size == 256:
        assert decoder.decode(SIZE_256).fields == ()
    for block, fields, table in blocks:
        headers = decoder.decode(bytes.fromhex(block))
        assert headers.fields == fields
        assert not headers.too_large
        assert _dynamic_table(decoder) == table
        assert decoder.table.size == sum(32 + len(name) + len(value) for name, value in table)


def test_encodes_the_requests_of_the_rfc() -> None:
    encoder = Encoder()
    for block, fields, _ in EXAMPLES["C_4"][1]:
        assert encoder.encode(fields).hex() == block


_NAMES = st.one_of(
    st.sampled_from(
        [b":path", b":status", b"te", b"date", b"cookie", b"authorization", b"x", b"grpc-timeout"]
    ),
    st.text("abcxyz-", min_size=1, max_size=10).map(str.encode),
)
_VALUES = st.one_of(
    st.sampled_from([b"", b"/", b"200", b"POST", b"trailers", b"a" * 300, b"\0" * 255]),
    st.binary(max_size=20),
    st.text("abcdef0123456789-", max_size=60).map(str.encode),
)
_LISTS = st.lists(
    st.one_of(st.lists(st.tuples(_NAMES, _VALUES), max_size=8).map(tuple), st.integers(0, 5000)),
    max_size=12,
)


@LAW
@given(_LISTS, st.data())
def test_hpack_decodes_what_is_encoded(steps: list[Fields | int], data: st.DataObject) -> None:
    encoder, oracle = Encoder(), hpack.Decoder()
    again = Decoder()
    for step in steps:
        if isinstance(step, int):
            encoder.limit_table(step)
            oracle.max_allowed_table_size = step
            continue
        for _ in range(data.draw(st.integers(1, 3))):
            block = encoder.encode(step)
            found = oracle.decode(block, raw=True)
            assert tuple((bytes(name), bytes(value)) for name, value in found) == step
            decoded = again.decode(block)
            assert decoded.fields == step
            assert again.table.size == encoder.table.size <= encoder.table.max_size


def _decode(decoder: Decoder, block: bytes) -> Fields | None:
    try:
        return decoder.decode(block).fields
    except Http2Error as error:
        caught = error
    assert caught.ends_connection
    return None


def _oracle_decode(decoder: hpack.Decoder, block: bytes) -> Fields | None:
    try:
        found = decoder.decode(block, raw=True)
    except hpack.HPACKError:
        return None
    return tuple((bytes(name), bytes(value)) for name, value in found)


@st.composite
def _mutated(draw: st.DrawFn) -> list[bytes]:
    """Draw blocks of an encoder, the last of them with a few bytes changed."""
    encoder = hpack.Encoder()
    lists = draw(st.lists(st.lists(st.tuples(_NAMES, _VALUES), min_size=1, max_size=6), max_size=4))
    blocks = []
    for fields in lists:
        encoder.header_table_size = draw(st.sampled_from([4096, 4096, 0, 100]))
        blocks.append(encoder.encode(fields, huffman=draw(st.booleans())))
    if blocks:
        last = bytearray(blocks[-1])
        for _ in range(draw(st.integers(0, 3))):
            last[draw(st.integers(0, len(last) - 1))] = draw(st.integers(0, 255))
        blocks[-1] = bytes(last[: draw(st.integers(0, len(last)))])
    return blocks


@LAW
@given(st.one_of(_mutated(), st.lists(st.binary(max_size=40), max_size=5)))
def test_any_bytes_are_decoded_as_by_hpack(blocks: list[bytes]) -> None:
    decoder, oracle = Decoder(), hpack.Decoder()
    for block in blocks:
        fields = _decode(decoder, block)
        expected = _oracle_decode(oracle, block)
        assert fields == expected
        if fields is None:
            break


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("80", "index 0"),
        ("be", "index 62 is beyond the table"),
        ("ff80808001", "index 2097279 is beyond the table"),
        ("ff8080808080", "integer of too many bytes"),
        ("ffffffffff0f", "integer of too many bytes"),
        ("7f", "ends within an integer"),
        ("ff80", "ends within an integer"),
        ("40", "ends before a string"),
        ("4001", "ends within a string"),
        ("40016105", "ends within a string"),
        ("007fffffff7f", "ends within a string"),
        ("82" + "20", "change of the table size after a field"),
        ("3fe21f", "a table size of 4097 bytes, where 4096 are allowed"),
        ("20" * 17, "too many changes of the table size"),
    ],
)
def test_invalid_block_is_a_compression_error(block: str, reason: str) -> None:
    with pytest.raises(Http2Error, match=reason) as caught:
        Decoder().decode(bytes.fromhex(block))
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR
    assert caught.value.ends_connection


def test_encoder_tells_the_smallest_table_size_and_never_grows_the_table_again() -> None:
    encoder, decoder = Encoder(), Decoder()
    fields = ((b"a", b"b"),)
    decoder.decode(encoder.encode(fields))
    assert encoder.table.size == 34
    for size in (2**32 - 1, 2000, 40, 3000):
        encoder.limit_table(size)
    block = encoder.encode(fields)
    assert block == bytes.fromhex("3f09be")
    assert decoder.decode(block).fields == fields
    assert encoder.encode(fields) == b"\xbe"
    encoder.limit_table(0)
    assert encoder.encode(fields) == b"\x20\x00\x01a\x01b"


def test_table_of_the_encoder_is_bounded_whatever_the_peer_allows() -> None:
    encoder = Encoder()
    encoder.limit_table(2**32 - 1)
    for number in range(1000):
        encoder.encode(((b"x-%d" % number, b"y" * 100),))
        assert encoder.table.size <= 4096
    assert encoder.encode(((b":method", b"GET"),)) == b"\x82"


@pytest.mark.parametrize("name", sorted(NEVER_INDEXED))
def test_secrets_are_never_indexed(name: bytes) -> None:
    encoder, decoder = Encoder(), Decoder()
    fields = ((name, b"secret"),)
    first = encoder.encode(fields)
    assert encoder.encode(fields) == first
    assert first[0] & 0xF0 == 0x10
    assert encoder.table.size == 0
    assert decoder.decode(first).fields == fields


def test_values_that_differ_do_not_fill_the_table() -> None:
    encoder = Encoder()
    for number in range(100):
        encoder.encode(((b"content-length", b"%d" % number), (b"grpc-timeout", b"%dm" % number)))
    assert encoder.table.size == 0


def test_repeated_lists_are_encoded_by_indexes_only() -> None:
    encoder, decoder = Encoder(), Decoder()
    fields = ((b":path", b"/p"), (b"te", b"trailers"))
    others = ((b":path", b"/q"), (b"te", b"trailers"))
    for each in (fields, others, fields, others, fields, fields):
        block = encoder.encode(each)
        assert decoder.decode(block).fields == each
    assert len(block) == 2


def test_field_is_written_by_its_index_of_the_moment() -> None:
    encoder, decoder = Encoder(), Decoder()
    fields: list[Header] = [(b"x-%d" % number, b"y" * 400) for number in range(12)]
    for number in range(60):  # nine fit into the table
        some = tuple(fields[number * place % 12] for place in (0, 1, 5, 7))
        assert decoder.decode(
            encoder.encode((*some, (b"traceparent", b"00-%d" % number)))
        ).fields == (
            *some,
            (b"traceparent", b"00-%d" % number),
        )


def test_name_without_an_index_stays_literal_when_its_value_is_in_the_static_table() -> None:
    fields: Fields = ((b"age", b""), (b"authorization", b""), (b":path", b"/"))
    block = Encoder().encode(fields)
    assert block == b"\x0f\x06\x00\x1f\x08\x00\x84"
    assert Decoder().decode(block).fields == fields


def test_repeated_block_of_literals_is_decoded_by_the_table_of_the_moment() -> None:
    decoder, block = Decoder(), b"\x0f\x2f\x01v"  # the name is that of the newest field
    for name in (b"a", b"b", b"c"):
        decoder.decode(b"\x40\x01" + name + b"\x01x")
        for _ in range(2):
            assert decoder.decode(block).fields == ((name, b"v"),)


def test_broken_block_is_refused_each_time_after_valid_ones() -> None:
    decoder, valid = Decoder(), b"\x82\x00\x01a\x01b"
    for _ in range(3):
        assert decoder.decode(valid).fields == ((b":method", b"GET"), (b"a", b"b"))
        for broken in (valid[:-1], valid + b"\xbe", valid + b"\x20"):
            with pytest.raises(Http2Error):
                decoder.decode(broken)


def test_list_of_the_maximum_size_is_decoded() -> None:
    """What is beyond it is not expanded: one byte of a block can mean 4 KB."""
    for more, fits in ((0, 16), (1, 15)):
        fields = [(b"x", b"y" * (4096 - 33))] * 15 + [(b"x", b"y" * (4096 - 33 + more))]
        headers = Decoder().decode(hpack.Encoder().encode(fields))
        assert headers.fields == tuple(fields[:fits])
        assert headers.too_large == (fits < 16)


def test_table_stays_in_sync_after_a_list_that_is_too_large() -> None:
    encoder, decoder = hpack.Encoder(), Decoder()
    large = [(b"x-%d" % number, b"y" * 40) for number in range(900)]
    assert decoder.decode(encoder.encode(large)).too_large
    assert decoder.decode(encoder.encode(large)).too_large
    small = tuple(large[-9:])
    headers = decoder.decode(encoder.encode(small))
    assert headers.fields == small
    assert not headers.too_large


def test_block_of_too_many_fields_ends_the_connection() -> None:
    assert Decoder().decode(b"\x82" * MAX_FIELDS).too_large
    with pytest.raises(Http2Error, match="more than 4096 fields") as caught:
        Decoder().decode(b"\x82" * (MAX_FIELDS + 1))
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM
    assert caught.value.ends_connection


_BOMBS = {
    "one large field, often": [b"\x40\x01a\x7f\x80\x1f" + b"x" * 4095, b"\xbe" * MAX_FIELDS],
    "large fields, evicted": [(b"\x40\x01a\x7f\x80\x1e" + b"x" * 3967) * 30],
    "empty fields": [b"\x40\x00\x00" * MAX_FIELDS],
    "small blocks": [b"\x82" * size for size in range(1, 1000)],
    "small literals": [b"\x00\x01a\x04%04d" % number * 8 for number in range(1000)],
    "tiny literals": [b"\x00\x00\x01%c" % number * 16 for number in range(256)],
    "Huffman": [b"\x00\x01a\xff\x81\x87\x07" + b"\x00" * 115_200],
    "length of 268 MB": [b"\x00\x7f\xff\xff\xff\x7f" + b"x" * 100],
}


@pytest.mark.parametrize("name", _BOMBS)
def test_bombs_take_no_memory(name: str) -> None:
    decoder = Decoder()
    with suppress(Http2Error):
        decoder.decode(_BOMBS[name][0])
    decoder = Decoder()
    tracemalloc.start()
    try:
        for block in _BOMBS[name]:
            size = 0
            with suppress(Http2Error):
                size = sum(32 + len(n) + len(v) for n, v in decoder.decode(block).fields)
            assert size <= MAX_HEADER_LIST
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The Huffman-coded string has 184,320 bytes, and its parts are joined.
    assert peak < (3_000_000 if name == "Huffman" else 400_000)
    assert kept < 200_000


# ---------------------------------------------------------------------------------- tables


@LAW
@given(
    st.lists(
        st.one_of(st.integers(0, 300), st.tuples(st.binary(max_size=20), st.binary(max_size=100))),
        max_size=40,
    )
)
def test_table_evicts_as_that_of_hpack(steps: list[int | Header]) -> None:
    table = DynamicTable(200)
    oracle = HeaderTable()
    oracle.maxsize = 200
    content: list[Header] = []
    for step in steps:
        before = content
        if isinstance(step, int):
            evicted = table.resize(step)
            oracle.maxsize = step
        else:
            evicted = table.add(step)
            oracle.add(*step)
        content = [(name, value) for name, value in oracle.dynamic_entries]
        assert [table.get(STATIC_SIZE + 1 + place) for place in range(len(table))] == content
        assert before == before[: len(before) - len(evicted)] + evicted[::-1]
        assert table.size == sum(map(field_size, content)) <= table.max_size


def test_static_table_is_that_of_the_rfc() -> None:
    assert STATIC_TABLE[1:] == tuple(HeaderTable.STATIC_TABLE)
    assert STATIC_SIZE == 61
    assert STATIC_FIELDS[b":method", b"POST"] == 3
    assert (STATIC_NAMES[b":method"], STATIC_NAMES[b"www-authenticate"]) == (2, 61)


# ------------------------------------------------------------------------------ Huffman code


_ORACLE = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


def test_each_symbol_has_the_code_of_the_rfc() -> None:
    assert huffman_encode(b"") == huffman_decode(b"") == b""
    for symbol in range(256):
        for text in (bytes([symbol]), bytes([symbol]) * 30, b"a%c0" % symbol):
            encoded = huffman_encode(text)
            assert encoded == _ORACLE.encode(text)
            assert huffman_decode(encoded) == text


def _decode_text(encoded: bytes) -> bytes | None:
    try:
        return huffman_decode(encoded)
    except Http2Error as error:
        caught = error
    assert caught.code is ErrorCode.COMPRESSION_ERROR
    assert caught.ends_connection
    return None


def _oracle_text(encoded: bytes) -> bytes | None:
    try:
        return bytes(decode_huffman(encoded))
    except Exception:
        return None


@LAW
@given(st.binary(max_size=120))
def test_any_string_is_decoded_as_by_hpack(encoded: bytes) -> None:
    assert _decode_text(encoded) == _oracle_text(encoded)


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
