"""Changes of files."""

import os
from pathlib import Path

import pytest

from gateway.system.file_watcher import FileWatch, digest


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files with some content."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def _looks(watch: FileWatch, times: int = 3) -> list[bool]:
    return [watch.changed() for _ in range(times)]


def test_change_counts_after_two_looks_until_it_is_used(files: list[str]) -> None:
    watch = FileWatch(files)
    Path(files[1]).write_text("other")
    assert _looks(watch) == [False, True, True]
    watch.mark_used()
    assert _looks(watch) == [False, False, False]


def test_change_does_not_count_while_a_file_goes_on_changing(files: list[str]) -> None:
    watch = FileWatch(files)
    for size in range(10, 14):
        Path(files[0]).write_text("x" * size)
        assert not watch.changed()
    assert watch.changed()


def test_reverted_change_does_not_count(files: list[str]) -> None:
    watch = FileWatch(files)
    os.rename(files[0], f"{files[0]}.old")
    assert not watch.changed()
    os.rename(f"{files[0]}.old", files[0])
    assert _looks(watch) == [False, False, False]


def test_missing_file_has_changed(files: list[str]) -> None:
    watch = FileWatch(files)
    os.unlink(files[0])
    assert _looks(watch, 2) == [False, True]


def test_digest_differs_for_different_contents(files: list[str], tmp_path: Path) -> None:
    one, two = map(digest, files)
    assert one is not None
    assert two is not None
    assert one != two
    Path(files[1]).write_text("one")
    assert digest(files[1]) == one
    assert digest(str(tmp_path / "none")) is None
    assert digest(str(tmp_path)) is None


def test_pipe_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert digest(str(pipe)) is None  # without waiting for a writer
