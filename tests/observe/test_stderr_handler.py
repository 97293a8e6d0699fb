"""The gateway's own log never waits for the reader of stderr."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.observe import stderr_handler
from gateway.observe.stderr_handler import StderrHandler

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
