"""Takes a terminal over, and gives it back as it was, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
from types import FrameType

_ENTER = b"\x1b[?1049h\x1b[?7l\x1b[?25l"
"""The other screen, lines that are not broken, no cursor."""
_LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_INPUT_FLAGS, _LOCAL_FLAGS, _CHARACTERS = 0, 3, 6
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAKING = (signal.SIGWINCH, signal.SIGCONT)


class Terminal:
    """A terminal in use, while its context is open.

    Keys come at once and are not echoed. A byte can be read from ``wakeup`` after each signal, and
    after ``wake``. ``ended_by`` is the signal that asked the program to end.
    """

    def __init__(self, keys: int, screen: int) -> None:
        self._keys = keys
        self._screen = screen
        self._old: list[int | list[bytes | int]] | None = None
        self.ended_by: int | None = None
        self.resumed = False

    def __enter__(self) -> Terminal:
        self.wakeup, self._waker = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._waker, False)
        self._old_wakeup = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._old_handlers = {
            **{number: signal.signal(number, self._end) for number in _SIGNALS},
            **{number: signal.signal(number, self._note) for number in _WAKING},
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._suspend),
        }
        try:
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        waker, self._waker = self._waker, -1  # another thread may still want to wake
        os.close(self.wakeup)
        os.close(waker)

    def wake(self) -> None:
        """Make ``wakeup`` readable; another thread may call this."""
        with contextlib.suppress(OSError):  # full: it is readable already; closed: nobody reads
            os.write(self._waker, b"\0")

    def write(self, data: bytes) -> None:
        """Write to the screen."""
        while data:
            data = data[os.write(self._screen, data) :]

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        size = os.get_terminal_size(self._screen)
        return (size.columns or 80, size.lines or 24)

    def _take(self) -> None:
        self._old = termios.tcgetattr(self._keys)
        new = termios.tcgetattr(self._keys)
        new[_INPUT_FLAGS] &= ~(termios.IXON | termios.ICRNL)  # Ctrl-S must not stop the output
        new[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        new[_CHARACTERS][termios.VMIN] = 1
        new[_CHARACTERS][termios.VTIME] = 0
        _set_modes(self._keys, termios.TCSADRAIN, new)
        self.write(_ENTER)

    def _give_back(self) -> None:
        if self._old is None:
            return
        old, self._old = self._old, None
        with contextlib.suppress(OSError):  # the terminal may be gone
            self.write(_LEAVE)
        with contextlib.suppress(termios.error):
            _set_modes(self._keys, termios.TCSAFLUSH, old)

    def _end(self, number: int, _: FrameType | None) -> None:
        self.ended_by = number

    def _note(self, number: int, _: FrameType | None) -> None:
        """Let the signal wake the program up."""

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Stop, as Ctrl-Z asks for, and take the terminal again when the shell goes on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
        self.resumed = True


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
