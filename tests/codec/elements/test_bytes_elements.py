from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements import bytes_elements
from gateway.codec.elements.bytes_elements import PartialElement, pack_strings
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


def test_packed_strings_equal_what_struct_packs() -> None:
    strings = ["", 'a"\\\0é漢😀', "x" * 300, "é" * 70_000] * 3
    assert pack_strings(strings) == pack_bytes([each.encode() for each in strings])
