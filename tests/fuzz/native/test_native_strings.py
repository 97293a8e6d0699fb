"""Fuzzing the strings of the C module: no access out of bounds, nothing converted wrongly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.fuzz import sanitized
from tests.support.scale import fuzz_seconds

PROGRAM = Path(__file__).with_name("string_codec.py")


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
    """Fuzz a module for ``budget`` seconds; return the outcome, and the last input."""
    module, last = sanitized.build(folder, right, wrong), folder / "last"
    done = sanitized.run(PROGRAM, str(module), str(budget), seed, str(last), timeout=budget + 120)
    data = last.read_bytes() if last.exists() else None
    return done, f"seed {seed}, last input: {data!r}\n{done.stderr}"


def test_generated_strings_are_converted_right_and_within_bounds(tmp_path: Path) -> None:
    done, expected = fuzz(tmp_path, fuzz_seconds(20), os.urandom(8).hex())
    assert done.returncode == 0, expected
    counts = json.loads(done.stdout)
    assert min(counts.values()) > 0.1 * sum(counts.values()) > 0, counts


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


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, tmp_path: Path) -> None:
    right, wrong, expected = DEFECTS[defect]
    done, output = fuzz(tmp_path, 60, "planted", right, wrong)
    assert done.returncode != 0
    assert expected in output
