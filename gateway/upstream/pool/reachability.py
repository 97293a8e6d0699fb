"""Whether calls can connect to any endpoint of an upstream; where none can, it is tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import Member

_ENOUGH = 3
"""Calls in a row that could not connect, from which on the upstream is unreachable."""

_PAUSE = 1.0
"""Seconds between two attempts of the gateway's own."""
_TIME = 2.0
"""Seconds within which an endpoint has to respond to one."""

_PATH = "/v2/health/ready"
"""What is asked for; any response will do."""

_UNCONNECTED = (ErrorKind.UNREACHABLE, ErrorKind.EXHAUSTED)

_log = logging.getLogger("tensorgate.upstream")


class Reachability:
    """Marks an upstream unreachable after connect failures at all its endpoints.

    It stays so until a call or an attempt connects. ``lost`` is called when attempts are to begin,
    ``tell`` with whether calls here have found it unreachable, or reachable again.
    """

    def __init__(
        self, upstream: str, lost: Callable[[], None], tell: Callable[[bool], None]
    ) -> None:
        self._upstream = upstream
        self._lost = lost
        self._tell = tell
        self._heard = 0.0
        self._is_trying = False
        self.failures = 0
        """Calls in a row that could not connect, to whichever endpoint."""
        self.unreachable: str | None = None
        """The last error, while the upstream is unreachable."""

    def failed(self, members: Sequence[Member], why: str) -> None:
        """Note that a call could not connect to one of an upstream's endpoints."""
        self.failures += 1
        if self.unreachable is not None:
            self.unreachable = why
        elif self.failures >= _ENOUGH and all(each.calls.connect_failures for each in members):
            message = "upstream %s is not ready: %d calls in a row could not connect; at last: %s"
            _log.warning(message, self._upstream, self.failures, why)
            self._mark(why)
            self._tell(True)

    def hear(self, until: float) -> None:
        """Note that another worker found it unreachable; attempts of this one find out the rest.

        ``until`` tells one such message from the next.
        """
        if until != self._heard and self.unreachable is None:
            _log.info("upstream %s is not ready, as another worker says", self._upstream)
            self._mark(f"another worker cannot connect to upstream {self._upstream}")
        self._heard = until

    def connected(self, url: str) -> None:
        """Note that an endpoint was connected to."""
        self.failures = 0
        if self.unreachable is not None:
            self.unreachable = None
            _log.warning("upstream %s is ready again: %s responds", self._upstream, url)
            self._tell(False)

    def _mark(self, why: str) -> None:
        self.unreachable = why
        if not self._is_trying:
            self._lost()

    async def try_again(self, members: Callable[[], Sequence[Member]]) -> None:
        """Connect to the endpoints every second until one of them responds.

        So an upstream becomes ready again where clients send nothing, as the gateway is not ready.
        """
        self._is_trying = True
        try:
            while self.unreachable is not None:
                await asyncio.sleep(_PAUSE)
                await self._try_all(members())
        finally:
            self._is_trying = False

    async def _try_all(self, members: Sequence[Member]) -> None:
        found = await asyncio.gather(*map(_responds, members), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                # A fault of our own: never silent, and never the end of the attempts.
                _log.error("an endpoint could not be tried", exc_info=each)
            elif each is not None:
                each.calls.connect_failures = 0
                self.connected(each.endpoint.url)


async def _responds(member: Member) -> Member | None:
    """Give the member if its endpoint responds."""
    try:
        async with asyncio.timeout(_TIME):
            await send_control_request(member.endpoint, "GET", _PATH, MAX_PROBE_RESPONSE)
    except TimeoutError:
        return None
    except GatewayError as error:
        strip_tracebacks(error)
        return None if error.kind in _UNCONNECTED else member
    return member
