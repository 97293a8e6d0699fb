"""Fuzzing settings files: the result is settings, or errors with file and line."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from gateway.settings.load import MAX_FILE_BYTES, load_with_positions
from gateway.settings.problems import Problem, SettingsError
from gateway.settings.schema import Settings
from tests.fuzz.settings_files import SAMPLES, WITNESS, broken
from tests.support.scale import fuzz_seconds

ENVIRON = {"SET": "64", "NUMBER": "7", "EMPTY": "", "ODD": "\udc80\n"}
MAX_CPU_SECONDS = 60
"""Seconds of CPU that a file may take: hundreds of times what the slowest here takes."""
MAX_GROWTH_KIB = 512 * 1024
"""KiB of memory that all files together may add to the process."""
MIN_FILES = 50
"""Files that are tried however short the time is."""
WITHOUT_LINE = ("", "upstreams", "routes")
"""Where something is missing as a whole, no line can be told."""


class TooLongError(BaseException):
    """A file took too long; nothing but the test may catch it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Stop what takes more CPU than a file may."""

    def stop(number: int, frame: object) -> None:
        raise TooLongError(f"more than {MAX_CPU_SECONDS} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcome(file: Path, with_files: bool = False) -> Settings | tuple[Problem, ...]:
    try:
        return load_with_positions(file, ENVIRON, with_files=with_files).settings
    except SettingsError as error:
        return error.problems


def check_file(file: Path, content: bytes, with_files: bool = False) -> bool:
    """Check what comes of a file; return whether it gave settings."""
    file.write_bytes(content)
    with bounded():
        found = outcome(file, with_files)
    if isinstance(found, Settings):
        return True
    assert found
    text = content.decode(errors="replace")
    last = len(text.splitlines()) + 1
    for problem in found:
        if problem.line is None:
            is_as_a_whole = problem.setting in WITHOUT_LINE
            assert is_as_a_whole, problem
        else:
            assert 1 <= problem.line <= last, problem
        said = problem.describe(file)
        assert said.startswith(str(file))
        assert said.isprintable()
        assert "nput should" not in said  # pydantic's own words
    return False


def test_broken_files_give_settings_or_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "gateway.yaml"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + fuzz_seconds(5)
    right = wrong = 0
    for seed in count():
        if seed >= MIN_FILES and time.monotonic() > end:
            break
        content = broken(seed)
        try:
            if check_file(file, content, with_files=bool(seed % 2)):
                right += 1
            else:
                wrong += 1
        except BaseException as error:
            error.add_note(f"seed {seed}: {content[:2000]!r}")
            raise
    # It is of use only where some pass and some do not.
    assert right
    assert wrong
    assert not (tmp_path / WITNESS).exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB


def test_the_samples_are_right(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    assert [check_file(file, sample.encode()) for sample in SAMPLES] == [True] * len(SAMPLES)


U = "upstreams: {u: {endpoints: http://u:1}}\n"
HOSTILE = {
    "billion laughs": "a0: &a0 [x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 60)),
    "merged laughs": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 60)),
    "an alias inside itself": "upstreams: &a {u: *a}\n",
    "a tag that runs a program": f"a: !!python/object/apply:os.system ['touch {WITNESS}']\n",
    "too large": U + "#" * MAX_FILE_BYTES,
    "as large as may be": U + "#" * (MAX_FILE_BYTES - len(U)),
    "lists in lists": U + "listen: " + "[" * 500_000,
    "keys that are lists": U + "? " * 500_000,
    "unknown keys in a section": U + "limits:\n" + "".join(f"  log{i}: 1\n" for i in range(4_900)),
    "misplaced sections": "upstreams:\n" + "  log: {}\n  limits: {}\n" * 2_000,
    "the same key": U + "watch: true\n" * 4_900,
    "references": U + "listen: [" + "'${N:-1}', " * 9_000 + "]",
    "a long key": U + "a" * 1_000_000 + ": 1\n",
    "quotes that do not end": U + "watch: '" + "a\n" * 500_000,
    "dashes that do not fit": U + ("- " * 200 + "\n") * 2_000 + " b: c\n",
    "many commas": U + "listen: " + "a," * 500_000,
    "NUL": U + "watch: \0\n",
    "UTF-16": U.encode("utf-16").decode("latin-1"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_quickly(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    is_right = text == HOSTILE["as large as may be"]
    assert check_file(tmp_path / "gateway.yaml", text.encode("latin-1")) is is_right
    assert not (tmp_path / WITNESS).exists()
