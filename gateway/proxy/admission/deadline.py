"""Time limits of one call: the request timeout, the idle timeout and the minimum body rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, Self

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.system.sockets.body_stream import RelaySteps

_TIME_FOR_RESPONSE = 5.0
"""Seconds at least to make a response of what the parts brought, and for the client to read it."""

_clock: Final = time.perf_counter


class BodyReader(Protocol):
    """Whatever a client's body is read from."""

    async def read(self) -> bytes | memoryview:
        """Return the next piece, empty at the end."""

    async def relay(self, steps: RelaySteps) -> bytes | memoryview:
        """Let each piece pass these steps as it arrives; return the first one that is refused."""


class Deadline:
    """Cancels the task inside its context when a call takes too long, and names who was late.

    A call has ``request_timeout`` seconds, of which ``spent`` are over already. It fails earlier if
    nothing moves for ``idle_timeout`` seconds. A client's body must arrive at ``min_body_rate``
    bytes a second on average; the first ``min_body_rate_grace`` seconds of waiting do not count.

    The deadline knows which side is expected to move next. It raises GatewayError: 408 if that is
    the client, 504 if it is a server. If ``request_timeout`` ``is_of_client``, which has set it for
    itself, it is 504 as well, and says nothing about the server.
    """

    def __init__(
        self,
        idle_timeout: float,
        request_timeout: float,
        spent: float = 0.0,
        min_body_rate: int = 0,
        min_body_rate_grace: float = 0.0,
        is_of_client: bool = False,
    ) -> None:
        self._is_of_client = is_of_client
        self._passed_of_client = False
        self._spent = spent
        self._created = _clock()
        self.client_seconds = 0.0
        """Seconds that the call has waited for the client's body."""
        self._min_body_rate = min_body_rate
        self._min_body_rate_grace = min_body_rate_grace
        self.received_bytes = 0
        """Bytes of the client's body."""
        self._receiving_seconds = 0.0
        self._receives_since = 0.0
        self._idle_timeout = idle_timeout
        self._request_timeout = request_timeout
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._server: ServerName | None = None
        self._expired = ""
        self._ending: GatewayError | None = None
        self._task: asyncio.Task[object] | None = None

    @property
    def busy_seconds(self) -> float:
        """Return the seconds since the start of the call in which it did not wait for the body."""
        return _clock() - self._created - self.client_seconds

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the call must be done."""
        return max(0.0, self._end - self._now())

    def __enter__(self) -> Self:
        """Start the clock for the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelled_before = task.cancelling()
        self._last_progress = self._now()
        self._end = self._hard_end = self._last_progress + self._request_timeout - self._spent
        self._start_timer()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Stop the clock."""
        self._timer.cancel()
        # The task may keep the exception that ends it, whose frames hold this.
        task, self._task = self._task, None
        if not self._expired:
            return
        assert task is not None
        client_left = task.uncancel() > self._cancelled_before
        if isinstance(error, asyncio.CancelledError) and not client_left:
            raise self.timeout_error(self._expired) from None

    def translate(self, error: BaseException | None) -> BaseException | None:
        """Return the timeout error behind a cancellation by this deadline, or the error itself."""
        if self._expired and isinstance(error, asyncio.CancelledError):
            return self.timeout_error(self._expired)
        return error

    def end(self, error: GatewayError) -> None:
        """End the call with an error that has nothing to do with its time."""
        if self._task is not None and not self._expired:
            self._timer.cancel()
            self._expired, self._ending = error.message, error
            self._task.cancel()

    def expect_client(self) -> None:
        """Record progress; from now on the client is expected to move."""
        self._server = None
        self._last_progress = self._now()

    async def receive(self, body: BodyReader) -> bytes | memoryview:
        """Read the next piece of the client's body, with the client expected.

        Raises GatewayError (408) if the body arrives too slowly.
        """
        self._begin_receive()
        piece = await body.read()
        self._end_receive(piece)
        return piece

    async def relay(self, body: BodyReader, steps: RelaySteps) -> bytes | memoryview:
        """Let the pieces of the client's body pass these steps; see ``BodyStream.relay``.

        Raises GatewayError as ``receive``.
        """
        self._begin_receive()
        # A step may expect the server, which ends the wait that is counted.
        refused = await body.relay((self._end_receive, *steps, self._begin_receive))
        if not refused:
            self._count_wait()  # what ended it is still to be received
        return refused

    def _begin_receive(self, piece: bytes | memoryview = b"") -> None:
        self.expect_client()
        self._receives_since = _clock()  # that of uvloop counts whole milliseconds

    def _end_receive(self, piece: bytes | memoryview) -> None:
        self.count_received(len(piece))

    def _count_wait(self) -> None:
        self.client_seconds += _clock() - self._receives_since
        self._receiving_seconds += self._now() - self._last_progress

    def count_received(self, size: int) -> None:
        """Count bytes of the client's body.

        Raises GatewayError (408) if the body arrives more slowly than the minimum rate.
        """
        self.received_bytes += size
        self._count_wait()
        counted = self._receiving_seconds - self._min_body_rate_grace
        if counted > 0 and self.received_bytes < counted * self._min_body_rate:
            raise GatewayError(
                ErrorKind.CLIENT_TIMEOUT,
                f"the request's body comes too slowly: {self.received_bytes} bytes in "
                f"{self._receiving_seconds:.0f} s "
                f"(limits.min_body_rate: {self._min_body_rate} bytes a second)",
            )

    def expect_server(self, server: ServerName) -> None:
        """Record progress; from now on the server is expected to move."""
        self._server = server
        self._last_progress = self._now()

    @contextmanager
    def suspended_for_parts(self) -> Iterator[None]:
        """Pause while tasks run inside that have a ``part`` of this deadline each.

        A part that times out does not end the others. Afterwards the client is expected, with a few
        seconds at least: the client must learn what the other servers did.
        """
        try:
            with self.suspended():
                yield
        finally:
            self._timer.cancel()
            self.expect_client()
            self._hard_end = max(self._end, self._last_progress + _TIME_FOR_RESPONSE)
            self._start_timer()

    @contextmanager
    def suspended(self) -> Iterator[float]:
        """Pause for something with a time limit of its own; yield the seconds that it may take.

        What runs inside raises its own error for its own wait.
        """
        self._timer.cancel()
        now = self._last_progress = self._now()
        try:
            yield max(0.0, min(self._idle_timeout, self._end - now))
        finally:
            self._last_progress = self._now()
            self._start_timer()

    def part(self, share: float = 1.0) -> Deadline:
        """Return a deadline for one of several parallel tasks, with the time left or a share."""
        left = self._end - self._now()
        return Deadline(
            self._idle_timeout, self._request_timeout, self._request_timeout - share * left
        )

    def timeout_error(self, expired: str) -> GatewayError:
        """Return the error that names the side that the call was waiting for."""
        if self._ending is not None:
            return self._ending
        if self._passed_of_client:
            return client_deadline_error(self._request_timeout, self._server)
        if self._server is None:
            return GatewayError(ErrorKind.CLIENT_TIMEOUT, f"waiting for the client: {expired}")
        return server_timeout(self._server, expired)

    def _check(self) -> None:
        """Cancel the task if its time is over, else check again when it may be."""
        now = self._now()
        if now >= self._hard_end:
            self._expired = request_timeout_text(self._request_timeout)
            self._passed_of_client = self._is_of_client
        elif now >= self._last_progress + self._idle_timeout:
            self._expired = idle_timeout_text(self._idle_timeout)
        else:
            self._start_timer()
            return
        assert self._task is not None
        self._task.cancel()

    def _start_timer(self) -> None:
        due = min(self._last_progress + self._idle_timeout, self._hard_end)
        self._timer = self._loop.call_at(due, self._check)


def client_deadline_error(timeout: float, server: ServerName | None) -> GatewayError:
    """Return the error of a call whose client waits no longer; ``server`` was to move next."""
    waited = "" if server is None else f"waiting for {server.url}: "
    message = f"{waited}the client's deadline of {timeout:g} s is over"
    return GatewayError(ErrorKind.DEADLINE, message, server=server)


def server_timeout(server: ServerName, expired: str) -> GatewayError:
    """Return the error of a call that was waiting for a server."""
    message = f"waiting for {server.url}: {expired}"
    return GatewayError(ErrorKind.SERVER_TIMEOUT, message, server=server)


def idle_timeout_text(idle_timeout: float) -> str:
    """Say that the idle timeout is over."""
    return f"nothing moved for {idle_timeout:g} s (limits.idle_timeout)"


def request_timeout_text(request_timeout: float) -> str:
    """Say that the request timeout is over."""
    return f"not done in {request_timeout:g} s (limits.request_timeout)"
