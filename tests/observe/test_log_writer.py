"""How lines get into a file, a pipe or stderr: when, whole, and never at their caller's cost."""

import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.observe import log_writer
from gateway.observe.log_writer import LogWriter
from gateway.system import stderr_handler
from gateway.system.stderr_handler import StderrHandler

PATIENCE = 5.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write and report soon, and drop lines early."""
    monkeypatch.setattr(log_writer, "FLUSH_INTERVAL", 0.02)
    monkeypatch.setattr(log_writer, "PATH_CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(log_writer, "REPORT_INTERVAL", 0.0)
    monkeypatch.setattr(log_writer, "MAX_BUFFERED", 10_000)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write nothing because of the time."""
    monkeypatch.setattr(log_writer, "FLUSH_INTERVAL", 600.0)


@pytest.fixture
def writers(path: Path) -> Iterator[Callable[[], LogWriter]]:
    """Make writers, which are closed in the end."""
    made: list[LogWriter] = []

    def make() -> LogWriter:
        made.append(LogWriter(str(path)))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert not each._writing_thread.is_alive()


MakeWriter = Callable[[], LogWriter]


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.005)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# ------------------------------------------------------------------------------------ when


@pytest.mark.usefixtures("fast")
def test_line_is_written_within_the_interval(path: Path, writers: MakeWriter) -> None:
    writer = writers()
    for line in ("one\n", "two\n"):
        writer.add(line.encode())
        _until(lambda: _text(path).endswith(line))  # noqa: B023
    assert _text(path) == "one\ntwo\n"


@pytest.mark.usefixtures("slow")
def test_full_buffer_is_written_without_waiting(path: Path, writers: MakeWriter) -> None:
    writer = writers()
    for _ in range(log_writer.FLUSH_SIZE // 1000 + 1):
        writer.add(b"x" * 1000 + b"\n")
    _until(lambda: len(_text(path)) >= log_writer.FLUSH_SIZE)


@pytest.mark.usefixtures("slow")
def test_closing_appends_what_waits(path: Path) -> None:
    path.write_text("before\n")
    writer = LogWriter(str(path))
    writer.add(b"last\n")
    writer.close()
    assert _text(path) == "before\nlast\n"


def test_without_a_path_lines_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    writer = LogWriter()
    writer.add(b"line\n")
    writer.close()
    assert capfd.readouterr().err == "line\n"


# ------------------------------------------------------------------------------------ rotation


@pytest.mark.usefixtures("fast")
def test_renamed_file_is_opened_anew(path: Path, writers: MakeWriter) -> None:
    writer = writers()
    writer.add(b"old\n")
    _until(lambda: _text(path))
    rotated = path.rename(path.with_suffix(".1"))
    _until(path.exists)
    writer.add(b"new\n")
    _until(lambda: _text(path) == "new\n")
    assert _text(rotated) == "old\n"


@pytest.mark.usefixtures("slow")
def test_reopening_opens_the_file_at_once(path: Path, writers: MakeWriter) -> None:
    writer = writers()
    writer.reopen()
    _until(lambda: path.exists() and not writer._must_reopen)
    path.rename(path.with_suffix(".1"))
    writer.add(b"new\n")
    writer.reopen()
    _until(lambda: _text(path) == "new\n")


@pytest.mark.usefixtures("fast")
def test_missing_folder_is_reported_until_it_is_there(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = LogWriter(str(path.parent / "later" / "log"))
    writer.add(b"line\n")
    _until(lambda: "later/log: No such file or directory; 0 lines dropped so far" in caplog.text)
    (path.parent / "later").mkdir()
    _until(lambda: "works again; 0 lines were dropped" in caplog.text)
    writer.close()
    assert _text(path.parent / "later" / "log") == "line\n"
    assert len(caplog.records) == 2


# ------------------------------------------------------------------------------------ failures


def _fill(writer: LogWriter) -> int:
    """Add numbered lines until some are dropped; return how many were added."""
    for number in range(100_000):
        if writer.dropped >= 10:
            return number
        writer.add(b"line %d\n" % number)
    raise AssertionError("no line was dropped")


@pytest.mark.usefixtures("fast")
def test_lines_are_dropped_while_nobody_reads(
    path: Path, writers: MakeWriter, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    writer = writers()
    added = _fill(writer)
    _until(lambda: "nobody reads it; " in caplog.text)
    received = b""

    def read() -> bool:
        nonlocal received
        try:
            received += os.read(reader, 2**20)
        except BlockingIOError:
            return not writer._buffer
        return False

    _until(read)
    _until(lambda: f"works again; {writer.dropped} lines were dropped" in caplog.text)
    read()
    os.close(reader)
    lines = received.splitlines()
    assert lines == [b"line %d" % number for number in range(len(lines))], "whole, and in order"
    assert len(lines) == added - writer.dropped


@pytest.mark.usefixtures("fast")
def test_pipe_without_a_reader_is_reported(
    path: Path, writers: MakeWriter, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = writers()
    writer.add(b"one\n")
    _until(lambda: not writer._buffer)
    os.close(reader)
    writer.add(b"two\n")
    writer.add(b"three\n")
    _until(lambda: "Broken pipe" in caplog.text)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    _until(lambda: "works again" in caplog.text)
    assert os.read(reader, 100).endswith(b"two\nthree\n")
    os.close(reader)


def test_full_disk_is_reported_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_INTERVAL", 0.01)
    monkeypatch.setattr(log_writer, "MAX_BUFFERED", 10_000)
    writer = LogWriter("/dev/full")
    writer.add(b"line\n")
    _until(lambda: caplog.records)
    _fill(writer)
    time.sleep(0.1)
    assert caplog.messages == [
        "access log /dev/full: No space left on device; 0 lines dropped so far"
    ]
    writer.close()
    assert len(caplog.messages) == 2, "the end is always reported"
    assert caplog.messages[1].endswith(f"; {writer.dropped} lines dropped so far")


def test_closing_does_not_wait_for_a_reader_forever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_INTERVAL", 0.02)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = LogWriter(str(path))
    for _ in range(1000):
        writer.add(b"x" * 1000 + b"\n")
    writer.close()
    assert not writer._writing_thread.is_alive()
    assert writer.dropped > 900
    os.close(reader)


# ------------------------------------------------------------------------------------ processes

_PROCESS = """
import sys
from gateway.observe.log_writer import LogWriter
from gateway.system.stderr_handler import StderrHandler
writer = LogWriter(sys.argv[2] or None)
for number in range(2000):
    writer.add(f"{sys.argv[1]} {number} {'x' * (number % 300)}.\\n".encode())
writer.close()
"""


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_several_processes_do_not_mix_lines(kind: str, path: Path) -> None:
    file = str(path) if kind == "file" else ""
    reader, sender = os.pipe()
    processes = [
        subprocess.Popen([sys.executable, "-c", _PROCESS, name, file], stderr=sender)
        for name in "abc"
    ]
    os.close(sender)
    with open(reader, encoding="ascii") as pipe:
        written = pipe.read()
    assert [process.wait() for process in processes] == [0, 0, 0]
    lines = (_text(path) if file else written).splitlines()
    for name in "abc":
        own = [line for line in lines if line.startswith(name)]
        assert own == [f"{name} {number} {'x' * (number % 300)}." for number in range(2000)]
    assert len(lines) == 6000


def test_path_that_no_system_has_is_reported_and_lines_are_counted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = LogWriter(f"{path}\0")
    writer.add(b"line\n")
    writer.close()
    assert writer.dropped == 1
    assert "embedded null byte" in caplog.text


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


# ------------------------------------------------------------------------------------ the own log

LARGE = "x" * 5000
"""More than one write to a pipe."""


@contextmanager
def _stderr_is_a_pipe() -> Iterator[int]:
    """Make stderr a pipe, and return its other end; no fixture, as pytest redirects it too."""
    before = os.dup(2)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.dup2(writer, 2)
    os.close(writer)
    yield reader
    os.dup2(before, 2)
    os.close(before)
    os.close(reader)


def _log(handler: StderrHandler, text: str) -> None:
    handler.handle(logging.LogRecord("tensorgate", logging.INFO, "", 0, text, (), None))


def _read(reader: int, handler: StderrHandler) -> list[str]:
    """Read all lines, also those that wait."""
    received = b""
    while True:
        try:
            received += os.read(reader, 2**20)
        except BlockingIOError:
            if not handler._waiting:
                return received.decode().splitlines()
            handler.flush()


def test_lines_are_written_at_once() -> None:
    with _stderr_is_a_pipe() as reader:
        handler = StderrHandler()
        for text in ("one", LARGE):
            _log(handler, text)
            assert not handler._waiting
            assert _read(reader, handler) == [text]


def test_lines_wait_while_nobody_reads() -> None:
    with _stderr_is_a_pipe() as reader:
        handler = StderrHandler()
        texts = [f"{number} {LARGE}" for number in range(100)]
        for text in texts:
            _log(handler, text)
        assert 0 < len(handler._waiting) < len(texts)
        assert _read(reader, handler) == texts


def test_lines_beyond_those_that_may_wait_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with _stderr_is_a_pipe() as reader:
        monkeypatch.setattr(stderr_handler, "MAX_WAITING", 5)
        handler = StderrHandler()
        for _ in range(100):
            _log(handler, LARGE)
        written = len(_read(reader, handler))
        _log(handler, "again")
        notice, line = _read(reader, handler)
        lost = "lines of this log were dropped, as stderr could not be written"
        assert (notice, line) == (f"{100 - written} {lost}", "again")


def test_lines_for_a_closed_pipe_are_counted_and_a_child_process_leaves_all_to_its_parent() -> None:
    with _stderr_is_a_pipe() as reader:
        handler = StderrHandler()
        for _ in range(100):
            _log(handler, LARGE)
        assert handler._waiting
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, reader)
        os.close(null)
        child = os.fork()
        if not child:
            os._exit(len(handler._waiting))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        _log(handler, "lost")
        # The line, and the one that says how many others were dropped.
        assert (handler._dropped, list(handler._waiting)) == (2, [])
        child = os.fork()
        if not child:
            os._exit(handler._dropped)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_record_that_cannot_be_formatted_does_not_fail_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[logging.LogRecord] = []
    with _stderr_is_a_pipe() as reader:
        handler = StderrHandler()
        monkeypatch.setattr(handler, "handleError", failed.append)
        bad = logging.LogRecord("x", logging.INFO, "", 0, "%d", ("text",), None)
        handler.handle(bad)
        _log(handler, "next")
        assert failed == [bad]
        assert _read(reader, handler) == ["next"]
