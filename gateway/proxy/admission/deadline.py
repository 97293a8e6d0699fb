"""Ends an exchange that takes too long, or in which nothing moves any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from gateway.errors import ErrorKind, GatewayError

_FOR_THE_ANSWER = 5.0
"""Seconds at least in which an answer is made of what came of parts, and the client takes it."""


class Deadline:
    """Gives what runs in its context ``request_timeout`` seconds, and each turn ``idle_timeout``.

    Of the former, ``spent`` seconds are over already. A client's body has to come at
    ``min_body_rate``
    bytes a second on average; ``min_body_rate_grace`` seconds of the time that it takes do not
    count. Knows
    whose turn it is. Raises GatewayError where the time runs out: 408 if it was the client's turn,
    504 if a server's.
    """

    def __init__(
        self,
        idle_timeout: float,
        request_timeout: float,
        spent: float = 0.0,
        min_body_rate: int = 0,
        min_body_rate_grace: float = 0.0,
    ) -> None:
        self._spent = spent
        self._body_rate = min_body_rate
        self._body_grace = min_body_rate_grace
        self._received = 0
        self._receiving = 0.0
        self._idle_time = idle_timeout
        self._total_time = request_timeout
        self._loop = asyncio.get_running_loop()
        self._server: str | None = None
        self._missed = ""
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        """Start the clock for the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelled_before = task.cancelling()
        self._moved = self._loop.time()
        self._end = self._last = self._moved + self._total_time - self._spent
        self._look_again()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the clock."""
        self._timer.cancel()
        # The task may keep the exception that ends it, whose frames hold this.
        task, self._task = self._task, None
        if not self._missed:
            return
        assert task is not None
        left = task.uncancel() > self._cancelled_before
        if isinstance(error, asyncio.CancelledError) and not left:
            raise self.error(self._missed) from None

    def cause(self, error: BaseException | None) -> BaseException | None:
        """Give what is behind an error inside: running out of time looks like being cancelled."""
        if self._missed and isinstance(error, asyncio.CancelledError):
            return self.error(self._missed)
        return error

    def expect_client(self) -> None:
        """Note that something moved, and that it is the client's turn."""
        self._server = None
        self._moved = self._loop.time()

    def received(self, size: int) -> None:
        """Note that so many bytes of the client's body came in its turn.

        Raises GatewayError (408) where they come too slowly.
        """
        self._received += size
        self._receiving += self._loop.time() - self._moved
        late = self._receiving - self._body_grace
        if late > 0 and self._received < late * self._body_rate:
            raise GatewayError(
                ErrorKind.CLIENT_TIMEOUT,
                f"the request's body comes too slowly: {self._received} bytes in "
                f"{self._receiving:.0f} s (limits.min_body_rate: {self._body_rate} bytes a second)",
            )

    def expect_server(self, url: str) -> None:
        """Note that something moved, and that it is the turn of the server at ``url``."""
        self._server = url
        self._moved = self._loop.time()

    @contextmanager
    def suspended_for_parts(self) -> Iterator[None]:
        """Leave the time to tasks that run inside, each of which keeps a ``part`` of its own.

        So what one of them waits for in vain does not end the others. It is the client's turn then,
        for a while also where they took all the time: what the others did is to be told.
        """
        try:
            with self.suspended():
                yield
        finally:
            self._timer.cancel()
            self.expect_client()
            self._last = max(self._end, self._moved + _FOR_THE_ANSWER)
            self._look_again()

    @contextmanager
    def suspended(self) -> Iterator[float]:
        """Leave the time to what runs inside and ends by itself; give the seconds that it has.

        So it can say on its own what it has waited for. Something has moved before and behind it.
        """
        self._timer.cancel()
        now = self._moved = self._loop.time()
        try:
            yield max(0.0, min(self._idle_time, self._end - now))
        finally:
            self._moved = self._loop.time()
            self._look_again()

    def part(self, share: float = 1.0) -> Deadline:
        """Make the deadline of one of several tasks that wait at once: what is left of this one.

        Or a share of it, where something is to come behind them.
        """
        left = self._end - self._loop.time()
        return Deadline(self._idle_time, self._total_time, self._total_time - share * left)

    def error(self, what: str) -> GatewayError:
        """Make the error that tells whom the exchange was waiting for."""
        if self._server is None:
            return GatewayError(ErrorKind.CLIENT_TIMEOUT, f"waiting for the client: {what}")
        return server_timeout(self._server, what)

    def _look(self) -> None:
        """End the exchange if its time is over, or look again when it may be."""
        now = self._loop.time()
        if now >= self._last:
            self._missed = not_done(self._total_time)
        elif now >= self._moved + self._idle_time:
            self._missed = nothing_moved(self._idle_time)
        else:
            self._look_again()
            return
        assert self._task is not None
        self._task.cancel()

    def _look_again(self) -> None:
        """Look when the time may be over."""
        self._timer = self._loop.call_at(min(self._moved + self._idle_time, self._last), self._look)


def server_timeout(url: str, what: str) -> GatewayError:
    """Make the error that tells that an exchange was waiting for the server at ``url``."""
    return GatewayError(ErrorKind.SERVER_TIMEOUT, f"waiting for {url}: {what}")


def nothing_moved(idle_timeout: float) -> str:
    """Say that this time was over."""
    return f"nothing moved for {idle_timeout:g} s (limits.idle_timeout)"


def not_done(request_timeout: float) -> str:
    """Say that this time was over."""
    return f"not done in {request_timeout:g} s (limits.request_timeout)"
