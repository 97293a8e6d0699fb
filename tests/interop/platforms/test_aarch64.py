"""The C module passes its tests on aarch64, in Debian's Python for it, by qemu-user."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.interop.platforms.cross_compile import ROOT, compile_all, run, write_sources
from tests.interop.programs import installed_folder, program
from tests.support.scale import SCALE

TESTS = "tests/codec/native"


def _build(folder: Path, right: str = "", wrong: str = "") -> Path:
    compiler = program("aarch64-linux-gnu-gcc")
    headers = installed_folder("aarch64") / "usr" / "include"
    (python,) = headers.glob("python3.*")
    sources = write_sources(folder, right, wrong)
    objects = compile_all(compiler, sources, f"-I{headers}", f"-I{python}")
    module = folder / "_native.so"
    run(compiler, "-shared", *objects, "-o", str(module))
    return module


def _run_tests(module: Path, tests: str) -> subprocess.CompletedProcess[str]:
    root, packages = installed_folder("aarch64"), installed_folder("aarch64-packages")
    (python,) = (root / "usr" / "bin").glob("python3.*")
    command = (program("qemu-aarch64"), "-L", str(root), str(python))
    environ = {
        **os.environ,
        "PYTHONPATH": f"{packages}:{ROOT}",
        "PYTEST_ADDOPTS": "",  # for plugins that are not there
        "TENSORGATE_TEST_SCALE": str(SCALE / 4),  # an emulator is slow
    }
    runner = "tests/fuzz/native/run_tests.py"
    return subprocess.run(
        [*command, runner, str(module), tests],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_c_module_passes_its_tests_on_aarch64(tmp_path: Path) -> None:
    done = _run_tests(_build(tmp_path), TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d{3,} passed in", done.stdout, re.MULTILINE), done.stdout


def test_defect_planted_for_aarch64_is_found(tmp_path: Path) -> None:
    module = _build(tmp_path, "half_of(digits, 1) > 0", "half_of(digits, 1) > 1")
    done = _run_tests(module, f"{TESTS}/test_encode_numbers.py")
    assert done.returncode == 1
    assert "1 failed" in done.stdout
