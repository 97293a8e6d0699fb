"""Fuzzing the strings of the C module: no access out of bounds, nothing converted wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.native import sanitized
from tests.support.scale import all_defects, fuzz_seconds

PROGRAM = Path(__file__).with_name("string_codec.py")


def test_generated_strings_are_converted_right_and_within_bounds(
    tmp_path: Path, objects: Path
) -> None:
    module = sanitized.build(tmp_path, objects)
    sanitized.check_generated(PROGRAM, module, fuzz_seconds(6), 0.1)


DEFECTS = {
    "word read beyond the end": (
        "if (at < end && bounds->readable - at >= 8) {",
        "if (at < end) {",
        "READ of size 8",
    ),
    "empty strings written beyond the end": (
        "return size + size / 3 + 4;",
        "return size;",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "escapes written beyond the end": (
        "if (bounds->limit - *to < end - at + MAX_ESCAPE) {",
        "if (bounds->limit - *to < 0) {",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "overlong form taken": (
        "return word & 0x1E ? 2 : 0;",
        "return 2;",
        "gave",
    ),
}


PLANTED = DEFECTS if all_defects() else ("word read beyond the end", "overlong form taken")


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found(defect: str, tmp_path: Path, objects: Path) -> None:
    sanitized.check_defect_is_found(PROGRAM, tmp_path, objects, *DEFECTS[defect])
