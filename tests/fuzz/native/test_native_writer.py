"""Fuzzing the C encoder of numbers: no access out of bounds, no wrong text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.fuzz import sanitized
from tests.support.scale import fuzz_seconds

PROGRAM = Path(__file__).with_name("number_writer.py")
CHECKS_AVX2 = '__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")'


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
    """Fuzz a module for ``budget`` seconds; return the outcome, and the elements written last."""
    module, last = sanitized.build(folder, right, wrong), folder / "last.txt"
    done = sanitized.run(PROGRAM, str(module), str(budget), seed, str(last), timeout=budget + 120)
    text = last.read_text() if last.exists() else None
    return done, f"seed {seed}, last elements: {text}\n{done.stderr}"


@pytest.mark.parametrize(("right", "wrong"), [("", ""), (CHECKS_AVX2, "0")], ids=["avx2", "plain"])
def test_elements_are_written_right_and_within_bounds(
    right: str, wrong: str, tmp_path: Path
) -> None:
    done, expected = fuzz(tmp_path, fuzz_seconds(10), os.urandom(8).hex(), right, wrong)
    assert done.returncode == 0, expected
    counts = json.loads(done.stdout)
    assert min(counts.values()) > 0.02 * sum(counts.values()) > 0, counts


DEFECTS = {
    "write beyond the end": ("[FP64] = 26", "[FP64] = 16", "ERROR: AddressSanitizer"),
    "tie rounded up": (
        "last += fraction > half - (last & 1);",
        "last += fraction >= half;",
        "was written as",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, tmp_path: Path) -> None:
    right, wrong, expected = DEFECTS[defect]
    done, output = fuzz(tmp_path, 60, "planted", right, wrong)
    assert done.returncode != 0
    assert expected in output
