"""Fuzzing the C module: no access out of bounds, no wrong value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.fuzz import sanitized
from tests.support.scale import fuzz_seconds

PROGRAM = Path(__file__).with_name("number_reader.py")


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip these tests if nothing can be built with sanitizers."""
    try:
        sanitized.check_machine(tmp_path_factory.mktemp("machine"))
    except sanitized.NoSanitizerError as error:
        pytest.skip(f"the C module is not fuzzed: {error}")


def fuzz(
    folder: Path, budget: float, seed: str, right: str = "", wrong: str = ""
) -> tuple[CompletedProcess[str], str]:
    """Fuzz a module for ``budget`` seconds; return the outcome, and the text that was read last."""
    module, last = sanitized.build(folder, right, wrong), folder / "last.txt"
    done = sanitized.run(PROGRAM, str(module), str(budget), seed, str(last), timeout=budget + 120)
    text = last.read_bytes() if last.exists() else None
    return done, f"seed {seed}, last text: {text!r}\n{done.stderr}"


def test_generated_texts_are_read_right_and_within_bounds(tmp_path: Path) -> None:
    done, expected = fuzz(tmp_path, fuzz_seconds(20), os.urandom(8).hex())
    assert done.returncode == 0, expected
    counts = json.loads(done.stdout)
    assert min(counts.values()) > 0.1 * sum(counts.values()) > 0, counts


DEFECTS = {
    "read beyond the end": (
        "bool negative = at < end && *at == '-', is_integer = true;",
        "bool negative = *at == '-', is_integer = true;",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "write beyond the end": (
        "return size / 2 + 1;",
        "return size / 3;",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "exponent that overflows": (
        "is_digit(*at) && value < 1000",
        "is_digit(*at)",
        "runtime error: signed integer overflow",
    ),
    "tie rounded up": ("up &= mantissa >> 1;", "up = 1;", "was read as"),
    "comma before the end": (
        "if (depth == 0 || *at++ != ',')",
        "if (at < end - 1 && at[0] == ',' && at[1] == ']')\n"
        "            return count;\n"
        "        if (depth == 0 || *at++ != ',')",
        "is no JSON",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, tmp_path: Path) -> None:
    right, wrong, expected = DEFECTS[defect]
    done, output = fuzz(tmp_path, 60, "planted", right, wrong)
    assert done.returncode != 0
    assert expected in output
