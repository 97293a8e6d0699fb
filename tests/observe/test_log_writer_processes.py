"""What several processes that append to one file do to each other when the disk is full."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.observe import log_writer
from gateway.observe.log_writer import LogWriter

PATIENCE = 5.0


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.005)


def test_line_is_not_appended_to_one_of_another_process_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_INTERVAL", 0.02)
    path = tmp_path / "access.log"
    one, two = LogWriter(str(path)), LogWriter(str(path))
    write, room, blocked = os.write, 9, {one, two}

    def cut(descriptor: int, data: bytes) -> int:
        nonlocal room
        # Threads of other tests may write too.
        if descriptor not in {one._descriptor, two._descriptor}:
            return write(descriptor, data)
        if not room and descriptor in {each._descriptor for each in blocked}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size, room = (room, 0) if room else (len(data), 0)
        return write(descriptor, data[:size])

    monkeypatch.setattr(os, "write", cut)
    one._buffer += b"one\nof one\n"
    _until(lambda: path.exists() and path.read_bytes() == b"one\nof on")
    two.add(b"of two\n")
    _until(lambda: len(caplog.records) == 2)
    blocked.remove(two)
    _until(lambda: not two._buffer)
    blocked.remove(one)
    _until(lambda: not one._buffer)
    one.close()
    two.close()
    assert list(filter(None, path.read_text().split("\n"))) == ["one", "of on", "of two", "of one"]
