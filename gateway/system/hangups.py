"""Notices peers that close their connection while nothing is read from it."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress

_CLOSED = getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLONESHOT", 0)


class HangupWatch:
    """Calls back once the peer of a connection has closed it, or its sending side.

    An event loop notices the end of a connection when it reads. While reading is paused, as the
    other side of a call is slow, bytes that nobody reads stand before the end; the kernel tells of
    it all the same (epoll(7), EPOLLRDHUP). Where a system has no epoll, nobody is called.
    """

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], None]] = {}
        self._epoll: select.epoll | None = None

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """Call ``gone``, once, when the peer closes."""
        if not hasattr(select, "epoll"):
            return
        epoll = self._epoll or self._begin()
        if descriptor in self._watched:  # of a connection that was closed without telling
            with suppress(OSError):
                epoll.unregister(descriptor)
        self._watched[descriptor] = gone
        epoll.register(descriptor, _CLOSED)

    def unwatch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """Call ``gone`` no more."""
        if self._epoll is None or self._watched.get(descriptor) != gone:
            return
        del self._watched[descriptor]
        with suppress(OSError):  # the socket is closed already
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Watch nobody any more."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._watched.clear()

    def _begin(self) -> select.epoll:
        epoll = self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(epoll.fileno(), self._look)
        return epoll

    def _look(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            gone = self._watched.pop(descriptor, None)
            with suppress(OSError):
                self._epoll.unregister(descriptor)
            if gone is not None:
                gone()
