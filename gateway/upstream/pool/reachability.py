"""Finds upstreams to which no call can connect, and probes them until one endpoint responds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import Member

_THRESHOLD = 3
"""Connect failures in a row that make the upstream unreachable."""

_PROBE_INTERVAL = 1.0
_PROBE_TIMEOUT = 2.0

_PATH = "/v2/health/ready"
"""Any response to it will do."""

_log = logging.getLogger("tensorgate.upstream")


def log_level(is_known: bool | None) -> int:
    """Choose the level of an event, which has one line in the log over all workers.

    ``is_known`` tells that another worker has found it before; see EjectionListener.
    """
    return logging.DEBUG if is_known else logging.WARNING


class Reachability:
    """Marks an upstream unreachable after connect failures at all its endpoints.

    It stays so until a call or a probe connects, or the gateway has nothing left to probe it with:
    that is no fault of the upstream's. ``start_probing`` is called when probes have to
    begin. ``notify`` is called with True if calls here find the upstream unreachable, else False;
    see EjectionListener.
    """

    def __init__(
        self,
        upstream: str,
        start_probing: Callable[[], None],
        notify: Callable[[bool], bool | None],
    ) -> None:
        self._upstream = upstream
        self._start_probing = start_probing
        self._notify = notify
        self._last_report = 0.0
        self._is_probing = False
        self.failures = 0
        """Connect failures in a row, at any endpoint."""
        self.unreachable: str | None = None
        """The last error, while the upstream is unreachable."""

    def record_connect_failure(self, members: Sequence[Member], why: str) -> None:
        """Record that a call could not connect to one of an upstream's endpoints."""
        self.failures += 1
        if self.unreachable is not None:
            self.unreachable = why
        elif self.failures >= _THRESHOLD and all(each.calls.connect_failures for each in members):
            message = (
                "upstream %s is not ready: %d calls in a row could not connect; last error: %s"
            )
            self._mark_unreachable(why)
            level = log_level(self._notify(True))
            _log.log(level, message, self._upstream, self.failures, why)

    def record_remote(self, until: float) -> None:
        """Mark the upstream unreachable as another worker reports, and probe it from here.

        ``until`` tells one such report from the next.
        """
        if until != self._last_report and self.unreachable is None:
            _log.debug("upstream %s is not ready, as another worker reports", self._upstream)
            self._mark_unreachable(f"another worker cannot connect to upstream {self._upstream}")
        self._last_report = until

    def record_connect(self, url: str) -> None:
        """Record that a call or a probe connected to an endpoint."""
        self._mark_reachable(f"{url} responds")

    def _mark_reachable(self, why: str) -> None:
        self.failures = 0
        if self.unreachable is not None:
            self.unreachable = None
            level = log_level(self._notify(False))
            _log.log(level, "upstream %s is ready again: %s", self._upstream, why)

    def _mark_unreachable(self, why: str) -> None:
        self.unreachable = why
        if not self._is_probing:
            self._start_probing()

    async def probe_until_reachable(self, members: Callable[[], Sequence[Member]]) -> None:
        """Connect to the endpoints every second until one of them responds.

        A gateway that is not ready gets no calls, so without probes it would stay so.
        """
        self._is_probing = True
        try:
            while self.unreachable is not None:
                await asyncio.sleep(_PROBE_INTERVAL)
                await self._probe_all(members())
        finally:
            self._is_probing = False

    async def _probe_all(self, members: Sequence[Member]) -> None:
        results = await asyncio.gather(*map(_probe, members), return_exceptions=True)
        for result in results:
            if isinstance(result, GatewayError):
                self._mark_reachable(f"it cannot be asked: {result.message}")
            elif isinstance(result, BaseException):
                # A bug of the gateway must be seen, and must not end the probes.
                _log.error("an endpoint could not be probed", exc_info=result)
            elif result is not None:
                result.calls.record_connect()
                self.record_connect(result.endpoint.url)


async def _probe(member: Member) -> Member | GatewayError | None:
    """Return the member if its endpoint responds, whatever the response says; else None.

    If the gateway itself is out of descriptors or ports, return that error.
    """
    for endpoint in member.endpoint.probe_targets:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                await send_control_request(endpoint, "GET", _PATH, MAX_PROBE_RESPONSE)
        except TimeoutError:
            return None
        except GatewayError as error:
            strip_tracebacks(error)
            if error.kind is ErrorKind.EXHAUSTED:
                return error
            if error.kind is ErrorKind.UNREACHABLE:
                return None
    return member
