"""Records which lines of the gateway each file of the tests executes.

``record`` runs the tests with this plugin of pytest, but for those against real servers and
programs of the system, and the fuzz tests. Processes that tests start are recorded, too, if they
are not killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from coverage import Coverage

_LEFT_OUT = ("tests/interop", "tests/integration", "tests/fuzz")
_FOLDER = "TENSORGATE_COVERAGE_FOLDER"
_SETTINGS = """[run]
data_file = {folder}/data
parallel = true
include = {root}/gateway/*
context = ${{TENSORGATE_COVERED_BY-}}
disable_warnings = trace-changed, no-data-collected, module-not-measured, already-imported
"""


@dataclass(frozen=True)
class FileCoverage:
    """The test files that execute each line, their processor time, and the tests that fail."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]
    failing: list[str]

    @classmethod
    def read(cls, file: Path) -> FileCoverage:
        """Read what ``record`` has written."""
        return cls(**json.loads(file.read_text()))

    def tests_of(self, file: str, lines: Iterable[int]) -> list[str]:
        """Return the test files that execute one of the lines, the quickest first.

        A line that is executed as its module is imported belongs to all tests of the module.
        """
        of_file = self.lines.get(file, {})
        found = {test for line in lines for test in of_file.get(str(line), ())}
        if not found:
            found = {test for tests in of_file.values() for test in tests}
        return sorted(found, key=lambda test: self.seconds.get(test, 0))


def environment(root: Path) -> dict[str, str]:
    """Return the environment of tests that import the gateway from a copy of the checkout."""
    few = {"TENSORGATE_TEST_SCALE": "0.1", "TENSORGATE_FUZZ_SECONDS": "1"}
    return {**os.environ, **few, "PYTHONPATH": str(root), "TENSORGATE_PURE": "1"}


def record(root: Path, processes: int, file: Path) -> None:
    """Run the tests of a copy of the checkout, and write what a FileCoverage reads."""
    folder = root / ".coverage.d"
    folder.mkdir()
    (folder / "settings").write_text(_SETTINGS.format(folder=folder, root=root))
    left_out = [f"--ignore={each}" for each in _LEFT_OUT]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", __name__, *left_out]
    subprocess.run(
        [*command, f"--numprocesses={processes}"],
        cwd=root,
        env=environment(root) | {_FOLDER: str(folder)},
        check=False,
    )
    coverage = Coverage(data_file=folder / "data", config_file=False)
    coverage.combine([str(folder)])
    data, lines = coverage.get_data(), dict[str, dict[int, list[str]]]()
    for name in sorted(data.measured_files()):
        by_line = data.contexts_by_lineno(name)
        lines[str(Path(name).relative_to(root))] = {
            line: sorted(tests) if "" not in (tests := by_line[line]) else [] for line in by_line
        }
    seconds = Counter[str]()
    for times in folder.glob("times.*"):
        seconds.update(json.loads(times.read_text()))
    failing = json.loads((folder / "failing").read_text())
    file.write_text(json.dumps({"lines": lines, "seconds": seconds, "failing": failing}))


class _Recorder:
    """Records in each process of tests; the first process collects what has failed."""

    def __init__(self, folder: Path, *, is_worker: bool) -> None:
        self._folder = folder
        self._is_worker = is_worker
        self._seconds: dict[str, float] = defaultdict(float)
        self._failing: list[str] = []
        self._file = ""
        if is_worker:
            self._coverage = Coverage(config_file=str(folder / "settings"))
            self._coverage.start()
            os.environ["COVERAGE_PROCESS_START"] = str(folder / "settings")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self._is_worker:
            return (yield)
        if sys.gettrace() is None:  # a test has set another one
            self._coverage.stop()
            self._coverage.start()
        if self._file != item.location[0]:
            self._file = os.environ["TENSORGATE_COVERED_BY"] = item.location[0]
            self._coverage.switch_context(self._file)
        started = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self._seconds[self._file] += sum(os.times()[:4]) - started

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._failing:
            self._failing.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._is_worker:
            self._coverage.stop()
            self._coverage.save()
            (self._folder / f"times.{os.getpid()}").write_text(json.dumps(self._seconds))
        else:
            (self._folder / "failing").write_text(json.dumps(self._failing))


def pytest_configure(config: pytest.Config) -> None:
    """Begin to record."""
    recorder = _Recorder(Path(os.environ[_FOLDER]), is_worker=hasattr(config, "workerinput"))
    config.pluginmanager.register(recorder)
