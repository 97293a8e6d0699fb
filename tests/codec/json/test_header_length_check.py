from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.header_length_check import HeaderLengthCheck, check_header_length
from gateway.errors import ErrorKind, GatewayError
from tests.codec import strategies

TEXT = st.text(st.sampled_from('"\\{}[]:, ab\n'), max_size=12)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
SIZED = {"parameters": {"binary_data_size": 4}}


def refused(pieces: list[bytes]) -> bool:
    check = HeaderLengthCheck()
    try:
        for piece in pieces:
            check.feed(piece)
    except GatewayError as error:
        return error.kind is ErrorKind.BAD_RESPONSE
    return False


@given(
    st.dictionaries(TEXT, VALUES, max_size=4),
    st.booleans(),
    st.sampled_from([b"", b"\r\n ", b"\0\0\x80?", b" x", b'"', b"{}", b'"binary_data_size"']),
    st.data(),
)
def test_check_finds_binary_tensors_behind_the_json_however_split(
    fields: dict[str, object], sized: bool, behind: bytes, data: st.DataObject
) -> None:
    document = json.dumps(fields | SIZED if sized else fields).encode()
    body = b" \n" + document + behind
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=4)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    wrong = sized and bool(behind.strip())
    assert refused(pieces) == refused(strategies.bytewise(body)) == wrong


@pytest.mark.parametrize("size", [0, 65_500, 70_000, 200_000])
def test_check_names_the_size_of_the_json(size: int) -> None:
    document = json.dumps({"x": ']}\\"' * (size // 4), **SIZED}).encode()
    with pytest.raises(GatewayError, match=f"behind its JSON of {len(document)} bytes"):
        check_header_length(document + b"\0\0\0\0")
    check_header_length(document + b" " * 100_000)


@pytest.mark.parametrize("body", [b"", b" ", b"<html>", b'[{"binary_data_size":4}] x', b'"x" {} x'])
def test_check_ignores_bodies_that_are_not_inference_responses(body: bytes) -> None:
    check_header_length(body)
    assert not refused([body])


def test_check_ignores_json_without_binary_data_size() -> None:
    check_header_length(b'{"outputs":[]} {"outputs":[]}')
    assert not refused([b'{"outputs":[]} {"outputs":[]}'])
