from __future__ import annotations

import base64
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements import bytes_elements
from gateway.codec.elements.base64_elements import Base64Decoder, Base64ElementDecoder
from gateway.codec.elements.bytes_elements import PartialElement, pack_strings
from gateway.codec.elements.decode import TensorDecoder
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies
from tests.codec.reference import pack_bytes


def decoded(pieces: list[bytes]) -> bytes:
    """Decode a tensor buffered in such pieces."""
    tensor = TensorDecoder("", DATATYPES["BYTES"])
    tensor.chunks = list(pieces)
    tensor.size = sum(map(len, pieces))
    elements = Base64ElementDecoder("input 'x'", tensor)
    while elements.decode_chunk():
        pass
    data = b"".join(tensor.chunks)
    assert tensor.size == len(data)
    return data


def refusal(pieces: list[bytes]) -> str:
    with pytest.raises(GatewayError) as caught:
        decoded(pieces)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    return caught.value.message


Fault = Callable[[int], str]


def misplaced(mark: str, at: int) -> Fault:
    return lambda before: f"character {before + at} ({mark!r}) is not in the base64 alphabet"


def padded(at: int, length: int) -> Fault:
    return lambda before: f"its padding begins at character {before + at} of {before + length}"


def uneven(length: int) -> Fault:
    return lambda before: f"its length of {before + length} is not a multiple of 4"


def surplus(_: int) -> str:
    return "its last character has unused bits that are not zero"


# Texts, and their description with so many characters before them.
FAULTS: list[tuple[str, Fault]] = [
    ("YW-j", misplaced("-", 2)),
    ("YWé=", misplaced("é", 2)),
    ("\0", misplaced("\0", 0)),
    ("Y", uneven(1)),
    ("YWJjZ", uneven(5)),
    ("YQ==YQ==", padded(2, 8)),
    ("====", padded(0, 4)),
    ("YWJj====", padded(4, 8)),
    ("YR==", surplus),
]


@pytest.mark.parametrize(("text", "fault"), FAULTS)
def test_invalid_base64_is_described(text: str, fault: Fault) -> None:
    for before in (0, 4, 400):
        element = "YWJj" * (before // 4) + text
        texts = pack_bytes([b"YQ==", b"", element.encode(), b"-"])
        message = f"input 'x': element 2 is not base64, as its content_type says: {fault(before)}"
        assert refusal([texts]) == message
        # Split between characters, as the scanner does.
        half = len(texts) - len(text.encode()) - 5
        assert refusal([texts[:half], texts[half:]]) == message
        if text.isascii():
            assert refusal(strategies.bytewise(texts)) == message


def plainly(text: str) -> bytes | None:
    try:
        element = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return element if base64.b64encode(element).decode() == text else None


@strategies.LAW
@given(st.lists(st.text("Ybz+/=-A", max_size=9), max_size=4), strategies.SEEDS)
def test_any_text_is_decoded_or_refused_like_the_standard_library(
    texts: list[str], seed: int
) -> None:
    elements = list(map(plainly, texts))
    data = pack_bytes([text.encode() for text in texts])
    for pieces in ([data], strategies.bytewise(data), strategies.cut(data, seed)):
        if None in elements:
            start = f"input 'x': element {elements.index(None)} is not base64, as its"
            assert refusal(pieces).startswith(start)
        else:
            assert decoded(pieces) == pack_bytes([each for each in elements if each is not None])


def decode_string(pieces: list[bytes]) -> bytes:
    decoder = Base64Decoder()
    last = len(pieces) - 1
    return b"".join(decoder.feed(piece, last=i == last) for i, piece in enumerate(pieces))


@given(st.binary(max_size=30), st.booleans(), st.booleans(), strategies.SEEDS)
@strategies.LAW
def test_decoding_a_json_string_reverts_encoding(
    data: bytes, padded: bool, escaped: bool, seed: int
) -> None:
    text = base64.b64encode(data)
    if not padded:
        text = text.rstrip(b"=")
    if escaped:
        text = text.replace(b"/", b"\\/")
    for pieces in ([text], strategies.bytewise(text) or [b""], strategies.cut(text, seed)):
        assert decode_string(pieces) == data


@pytest.mark.parametrize(
    "text",
    [b"A", b"A===", b"YQ==YQ==", b"YQ=", b"=", b"Y Q=", b"YQ\\n==", b"Y\\", b"\\u0059Q==", b"_-8="],
)
def test_invalid_base64_in_a_json_string_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_string(strategies.bytewise(text))


@strategies.LAW
@given(pieces=st.lists(st.binary(max_size=9)))
def test_element_in_pieces_equals_what_struct_packs(pieces: list[bytes]) -> None:
    chunks = [b"before"]
    element = PartialElement(chunks)
    for piece in pieces:
        element.append(piece)
    element.end()
    assert b"".join(chunks) == b"before" + pack_bytes([b"".join(pieces)])


def test_element_larger_than_its_length_can_express_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bytes_elements, "MAX_ELEMENT_SIZE", 3)
    element = PartialElement([])
    element.append(b"abc")
    element.end()
    element.append(b"d")
    with pytest.raises(ValueError, match="4"):
        element.end()


def test_packed_strings_equal_what_struct_packs() -> None:
    strings = ["", 'a"\\\0é漢😀', "x" * 300, "é" * 70_000] * 3
    assert pack_strings(strings) == pack_bytes([each.encode() for each in strings])
