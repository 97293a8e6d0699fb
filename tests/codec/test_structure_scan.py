from __future__ import annotations

import pytest

from gateway.codec.structure_scan import scan_values


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
