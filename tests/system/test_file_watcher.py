"""Changes of files, and the ways in which a settings file comes to say something new."""

import os
from pathlib import Path

import pytest

from gateway.system.file_watcher import ContentWatcher, FileWatch, digest


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files with some content."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def _looks(watch: FileWatch | ContentWatcher, times: int = 4) -> list[bool]:
    return [watch.changed() for _ in range(times)]


def test_change_counts_after_two_looks_until_it_is_used(files: list[str]) -> None:
    watch = FileWatch(files)
    Path(files[1]).write_text("other")
    assert _looks(watch) == [False, True, True, True]
    watch.mark_used()
    assert _looks(watch) == [False] * 4


def test_change_does_not_count_while_a_file_goes_on_changing(files: list[str]) -> None:
    watch = FileWatch(files)
    for size in range(10, 14):
        Path(files[0]).write_text("x" * size)
        assert not watch.changed()
    assert watch.changed()


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


OLD, NEW = "listen: 127.0.0.1:1\n", "listen: 127.0.0.1:2\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file."""
    file = tmp_path / "gateway.yaml"
    file.write_text(OLD)
    return file


def test_a_file_that_is_replaced_by_rename_has_changed(file: Path) -> None:
    """As editors do it, and `install`."""
    watch = ContentWatcher([str(file)])
    new = file.with_suffix(".tmp")
    new.write_text(NEW)
    os.utime(new, ns=(0, file.stat().st_mtime_ns))  # of the same size and time
    os.rename(new, file)
    assert _looks(watch) == [False, True, False, False]


def test_a_config_map_of_kubernetes_has_changed_with_its_content(tmp_path: Path) -> None:
    """The file is a link into ..data, itself a link to a folder, and is swapped by rename."""
    for name, text in (("..1", OLD), ("..2", NEW), ("..3", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "gateway.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    file = tmp_path / "gateway.yaml"
    file.symlink_to("..data/gateway.yaml")
    watch = ContentWatcher([str(file)])

    def swap(name: str) -> None:
        (tmp_path / "..data_tmp").symlink_to(name)
        os.rename(tmp_path / "..data_tmp", tmp_path / "..data")

    assert _looks(watch) == [False] * 4
    swap("..2")
    assert _looks(watch) == [False, True, False, False]
    swap("..3")  # another key of the map has changed, this file holds the same
    assert _looks(watch) == [False] * 4


def test_a_file_that_vanishes_for_a_moment_has_changed_by_its_content_only(file: Path) -> None:
    watch = ContentWatcher([str(file)])
    file.unlink()
    assert not watch.changed()
    file.write_text(NEW)
    assert _looks(watch) == [False, True, False, False]
    file.unlink()
    assert not watch.changed()
    file.write_text(NEW)
    assert _looks(watch) == [False] * 4


def test_a_file_that_is_touched_has_not_changed(file: Path) -> None:
    watch = ContentWatcher([str(file)])
    os.utime(file, ns=(0, 0))
    assert _looks(watch) == [False] * 4
    file.write_text(NEW + NEW)
    assert _looks(watch) == [False, True, False, False]


def test_content_that_is_used_already_has_not_changed(file: Path) -> None:
    watch = ContentWatcher([str(file)])
    file.write_text(NEW + NEW)
    watch.mark_used()
    assert _looks(watch) == [False] * 4
