"""The command: a full screen in a terminal, and else one plain page."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import sys
import time
from typing import TextIO

from gateway.settings.values.units import Bounded, parse_duration
from gateway.top.address import AdminAddress
from gateway.top.client import AdminClient
from gateway.top.frame import Frame, plain_page
from gateway.top.keys import KeyDecoder
from gateway.top.plain_text import plain
from gateway.top.poller import Poller, Wanted
from gateway.top.screen import Painter, Screen
from gateway.top.terminal import Terminal
from gateway.top.view import PANELS, View

_PAGE_WIDTH = 120
"""Columns of a page for a pipe, unless COLUMNS says more or less."""
_ESCAPE_SECONDS = 0.05
"""After this time, an escape character is the key and not the begin of a sequence."""
_CLOCK_SECONDS = 1.0


parse_interval = Bounded(parse_duration, least="100ms", most="1h")


class NoGatewayError(Exception):
    """The gateway cannot be read, and there is no screen to wait at."""


def run(address: AdminAddress, interval: float, *, once: bool) -> None:
    """Show a gateway until the operator leaves; or once, if it cannot be otherwise.

    Raises NoGatewayError.
    """
    if once or not _is_terminal():
        print_page(address, interval, sys.stdout)
    else:
        show(address, interval)


def _is_terminal() -> bool:
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not dumb


def print_page(address: AdminAddress, interval: float, out: TextIO) -> None:
    """Print all panels once. Raises NoGatewayError."""
    poller = Poller(AdminClient(address), interval)
    for position, panel in enumerate(PANELS):
        poller.read(Wanted(panel, limit=2000), everything=position == 0)
        if failure := poller.snapshot.failure:
            raise NoGatewayError(plain(failure))
    width = shutil.get_terminal_size((_PAGE_WIDTH, 24)).columns
    painter = Painter(out.encoding, os.environ, plain=True)
    for line in plain_page(Frame(address.shown, interval), poller.snapshot, width):
        out.buffer.write(painter.paint(line).rstrip() + b"\n")
    out.flush()


def show(address: AdminAddress, interval: float) -> None:
    """Show the gateway on the whole terminal until the operator leaves."""
    keys = sys.stdin.fileno()
    with Terminal(keys, sys.stdout.fileno()) as terminal:
        poller = Poller(AdminClient(address), interval, terminal.wake)
        poller.start()
        painter = Painter(sys.stdout.encoding, os.environ)
        screen = Screen(painter, terminal.write)
        _Loop(terminal, poller, screen, Frame(address.shown, interval)).run(keys)
    if terminal.ended_by not in (None, signal.SIGINT):
        # The shell learns which signal it was.
        signal.signal(terminal.ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), terminal.ended_by)


class _Loop:
    """Draws a frame whenever something has changed."""

    def __init__(self, terminal: Terminal, poller: Poller, screen: Screen, frame: Frame) -> None:
        self._terminal = terminal
        self._poller = poller
        self._screen = screen
        self._frame = frame
        self._view = View()
        self._decoder = KeyDecoder()

    def run(self, keys: int) -> None:
        """Run until the operator leaves, a signal comes, or the terminal is gone."""
        try:
            while not self._view.left and self._terminal.ended_by is None:
                self._draw()
                if not self._wait(keys):
                    return
        except OSError as error:
            if not _is_gone(error):
                raise

    def _draw(self) -> None:
        terminal, view = self._terminal, self._view
        if terminal.resumed:
            terminal.resumed = False
            self._screen.forget()
        size = terminal.size()
        self._screen.draw(self._frame.compose(view, self._poller.snapshot, size, time.time()), size)
        self._poller.want(self._frame.wanted(view))

    def _wait(self, keys: int) -> bool:
        """Wait for keys or news; return whether there is a terminal."""
        seconds = _ESCAPE_SECONDS if self._decoder.waits else _CLOCK_SECONDS
        ready, _, _ = select.select([keys, self._terminal.wakeup], [], [], seconds)
        if self._terminal.wakeup in ready:
            os.read(self._terminal.wakeup, 4096)
        if keys in ready:
            data = os.read(keys, 4096)
            if not data:
                return False
            pressed = self._decoder.feed(data)
        else:
            pressed = [] if ready else self._decoder.flush()
        for key in pressed:
            self._view.press(key)
        return True


def _is_gone(error: OSError) -> bool:
    """Tell whether an error says that nobody sees the terminal any more."""
    return error.errno in (errno.EIO, errno.EBADF, errno.ENXIO, errno.EPIPE)
