"""Takes a terminal over, and gives it back as it was, whatever happens."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import signal
import sys
import termios
from collections.abc import Sequence

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

_INPUT_FLAGS, _LOCAL_FLAGS, _CHARACTERS = 0, 3, 6
_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)),
    "…": "~",
    "–": "-",
    "·": "|",
    "→": ">",
    "×": "x",
    "↑": "^",
    "↓": "v",
}
"""What stands for our own characters where the terminal has none of them."""


def _to_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(each, "?") for each in missing), error.end


codecs.register_error("tensorgate-top", _to_ascii)


def open_console(*, plain: bool) -> Console:
    """Return what writes to the standard output: with the styles of a terminal, or without any."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(errors="tensorgate-top")
    return Console(
        force_terminal=not plain,
        color_system=None if plain else "auto",
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


class Terminal:
    """A terminal in use, while its context is open: keys come at once and are not echoed."""

    def __init__(self, keys: int, screen: int) -> None:
        self._keys = keys
        self._screen = screen
        self._console = open_console(plain=False)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._old: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> Terminal:
        try:
            self._take()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        size = os.get_terminal_size(self._screen)
        return (size.columns or 80, size.lines or 24)

    def draw(self, lines: Sequence[Text], size: tuple[int, int]) -> None:
        """Show lines on a screen of this size."""
        self._console.size = ConsoleDimensions(*size)
        self._live.update(Group(*lines), refresh=True)

    def suspend(self) -> None:
        """Stop, as Ctrl-Z asks for, and take the terminal again when the shell goes on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _take(self) -> None:
        self._old = termios.tcgetattr(self._keys)
        new = termios.tcgetattr(self._keys)
        new[_INPUT_FLAGS] &= ~(termios.IXON | termios.ICRNL)  # Ctrl-S must not stop the output
        new[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        new[_CHARACTERS][termios.VMIN] = 1
        new[_CHARACTERS][termios.VTIME] = 0
        _set_modes(self._keys, termios.TCSADRAIN, new)
        self._live.start()

    def _give_back(self) -> None:
        if self._old is None:
            return
        old, self._old = self._old, None
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._live.stop()
        with contextlib.suppress(termios.error):
            _set_modes(self._keys, termios.TCSAFLUSH, old)


def _set_modes(terminal: int, when: int, modes: list[int | list[bytes | int]]) -> None:
    """Set the modes of a terminal; in the background, this stops until the shell goes on."""
    while True:
        try:
            termios.tcsetattr(terminal, when, modes)
        except termios.error as error:
            if error.args[0] != errno.EINTR:  # Python repeats other calls by itself: PEP 475
                raise
        else:
            return
