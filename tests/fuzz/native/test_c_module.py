"""The tests of the C module pass where each access out of bounds ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.native import sanitized

TESTS = "tests/codec/native"
READER, WRITER, STRINGS = (
    f"{TESTS}/{name}.py" for name in ("test_decode_numbers", "test_encode_numbers", "test_strings")
)
USES_SSE2 = "#ifdef __SSE2__\n#include"
CHECKS_AVX2 = '__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")'


@pytest.mark.parametrize(
    ("tests", "right", "wrong"),
    [
        (TESTS, "", ""),
        (READER, USES_SSE2, f"#undef __SSE2__\n{USES_SSE2}"),
        (WRITER, CHECKS_AVX2, "0"),
    ],
    ids=["all", "reader without SIMD", "writer without AVX2"],
)
def test_c_module_stays_within_bounds(
    tests: str, right: str, wrong: str, tmp_path: Path, objects: Path
) -> None:
    done = sanitized.run_tests(sanitized.build(tmp_path, objects, right, wrong), tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    ("tests", "right", "wrong", "expected"),
    [
        (
            READER,
            "return at - begin > LOOK_BACK && end - at >= LOOK_AHEAD;",
            "return at - begin > LOOK_BACK;",
            "READ of size",
        ),
        (READER, "up &= mantissa >> 1;", "up = 1;", "of_any_length_once"),
        (WRITER, "[FP64] = 26", "[FP64] = 16", "ERROR: AddressSanitizer"),
        (
            STRINGS,
            "if (bounds->limit - *to < end - at + MAX_ESCAPE) {",
            "if (bounds->limit - *to < 0) {",
            "AddressSanitizer: heap-buffer-overflow",
        ),
        (STRINGS, "return word & 0x1E ? 2 : 0;", "return 2;", "invalid_characters"),
    ],
    ids=["read beyond", "tie rounded up", "number beyond", "escapes beyond", "overlong form"],
)
def test_planted_defect_is_found(
    tests: str, right: str, wrong: str, expected: str, tmp_path: Path, objects: Path
) -> None:
    done = sanitized.run_tests(sanitized.build(tmp_path, objects, right, wrong), tests)
    assert done.returncode != 0
    assert expected in done.stdout + done.stderr
