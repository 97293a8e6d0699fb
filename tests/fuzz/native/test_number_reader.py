"""Fuzzing the C module: no access out of bounds, no wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.native import sanitized
from tests.support.scale import all_defects, fuzz_seconds

PROGRAM = Path(__file__).with_name("number_reader.py")


USES_SSE2 = "#ifdef __SSE2__\n#include"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("", ""), (USES_SSE2, f"#undef __SSE2__\n{USES_SSE2}")],
    ids=["as built", "without SIMD"],
)
def test_generated_texts_are_read_right_and_within_bounds(
    right: str, wrong: str, tmp_path: Path, objects: Path
) -> None:
    module = sanitized.build(tmp_path, objects, right, wrong)
    sanitized.check_generated(PROGRAM, module, fuzz_seconds(5), 0.1)


DEFECTS = {
    "read beyond the end": (
        "return at - begin > LOOK_BACK && end - at >= LOOK_AHEAD;",
        "return at - begin > LOOK_BACK;",
        "READ of size",
    ),
    "read before the start": (
        "return at - begin > LOOK_BACK && end - at >= LOOK_AHEAD;",
        "return begin != NULL && end - at >= LOOK_AHEAD;",
        "READ of size",
    ),
    "write beyond the end": (
        "return size / 2 + 1;",
        "return size / 3 + 1;",
        "WRITE of size",
    ),
    "exponent that overflows": (
        "if (value < MOST_EXPONENT)",
        "if (value >= 0)",
        "runtime error: signed integer overflow",
    ),
    "tie rounded up": ("up &= mantissa >> 1;", "up = 1;", "was read as"),
    "rounded twice": ("return rest - (middle - 4) > 8 && ", "return ", "was read as"),
    "digits cut off": ("next == *bits)", "next >= *bits)", "was read as"),
    "digits not looked at": ("*has_more |= *at != '0';", "", "was read as"),
    "too few words": ("2666 / 64 + 1,", "2666 / 64 - 1,", "stack-buffer-overflow"),
    "null without being asked": (
        "else if (null_is_nan && starts_with(",
        "else if (starts_with(",
        "null does not fit",
    ),
    "range of one more": (
        "if (value > limit)",
        "if (value > limit && value != limit + 1)",
        "does not fit",
    ),
    "comma before the end": (
        "if (next == end || *next <= ' ' || *next == '[')",
        "if (next < end && *next == ']')\n"
        "        *at = next;\n"
        "    if (next == end || *next <= ' ' || *next == '[' || *next == ']')",
        "is no JSON",
    ),
}


PLANTED = DEFECTS if all_defects() else ("read beyond the end", "tie rounded up")


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found(defect: str, tmp_path: Path, objects: Path) -> None:
    sanitized.check_defect_is_found(PROGRAM, tmp_path, objects, *DEFECTS[defect])
