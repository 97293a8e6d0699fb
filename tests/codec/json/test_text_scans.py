"""Nesting of JSON that passes through: a plain count agrees, wherever the text is split."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.body_checks import HeaderLengthCheck, NestingCheck, nests_deeper
from gateway.codec.json.text_search import has_data_key
from gateway.errors import ErrorKind, GatewayError
from tests.codec import strategies

CAP = 3

TOO_DEEP = [
    b"[[[[",
    b'{"a":{"b":{"c":{}}}}',
    b'[[[1]],[[["a"]]]]',
    b'["\\\\",[[[',
    b'["\\\\\\"]]]",[[[',
    b"\xef\xbb\xbf[[[[",  # RapidJSON takes a byte order mark, and parts of it
    b"[\\ [[[",
]
ALLOWED = [
    b"",
    b"[[[]]]",
    b"[],[]," * 99,
    b'{"a":"[[[[[[[[{{{{"}',
    b'["\\\\\\"[[[[[["]',
    b'"[[[["',
    b"x[[[[",  # a parser stops before the brackets
]


def _told(parts: list[bytes], cap: int = CAP) -> str:
    """Return the error of a body that comes in parts, if there is one."""
    walk = NestingCheck(cap)
    try:
        for part in parts:
            walk.feed(part)
    except GatewayError as error:
        return error.message if error.kind is ErrorKind.BAD_REQUEST else "not the client's fault"
    return ""


@pytest.mark.parametrize("text", TOO_DEEP)
def test_too_deep_nesting_is_refused(text: bytes) -> None:
    message = f"the request's JSON is nested deeper than {CAP}"
    assert _told([text]) == _told(strategies.bytewise(text)) == message
    assert nests_deeper(text, CAP)
    assert not _told([text], 4)
    assert not nests_deeper(text, 4)


@pytest.mark.parametrize("text", ALLOWED)
def test_shallow_nesting_passes(text: bytes) -> None:
    assert _told([text]) == _told(strategies.bytewise(text)) == ""
    assert not nests_deeper(text, CAP)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 40_000, b"[" + b"[]," * 70_000])
def test_nesting_in_large_bodies(text: bytes) -> None:
    # Longer than a window: long flat text is not deep.
    is_deep = b"]" not in text
    assert bool(_told([text], 64)) is nests_deeper(text, 64) is is_deep


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


_TEXT = st.text(st.sampled_from('"\\[]{},: aé\n'), max_size=6)
_NESTED = st.recursive(
    _TEXT | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=20,
)


@strategies.LAW
@given(st.lists(_NESTED, max_size=3), strategies.SEEDS, st.booleans())
def test_depth_equals_what_a_parser_counts(value: Any, seed: int, plain: bool) -> None:
    text = json.dumps(value, ensure_ascii=plain).encode()
    parts = strategies.cut(text, seed)
    depth = _depth(value)
    assert not _told(parts, depth)
    assert not nests_deeper(text, depth)
    assert _told(parts, depth - 1)
    assert nests_deeper(text, depth - 1)


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
    st.dictionaries(_TEXT, _NESTED, max_size=4),
    st.booleans(),
    st.sampled_from([b"", b"\r\n ", b"\0\0\x80?", b" x", b'"', b"{}", b'"binary_data_size"']),
    strategies.SEEDS,
)
def test_check_finds_binary_tensors_behind_the_json_however_split(
    fields: dict[str, object], sized: bool, behind: bytes, seed: int
) -> None:
    document = json.dumps(fields | SIZED if sized else fields).encode()
    body = b" \n" + document + behind
    wrong = sized and bool(behind.strip())
    assert refused(strategies.cut(body, seed)) == refused(strategies.bytewise(body)) == wrong


@pytest.mark.parametrize("size", [0, 65_500, 70_000, 200_000])
def test_check_names_the_size_of_the_json(size: int) -> None:
    document = json.dumps({"x": ']}\\"' * (size // 4), **SIZED}).encode()
    with pytest.raises(GatewayError, match=f"behind its JSON of {len(document)} bytes"):
        HeaderLengthCheck().feed(document + b"\0\0\0\0")
    HeaderLengthCheck().feed(document + b" " * 100_000)


@pytest.mark.parametrize("body", [b"", b" ", b"<html>", b'[{"binary_data_size":4}] x', b'"x" {} x'])
def test_check_ignores_bodies_that_are_not_inference_responses(body: bytes) -> None:
    assert not refused([body])


def test_check_ignores_json_without_binary_data_size() -> None:
    assert not refused([b'{"outputs":[]} {"outputs":[]}'])


@given(st.sampled_from(("data", "x")), st.sampled_from(("data", "x")))
def test_key_of_data_is_told_from_strings(key: str, value: str) -> None:
    for text in (orjson.dumps({key: value}), b'{"%b" \n: "%b"}' % (key.encode(), value.encode())):
        assert has_data_key(text) == (key == "data")
