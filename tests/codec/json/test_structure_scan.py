from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.structure_scan import scan_strings
from tests.codec import strategies


@pytest.mark.parametrize(
    ("text", "depth", "position", "cut", "depth_at_cut", "ended"),
    [
        (b"", 0, 0, 0, 0, False),
        (b"[]", 0, 2, 0, 0, True),
        (b'["a"]', 0, 5, 0, 0, True),
        (b'["a"], "shape"', 0, 5, 0, 0, True),
        (b'"a"]}', 1, 4, 0, 1, True),
        (b'["a", "b"', 0, 9, 5, 1, False),
        (b'["a", "b', 0, 6, 5, 1, False),
        (b'["a", "b\\"', 0, 6, 5, 1, False),
        (b'["a", "b\\\\"', 0, 11, 5, 1, False),
        (b'[["a"], ["b"', 0, 12, 7, 1, False),
        (b'[["a", "b"', 0, 10, 6, 2, False),
        (b'["]", "[,"', 0, 10, 5, 1, False),
        (b'["a", 5, "b"]', 0, 6, 5, 1, False),
        (b'["a" x', 0, 5, 0, 0, False),
        (b'["a", \\"b"]', 0, 6, 5, 1, False),
        (b'["\\\\\\"]"]', 0, 9, 0, 0, True),
        (b"[" * 300 + b"]" * 300, 0, 600, 0, 0, True),
    ],
)
def test_how_far_whole_elements_reach(
    text: bytes, depth: int, position: int, cut: int, depth_at_cut: int, ended: bool
) -> None:
    walk = scan_strings(text, depth)
    assert (walk.position, walk.cut, walk.ended) == (position, cut, ended)
    assert walk.depth_at_cut == (depth_at_cut if cut else depth)


@pytest.mark.parametrize(
    ("text", "depth", "deepest"),
    [
        (b'["a"]', 0, 1),
        (b'[["a"], [[]]]', 0, 3),
        (b'"[[["]', 4, 4),
        (b'["a"] [[[[', 0, 1),
        (b'["a", 5, [[[["b"', 0, 1),
    ],
)
def test_how_deep_it_goes(text: bytes, depth: int, deepest: int) -> None:
    assert scan_strings(text, depth).deepest == deepest


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (b"[", None),
        (b'["a"', 1),
        (b'["a", "b"', 6),
        (b'["a", "b', 6),
        (b'["a", "b\\"c', 6),
        (b'["a", "', 6),
        (b'["a", ""', 6),
    ],
)
def test_where_the_last_string_begins(text: bytes, start: int | None) -> None:
    assert scan_strings(text, 0).last_string == start


@strategies.LAW
@given(st.lists(st.text(st.sampled_from('"\\[],a é\n')), min_size=1), st.integers(1, 9))
def test_strings_hide_what_is_in_them(strings: list[str], depth: int) -> None:
    text = json.dumps(strings).encode()
    walk = scan_strings(text, depth - 1)
    assert walk.position == len(text)
    assert walk.ended is (depth == 1)
    assert walk.deepest == depth
    assert text[: walk.cut].count(b'"') <= text.count(b'"') - 2
    assert json.loads(text[: walk.cut] + b'"x"]')[:-1] == strings[:-1] if walk.cut else True
