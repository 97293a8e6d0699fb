from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.structure_scan import scan_array_values, scan_strings, scan_values
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
def test_scan_finds_where_complete_elements_end(
    text: bytes, depth: int, position: int, cut: int, depth_at_cut: int, ended: bool
) -> None:
    walk = scan_strings(text, depth)
    assert (walk.position, walk.cut, walk.ended) == (position, cut, ended)
    assert walk.depth_at_cut == (depth_at_cut if cut else depth)


@pytest.mark.parametrize(
    ("text", "depth", "max_depth"),
    [
        (b'["a"]', 0, 1),
        (b'[["a"], [[]]]', 0, 3),
        (b'"[[["]', 4, 4),
        (b'["a"] [[[[', 0, 1),
        (b'["a", 5, [[[["b"', 0, 1),
    ],
)
def test_scan_tracks_the_depth(text: bytes, depth: int, max_depth: int) -> None:
    assert scan_strings(text, depth).max_depth == max_depth


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
def test_scan_finds_the_start_of_the_last_string(text: bytes, start: int | None) -> None:
    assert scan_strings(text, 0).last_string == start


@strategies.LAW
@given(st.lists(st.text(st.sampled_from('"\\[],a é\n')), min_size=1), st.integers(1, 9))
def test_brackets_and_commas_in_strings_are_ignored(strings: list[str], depth: int) -> None:
    text = json.dumps(strings).encode()
    walk = scan_strings(text, depth - 1)
    assert walk.position == len(text)
    assert walk.ended is (depth == 1)
    assert walk.max_depth == depth
    assert text[: walk.cut].count(b'"') <= text.count(b'"') - 2
    assert json.loads(text[: walk.cut] + b'"x"]')[:-1] == strings[:-1] if walk.cut else True


@pytest.mark.parametrize(
    ("text", "ends", "max_depth"),
    [
        (b"", [], 0),
        (b"1, 2", [], 0),
        (b"{}", [2], 1),
        (b"{},{} , [[]]", [2, 5, 12], 2),
        (b'{"a":"}"},{"\\"}', [9], 1),
        (b'{"a\\\\":"\\\\\\"}"}, {', [15], 1),
        (b'{"a":[{}]} ] {}', [10], 3),
        (b'{"a":"', [], 1),
        (b"]{}", [], 0),
        (b'"' + b"x" * 300 + b'"{"' + b"y" * 300 + b'"}', [606], 1),
    ],
)
def test_scan_values_finds_ends_and_depth(text: bytes, ends: list[int], max_depth: int) -> None:
    found, depth = scan_values(text)
    assert found.tolist() == ends
    assert depth == max_depth


@pytest.mark.parametrize(
    ("text", "end", "ends", "max_depth"),
    [
        (b"1,2,3", 3, False, 0),
        (b"[1,2],[[3],", 5, False, 1),
        (b'[[1],{"a":[2]}],3],4', 17, True, 2),
        (b'"[[,",{"]":1},', 13, False, 0),
        (b"1", 0, False, 0),
    ],
)
def test_scan_of_an_array_finds_its_end_or_last_comma(
    text: bytes, end: int, ends: bool, max_depth: int
) -> None:
    assert scan_array_values(text) == (end, ends, max_depth)
