"""The C module converts strings as Python does, or leaves them to it."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from functools import partial
from itertools import product

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec import native
from gateway.codec.elements.base64_elements import Base64Decoder, Base64ElementDecoder
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.encode import make_tensor_encoder
from gateway.codec.json.array_scanner import ElementRun, find_string_cut
from gateway.codec.native import plain
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v1.nested_writer import NestedBytesEncoder
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec.reference import pack_bytes
from tests.codec.without_c import without_c
from tests.http1.splits import PLACES, cut

if not NATIVE:
    pytest.skip("the C module is not compiled", allow_module_level=True)

BYTES = DATATYPES["BYTES"]


def assert_same(convert: Callable[[], object]) -> None:
    """Check that a conversion gives the same result, or the same error, with and without C."""

    def outcome() -> object:
        try:
            return convert()
        except (GatewayError, ValueError) as error:
            return f"{type(error)}: {error}"

    with without_c():
        expected = outcome()
    assert outcome() == expected


def decode_strings(text: bytes, before: int = 0, after: int = 0) -> tuple[int, bytes] | None:
    return native.decode_strings(text, before, after)


def encode_strings(data: bytes, form: int = 0, *where: object) -> tuple[int, int, bytes] | None:
    return native.encode_strings(data, form, *where)  # type: ignore[arg-type]


def decode_in_python(text: bytes, before: int, after: int) -> tuple[int, bytes] | None:
    run = ElementRun(text, before, after, first=False)
    with without_c():
        return TensorDecoder("input 'x'", BYTES).try_decode(run)


# ------------------------------------------------------------------------------------ decoding

DECODED = [
    (rb'"\"\\\/\b\f\n\r\t"', '"\\/\b\f\n\r\t'),
    (rb'"\u0000\u001f\u0041\u00e9\u20AC\uffff"', "\0\x1fA\xe9\u20ac\uffff"),
    (rb'"\ud83d\uDE00 \uD800\udc00 \udbff\udfff"', "\U0001f600 \U00010000 \U0010ffff"),
    (rb'"\ud7ff\ue000"', "\ud7ff\ue000"),
    (rb'"\\u0041\\\""', '\\u0041\\"'),
    (b'"\x7f"', "\x7f"),
    *((f'"{text}"'.encode(), text) for text in ("é", "\x80", "\u07ff", "\u0800", "\ud7ff")),
    *((f'"{text}"'.encode(), text) for text in ("\ue000", "\uffff", "\U00010000", "\U0010ffff")),
    (b'""', ""),
]


@pytest.mark.parametrize(("text", "string"), DECODED)
def test_c_decodes_each_kind_of_character(text: bytes, string: str) -> None:
    for padding in ("", "x", "1234567", "12345678", "[,]é{}" * 9):
        padded = text[:-1] + padding.encode() + text[-1:]
        expected = 1, pack_bytes([(string + padding).encode()])
        assert decode_strings(padded, 1, 1) == expected
        assert decode_strings(b"[" + padded + b"]") == expected
        assert decode_in_python(padded, 1, 1) == expected


INVALID = [
    *(rb"\a", rb"\x41", rb"\'", rb"\U0041", rb"\u", rb"\u004", rb"\u004g", rb"\u 041", rb"\u+041"),
    *(rb"\ud800", rb"\udc00", rb"\ud800\ud800", rb"\ud800\u0041", rb"\ud800x", rb"\udc00\ud800"),
    *(rb"\ud800\n", rb"\ud800\udc0", rb"\ud800\\udc00"),
    *(bytes([code]) for code in range(0x20)),
    *(b"\x80", b"\xbf", b"\xc2", b"\xc2A", b"\xe2\x82", b"\xe2\x82A", b"\xf0\x9f\x98"),
    *(b"\xe2", b"\xf0", b"\xf0\x9f\x98A", b"\xf0\x9fA\x80", b"\xff", b"\xfe", b"\xf8\x88\x80\x80"),
    *(b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80"),
    *(b"\xf0\x8f\xbf\xbf", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80"),
    *(b"\xf5\x80\x80\x80", b"\xc3\xc3", b"\xe2\xc3\xa9"),
]


@pytest.mark.parametrize("invalid", INVALID)
def test_c_leaves_invalid_characters_to_python(invalid: bytes) -> None:
    for before in (b"", b"x", b"1234567", b"12345678", "é".encode()):
        for behind in (b"", b"x", b"ghijklmno"):
            text = b'"' + before + invalid + behind + b'"'
            assert decode_strings(text, 1, 1) is None
            assert decode_in_python(text, 1, 1) is None
            assert native.decode_text(text[1:-1]) is None


@pytest.mark.parametrize(
    ("text", "before", "after", "strings"),
    [
        (b"[]", 0, 0, []),
        (b"[[],[ ]]", 0, 0, []),
        (b' [ "a" ,\t"b"\r,\n[ [ "c" ] ] ] ', 0, 0, ["a", "b", "c"]),
        (b'"a","b"', 1, 1, ["a", "b"]),
        (b'[["a"],["b"', 0, 2, ["a", "b"]),
        (b' "a" ],[ "b" ', 2, 2, ["a", "b"]),
        (b'"a"]]', 2, 0, ["a"]),
        (b'["a",[]', 0, 1, ["a"]),
        (b'"[",  "]"', 7, 7, ["[", "]"]),
        (b"[" * 64 + b'"a"' + b"]" * 64, 0, 0, ["a"]),
        *((text, 0, 0, None) for text in (b"", b" ", b"]", b"[", b'"a"', b'["a"', b'["a]', b'["')),
        *((text, 0, 0, None) for text in (b'["a",]', b'[,"a"]', b'["a"]]', b'["a" "b"]', b"[1]")),
        *((text, 0, 0, None) for text in (b'["a",,"b"]', b"[null]", b'[{"b64":""}]', b'["a"]\0')),
        *(
            (text, 0, 0, None)
            for text in (b'["a\\"]', b'["\\', b'["\\u00', b'["a"] "b"', b'["a"][]')
        ),
        *((text, 1, 1, None) for text in (b"", b',"a"', b'"a",', b"]", b"[", b'"a"]', b" ")),
        (b'"a"', 65, 65, None),
        (b'"a"', -1, -1, None),
        (b"[" * 65 + b"]" * 65, 0, 0, None),
    ],
)
def test_c_decodes_arrays_and_parts_of_them(
    text: bytes, before: int, after: int, strings: list[str] | None
) -> None:
    expected = (
        None if strings is None else (len(strings), pack_bytes([s.encode() for s in strings]))
    )
    assert decode_strings(text, before, after) == expected
    if expected is not None:
        assert decode_in_python(text, before, after) == expected


STRINGS = st.one_of(
    st.text(max_size=12),
    st.text(st.sampled_from('abc"\\/\b\n\x1f\x7fé漢😀'), max_size=40),
    st.text(st.sampled_from("abcdefghijklmnop [],"), max_size=40),
)
ARRAYS = st.recursive(
    st.lists(STRINGS, max_size=6), lambda inner: st.lists(st.one_of(STRINGS, inner), max_size=6)
)
WRITERS = st.sampled_from(
    [
        lambda array: json.dumps(array).encode(),
        lambda array: json.dumps(array, ensure_ascii=False, indent=1).encode(),
        lambda array: json.dumps(array).replace("/", r"\/").encode(),
        orjson.dumps,
    ]
)
Writer = Callable[[object], bytes]


def broken(text: bytes, data: st.DataObject) -> bytes:
    """Replace a byte of a text by up to four others."""
    at = data.draw(st.integers(0, len(text)), label="at")
    parts = st.sampled_from(
        [b'"', b"\\", b"[", b"]", b",", b"{", b"\\u", b"\\ud83d", b"\xc3", b"\xed\xa0\x80", b"\0"]
    )
    piece = data.draw(st.one_of(parts, st.binary(max_size=4)), label="piece")
    return text[:at] + piece + text[at + 1 :]


def flat(array: list[object]) -> list[str]:
    return [each for item in array for each in ([item] if isinstance(item, str) else flat(item))]  # type: ignore[arg-type]


@given(ARRAYS, WRITERS, st.data())
def test_c_decodes_all_that_clients_send_and_broken_text_as_python_does_or_not_at_all(
    array: list[object], write: Writer, data: st.DataObject
) -> None:
    strings = [each.encode() for each in flat(array)]
    assert decode_strings(write(array)) == (len(strings), pack_bytes(strings))
    text = broken(write(array), data)
    before, after = data.draw(st.sampled_from([(0, 0), (1, 1), (0, 1), (2, 1)]), label="open")
    decoded = decode_strings(text, before, after)
    assert decoded is None or decoded == decode_in_python(text, before, after)


@given(STRINGS, st.data())
def test_c_decodes_pieces_of_long_strings_as_python_does(string: str, data: st.DataObject) -> None:
    text = json.dumps(string, ensure_ascii=data.draw(st.booleans())).encode()[1:-1]
    if data.draw(st.booleans(), label="broken"):
        text = broken(text, data)
    for full, last in product((False, True), repeat=2):
        assert_same(partial(find_string_cut, b"abc" + text, full, last))
    decoded = native.decode_text(text)
    try:
        expected = orjson.loads(b'"' + text + b'"').encode()
    except orjson.JSONDecodeError:
        expected = None
    assert decoded == expected


ESCAPES = ["\\u0041", "\\ud83d\\ude00", '\\"', "\\\\"]
WORDS = ['""', '"a"', '["', '"],', "漢", *ESCAPES, *'"\\[]{},: a1']
SOUP = st.lists(st.sampled_from(WORDS), max_size=40).map(lambda parts: "".join(parts).encode())


@given(SOUP, st.integers(0, 3))
def test_c_scans_any_text_as_numpy_does(text: bytes, depth: int) -> None:
    assert_same(lambda: native.scan_strings(text, depth))
    assert_same(lambda: native.scan_array_values(text))
    assert_same(lambda: native.collect_marks(text))
    for full in (False, True):
        assert_same(partial(find_string_cut, b"abc" + text, full, last=False))


# ------------------------------------------------------------------------------------ encoding

ELEMENTS = st.one_of(STRINGS.map(str.encode), st.binary(max_size=20))
SHAPES = st.sampled_from(
    [(6,), (1, 6), (6, 1), (2, 3), (3, 1, 2), (1, 1, 6, 1), (), (2, 2), (2**70, 1), (4,), (2, 1)]
)


def test_c_writes_each_character_as_orjson_does() -> None:
    for string in map(
        chr, [*range(0x100), 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    ):
        for padding in ("", "x", "é", "1234567", "12345678"):
            data = pack_bytes([(padding + string + padding).encode(), b""])
            text = orjson.dumps([padding + string + padding, ""])[1:-1]
            assert encode_strings(data) == (2, len(data), text)


def test_c_leaves_elements_that_are_not_utf8_to_python() -> None:
    for each in (each for each in INVALID if each[0] >= 0x80):
        for element in (each, b"1234567" + each, each + b"123456789", "é".encode() + each):
            assert encode_strings(pack_bytes([b"a", element])) is None
            assert encode_strings(pack_bytes([element]), native.BASE64) is not None


@given(st.lists(ELEMENTS, max_size=8), st.integers(0, 9), st.integers(0, 2))
def test_c_stops_before_an_incomplete_element(
    elements: list[bytes], missing: int, form: int
) -> None:
    data = pack_bytes(elements)
    complete = encode_strings(data, form)
    if complete is None:
        return
    last = struct.pack("<I", 10) + b"x" * (9 - missing)
    assert encode_strings(data + last, form) == complete
    assert encode_strings(data + last[:3], form) == complete


@pytest.mark.parametrize("element", [b"\x1f" * 999, b"\x1f" * 99 + b"x" * 999, b"", b"x"])
def test_c_finds_the_room_that_a_text_needs(element: bytes) -> None:
    data = pack_bytes([element] * 99)
    expected = orjson.dumps([element.decode()] * 99)[1:-1]
    assert encode_strings(data) == (99, len(data), expected)
    encoded = encode_strings(data, native.BASE64_OBJECT, 0, struct.pack("<32Q", *[1] * 31, 99))
    assert encoded is not None
    brackets = encoded[2].startswith(b"[" * 32) and encoded[2].count(b"]" * 31 + b",") == 98
    assert brackets


@pytest.mark.parametrize(
    ("form", "row_sizes"), [(3, b""), (-1, b""), (0, bytes(8)), (0, b"1234567")]
)
def test_c_refuses_unknown_forms_and_rows(form: int, row_sizes: bytes) -> None:
    with pytest.raises(ValueError, match="there is no such form, or there are no such rows"):
        encode_strings(pack_bytes([b"a"]), form, 0, row_sizes)


@given(st.lists(ELEMENTS, max_size=8), PLACES, SHAPES, st.booleans(), st.booleans())
def test_elements_are_encoded_as_in_python(
    elements: list[bytes],
    places: list[int],
    shape: tuple[int, ...],
    as_base64: bool,
    complete: bool,
) -> None:
    pieces = cut(pack_bytes(elements)[: None if complete else -1], places)
    encoding = BytesEncoding.BASE64 if as_base64 else BytesEncoding.UTF8

    def encode() -> tuple[bytes, int]:
        encoder = make_tensor_encoder("'x'", BYTES, JsonPolicies(bytes_encoding=encoding))
        text = b"".join(map(encoder.feed, pieces))
        encoder.finish()
        return text, encoder.count

    def encode_nested() -> bytes:
        encoder = NestedBytesEncoder("'x'", shape, as_base64)
        return b"".join([*map(encoder.feed, pieces), encoder.end()])

    assert_same(encode)
    assert_same(encode_nested)


# -------------------------------------------------------------------------------------- base64

BASE64_TEXTS = st.one_of(
    st.binary(max_size=20).map(base64.b64encode),
    st.binary(max_size=9).map(base64.b64encode).map(lambda text: text.rstrip(b"=")),
    st.text("AQgw=+/ -_", max_size=9).map(str.encode),
)


@given(st.lists(BASE64_TEXTS, max_size=6), PLACES)
def test_base64_elements_are_decoded_as_in_python(texts: list[bytes], places: list[int]) -> None:
    pieces = cut(pack_bytes(texts), places)

    def decode() -> tuple[bytes, int]:
        tensor = TensorDecoder("input 'x'", BYTES)
        tensor.chunks = list(pieces)
        tensor.size = sum(map(len, pieces))
        decoder = Base64ElementDecoder("input 'x'", tensor)
        while decoder.decode_chunk():
            pass
        return b"".join(tensor.chunks), tensor.size

    assert_same(decode)


@given(BASE64_TEXTS, PLACES)
def test_base64_in_pieces_is_decoded_as_in_python(text: bytes, places: list[int]) -> None:
    pieces = cut(text, places)

    def decode() -> bytes:
        decoder = Base64Decoder()
        decoded = [decoder.feed(piece, last=False) for piece in pieces]
        return b"".join([*decoded, decoder.feed(b"", last=True)])

    assert_same(decode)


@given(st.binary(max_size=200))
def test_c_decodes_what_it_encodes_as_base64(data: bytes) -> None:
    elements = pack_bytes([data])
    text = base64.b64encode(data)
    assert encode_strings(elements, native.BASE64) == (1, len(elements), b'"' + text + b'"')
    assert native.encode_base64(data) == text
    assert native.decode_base64(text, True) == data
    assert native.decode_base64(text.rstrip(b"="), False) == data
    assert native.decode_base64(text.rstrip(b"="), True) == (None if b"=" in text else data)


OBJECTS = st.one_of(
    BASE64_TEXTS.map(lambda text: b'{"b64":"%b"}' % text),
    BASE64_TEXTS.map(lambda text: b'{ "b64" :\n"%b" }' % text),
    STRINGS.map(orjson.dumps),
    st.sampled_from([b"[]", b"{}", b"[[],[]]", b'["a",{"b64":"QQ=="}]', b'{"b64":1}', b"1"]),
    st.sampled_from([rb'{"b64":"\/\/\/\/"}', b'{"b64":"QQ==","b64":"QQ=="}', b'{"a":"QQ=="}']),
)


@given(st.lists(OBJECTS, min_size=1, max_size=6), st.sampled_from([b",", b" , ", b"],["]))
def test_base64_objects_are_decoded_as_in_python(items: list[bytes], comma: bytes) -> None:
    text = comma.join(items)
    text = b"[%b]" % text if comma == b"],[" else text

    found = native.decode_elements(text, 1, 1)
    assert found == plain.decode_elements(text, 1, 1) or (found is None and b"\\" in text)
