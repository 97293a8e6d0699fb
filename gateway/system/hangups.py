"""Notices peers that close their connection while reading is paused."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress

_CLOSED = getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLONESHOT", 0)


class HangupWatch:
    """Calls back once the peer of a connection has closed it, or its sending side.

    An event loop notices the end of a connection when it reads. While reading is paused, unread
    bytes hide the end, but the kernel reports it: epoll(7), EPOLLRDHUP. On a system without epoll
    the callback is never called.
    """

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], None]] = {}
        self._epoll: select.epoll | None = None

    def watch(self, descriptor: int, closed: Callable[[], None]) -> None:
        """Call ``closed`` once when the peer closes.

        If the system has too many open files, it is not called: nothing is lost but the notice.
        """
        if not hasattr(select, "epoll"):
            return
        with suppress(OSError):
            epoll = self._epoll or self._start()
            if self._watched.pop(descriptor, None) is not None:
                with suppress(OSError):  # an earlier connection was closed without unwatch
                    epoll.unregister(descriptor)
            epoll.register(descriptor, _CLOSED)
            self._watched[descriptor] = closed

    def unwatch(self, descriptor: int, closed: Callable[[], None]) -> None:
        """Cancel ``watch``."""
        if self._epoll is None or self._watched.get(descriptor) != closed:
            return
        del self._watched[descriptor]
        with suppress(OSError):  # the socket was closed before
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Stop watching all connections."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._watched.clear()

    def _start(self) -> select.epoll:
        epoll = self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(epoll.fileno(), self._report)
        return epoll

    def _report(self) -> None:
        assert self._epoll is not None
        loop = asyncio.get_running_loop()
        for descriptor, _ in self._epoll.poll(0):
            closed = self._watched.pop(descriptor, None)
            with suppress(OSError):
                self._epoll.unregister(descriptor)
            if closed is not None:
                loop.call_soon(closed)  # one that fails must not lose the others
