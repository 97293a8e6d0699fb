"""Fuzzing the C encoder of numbers: no access out of bounds, no wrong text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.native import sanitized
from tests.support.scale import fuzz_seconds

PROGRAM = Path(__file__).with_name("number_writer.py")
CHECKS_AVX2 = '__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")'


@pytest.mark.parametrize(("right", "wrong"), [("", ""), (CHECKS_AVX2, "0")], ids=["avx2", "plain"])
def test_elements_are_written_right_and_within_bounds(
    right: str, wrong: str, tmp_path: Path, objects: Path
) -> None:
    module = sanitized.build(tmp_path, objects, right, wrong)
    sanitized.check_generated(PROGRAM, module, fuzz_seconds(5), 0.02)


DEFECTS = {
    "write beyond the end": ("[FP64] = 26", "[FP64] = 16", "ERROR: AddressSanitizer"),
    "tie rounded up": (
        "last += fraction > half - (last & 1);",
        "last += fraction >= half;",
        "was written as",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, tmp_path: Path, objects: Path) -> None:
    sanitized.check_defect_is_found(PROGRAM, tmp_path, objects, *DEFECTS[defect])
