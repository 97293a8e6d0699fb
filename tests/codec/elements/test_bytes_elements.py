from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements import bytes_elements
from gateway.codec.elements.bytes_elements import PartialElement, find_short_lengths, pack_strings
from tests.codec import strategies
from tests.codec.reference import pack_bytes


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


@strategies.LAW
@given(
    elements=st.lists(st.binary(max_size=300) | st.just(b""), max_size=40),
    behind=st.binary(max_size=5),
)
def test_short_lengths_are_found_among_the_elements(elements: list[bytes], behind: bytes) -> None:
    data = pack_bytes(elements)
    expected, position = [], 0
    while position + 4 <= len(data + behind):
        (length,) = struct.unpack_from("<I", data + behind, position)
        if position + 4 + length > len(data + behind):
            break
        expected.append(length)
        position += 4 + length
    found = find_short_lengths(data + behind)
    if found is not None:
        assert (found[0].tolist(), found[1]) == (expected, position)
    is_plain = all(len(each) < 256 and 0 not in each for each in elements)
    assert found is not None or not (elements and is_plain) or behind


@strategies.LAW
@given(
    strings=st.lists(st.text(st.sampled_from('a"\\\0é漢😀'), max_size=9), min_size=1),
    times=st.sampled_from([0, 1, 300]),
    long=st.sampled_from(["", "x" * 300, "é" * 70_000]),
)
def test_packed_strings_equal_what_struct_packs(strings: list[str], times: int, long: str) -> None:
    strings = [*strings * times, long]
    assert pack_strings(strings) == pack_bytes([each.encode() for each in strings])
