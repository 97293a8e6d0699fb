"""Fuzzing the C module: no access out of bounds, nothing converted wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.native import sanitized
from tests.support.scale import all_defects, fuzz_seconds

READER, WRITER, STRINGS = (
    Path(__file__).with_name(name)
    for name in ("number_reader.py", "number_writer.py", "string_codec.py")
)
USES_SSE2 = "#ifdef __SSE2__\n#include"
CHECKS_AVX2 = '__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")'


@pytest.mark.parametrize(
    ("program", "right", "wrong", "least_share"),
    [
        (READER, "", "", 0.1),
        (READER, USES_SSE2, f"#undef __SSE2__\n{USES_SSE2}", 0.1),
        (WRITER, "", "", 0.02),
        (WRITER, CHECKS_AVX2, "0", 0.02),
        (STRINGS, "", "", 0.1),
    ],
    ids=["reader", "reader without SIMD", "writer", "writer without AVX2", "strings"],
)
def test_generated_input_is_converted_right_and_within_bounds(
    program: Path, right: str, wrong: str, least_share: float, tmp_path: Path, objects: Path
) -> None:
    module = sanitized.build(tmp_path, objects, right, wrong)
    sanitized.check_generated(program, module, fuzz_seconds(5), least_share)


DEFECTS = {
    READER: {
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
        "write beyond the end": ("return size / 2 + 1;", "return size / 3 + 1;", "WRITE of size"),
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
    },
    WRITER: {
        "text written beyond the end": ("[FP64] = 26", "[FP64] = 16", "ERROR: AddressSanitizer"),
        "text of a tie rounded up": (
            "last += fraction > half - (last & 1);",
            "last += fraction >= half;",
            "was written as",
        ),
    },
    STRINGS: {
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
        "overlong form taken": ("return word & 0x1E ? 2 : 0;", "return 2;", "gave"),
    },
}
USUALLY = {
    *("read beyond the end", "tie rounded up", "text written beyond the end"),
    *("text of a tie rounded up", "word read beyond the end", "overlong form taken"),
}
PLANTED = [
    (program, defect)
    for program, defects in DEFECTS.items()
    for defect in defects
    if all_defects() or defect in USUALLY
]


@pytest.mark.parametrize(("program", "defect"), PLANTED, ids=lambda of: getattr(of, "stem", of))
def test_a_planted_defect_is_found(
    program: Path, defect: str, tmp_path: Path, objects: Path
) -> None:
    sanitized.check_defect_is_found(program, tmp_path, objects, *DEFECTS[program][defect])
