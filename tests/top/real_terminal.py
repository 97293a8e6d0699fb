"""A real terminal for a command: a pseudo terminal, and what it shows."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pexpect
import pyte

from tests.support.gateway_process import TENSORGATE, TIMEOUT

_ALTERNATE_SCREEN = re.compile(rb"\x1b\[\?1049([hl])")
_ENVIRON = {"TERM": "xterm-256color", "COLUMNS": "77", "PYTHONWARNINGS": "default"}
"""A terminal with colours; a size in the environment does not count there."""


class RealTerminal:
    """A command in a terminal; the keys that are sent, and the lines that are shown."""

    def __init__(self, child: pexpect.spawn[bytes], size: tuple[int, int]) -> None:
        self.child = child
        self.raw = b""
        """All that the command has written."""
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """Return what the terminal shows, without blanks at the ends of lines."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """Return all lines."""
        return "\n".join(self.lines)

    @property
    def on_alternate_screen(self) -> bool:
        """Return whether the command shows another screen than that of the shell."""
        switches = _ALTERNATE_SCREEN.findall(self.raw)
        return bool(switches) and switches[-1] == b"h"

    @property
    def shows_cursor(self) -> bool:
        """Return whether the cursor is visible."""
        return not self._screen.cursor.hidden

    def modes(self) -> list[object]:
        """Return the modes of the line: echo, signals and others."""
        modes: list[object] = [*termios.tcgetattr(self.child.child_fd)]
        return modes

    def send(self, keys: str) -> None:
        """Press keys."""
        self.child.send(keys)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the window, of which the command gets SIGWINCH."""
        self.read()
        self._screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    def read(self) -> bool:
        """Read what was written; return whether the command may write more."""
        try:
            while True:
                data = self.child.read_nonblocking(65536, 0)
                self.raw += data
                self._stream.feed(data)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False

    async def until(self, shown: str | Callable[[], object]) -> None:
        """Wait until the terminal shows a text, or until a condition holds."""
        try:
            async with asyncio.timeout(TIMEOUT):
                while not (shown in self.text if isinstance(shown, str) else shown()):
                    assert self.read(), f"the command has ended:\n{self.text}"
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{shown!r} is not shown:\n{self.text}") from None

    async def end(self) -> int:
        """Wait for the end of the command; return its status, negative for a signal."""
        async with asyncio.timeout(TIMEOUT):
            while self.read() or self.child.isalive():  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
        self.child.close()
        return -self.child.signalstatus if self.child.signalstatus else self.child.exitstatus or 0


@asynccontextmanager
async def terminal(
    *arguments: str,
    size: tuple[int, int] = (80, 24),
    environ: Mapping[str, str] | None = None,
    command: tuple[str, ...] = (TENSORGATE, "top"),
) -> AsyncIterator[RealTerminal]:
    """Run a command in a terminal of some columns and lines."""
    program, *more = command
    with warnings.catch_warnings():
        # Newer versions of Python warn of threads at a fork; the child only starts the command.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = pexpect.spawn(
            program,
            [*more, *arguments],
            dimensions=size[::-1],
            env={**os.environ, **_ENVIRON, **(environ or {})},
            timeout=TIMEOUT,
        )
    child.delaybeforesend = None
    running = RealTerminal(child, size)
    try:
        yield running
    finally:
        if child.isalive():
            child.kill(signal.SIGKILL)
        child.close(force=True)


PYTHON = (sys.executable, "-c")
