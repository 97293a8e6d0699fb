"""Nesting of JSON that passes through: a plain count agrees, wherever the text is split."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.nesting import NestingCheck, nests_deeper
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


def test_too_deep_nesting_is_refused_before_the_end() -> None:
    walk = NestingCheck(CAP)
    walk.feed(memoryview(b'{"a":[['))
    with pytest.raises(GatewayError):
        walk.feed(memoryview(b"[1,"))


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
@given(st.lists(_NESTED, max_size=3), st.data(), st.booleans())
def test_depth_equals_what_a_parser_counts(value: Any, data: st.DataObject, plain: bool) -> None:
    text = json.dumps(value, ensure_ascii=plain).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    depth = _depth(value)
    assert not _told(parts, depth)
    assert not nests_deeper(text, depth)
    assert _told(parts, depth - 1)
    assert nests_deeper(text, depth - 1)
