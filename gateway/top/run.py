"""The command: a full screen in a terminal, and else one plain page."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import io
import os
import shutil
import signal
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from gateway.settings.values.units import Bounded, parse_duration
from gateway.top.client import AdminAddress, AdminClient, Poller, Wanted
from gateway.top.frame import Frame, plain_page
from gateway.top.plain_text import plain
from gateway.top.view import PANELS, KeyDecoder, View

_INPUT_FLAGS, _LOCAL_FLAGS, _CHARACTERS = 0, 3, 6
_ASCII = dict(zip("▁▂▃▄▅▆▇█…–·→×↑↓", "_.:-=+*#~-|>x^v", strict=True))
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


_PAGE_WIDTH = 120
"""Columns of a page for a pipe, unless COLUMNS says more or less."""
_ESCAPE_SECONDS = 0.05
"""After this time, an escape character is the key and not the begin of a sequence."""
_CLOCK_SECONDS = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAKING = (signal.SIGWINCH, signal.SIGCONT)

parse_interval = Bounded(parse_duration, least="100ms", most="1h")


class NoGatewayError(Exception):
    """The gateway cannot be read, and there is no screen to wait at."""


def run(address: AdminAddress, interval: float, *, once: bool) -> None:
    """Show a gateway until the operator leaves; or once, if it cannot be otherwise.

    Raises NoGatewayError.
    """
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    if once or dumb or not (sys.stdin.isatty() and sys.stdout.isatty()):
        asyncio.run(_print_page(address, interval))
    elif ended_by := asyncio.run(_show(address, interval)):
        # The shell learns which signal it was.
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)


async def _print_page(address: AdminAddress, interval: float) -> None:
    """Print all panels once. Raises NoGatewayError."""
    async with AdminClient(address) as client:
        poller = Poller(client, interval)
        for position, panel in enumerate(PANELS):
            await poller.read(Wanted(panel, limit=2000), everything=position == 0)
            if failure := poller.snapshot.failure:
                raise NoGatewayError(plain(failure))
    width = shutil.get_terminal_size((_PAGE_WIDTH, 24)).columns
    page = plain_page(Frame(address.shown, interval), poller.snapshot, width)
    for line in page:
        line.rstrip()
    open_console(plain=True).print(Group(*page), crop=False, width=width)


async def _show(address: AdminAddress, interval: float) -> int | None:
    """Show the gateway on the whole terminal until the operator leaves, or the terminal is gone.

    Return the signal that ended it, if another one than Ctrl-C did.
    """
    keys, loop, changed = sys.stdin.fileno(), asyncio.get_running_loop(), asyncio.Event()
    view, decoder, ended_by = View(), KeyDecoder(), list[int]()

    def read_keys() -> None:
        data = b""
        with suppress(OSError):
            data = os.read(keys, 4096)
        for key in decoder.feed(data) if data else ["leave"]:  # without any, the terminal is gone
            view.press(key)
        changed.set()

    def end(number: int) -> None:
        ended_by.append(number)
        view.press("leave")
        changed.set()

    async with AdminClient(address) as client:
        with Terminal(keys, sys.stdout.fileno()) as terminal:
            poller = Poller(client, interval, changed.set)
            polling = asyncio.create_task(poller.run())
            polling.add_done_callback(lambda _: changed.set())
            for number in _ENDING:
                loop.add_signal_handler(number, end, number)
            for number in _WAKING:
                loop.add_signal_handler(number, changed.set)
            loop.add_signal_handler(signal.SIGTSTP, terminal.suspend)
            loop.add_reader(keys, read_keys)
            frame = Frame(address.shown, interval)
            try:
                while not view.left and not polling.done():
                    size = terminal.size()
                    terminal.draw(frame.compose(view, poller.snapshot, size, time.time()), size)
                    poller.want(frame.wanted(view))
                    await _wait(changed, decoder, view)
                if polling.done():
                    polling.result()  # raises an error of our own
            except OSError as error:
                # Nobody sees the terminal any more.
                if error.errno not in (errno.EIO, errno.EBADF, errno.ENXIO, errno.EPIPE):
                    raise
            finally:
                loop.remove_reader(keys)
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
    return next((number for number in ended_by if number != signal.SIGINT), None)


async def _wait(changed: asyncio.Event, decoder: KeyDecoder, view: View) -> None:
    """Wait for keys or news."""
    try:
        async with asyncio.timeout(_ESCAPE_SECONDS if decoder.waits else _CLOCK_SECONDS):
            await changed.wait()
    except TimeoutError:
        for key in decoder.flush():
            view.press(key)
    changed.clear()
