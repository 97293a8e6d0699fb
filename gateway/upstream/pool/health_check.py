"""Active health checks of endpoints."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.routing.endpoint_health import HealthCheckPolicy, record_probe
from gateway.routing.intervals import jittered_intervals
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import Member, MemberTask
from gateway.upstream.pool.reachability import log_level
from gateway.upstream.transport import UpstreamEndpoint

_log = logging.getLogger("tensorgate.upstream")


class HealthChecker(MemberTask):
    """Requests ``path`` every ``interval`` seconds; a 2xx within ``timeout`` is a success.

    ``random`` gives numbers in [0, 1). ``notify`` is called with a member that has become
    unhealthy, or healthy again; it returns True if another worker has told the same before.
    """

    def __init__(
        self,
        path: str,
        interval: float,
        timeout: float,
        policy: HealthCheckPolicy,
        random: Callable[[], float] = random.random,
        notify: Callable[[Member], bool | None] = lambda _: None,
    ) -> None:
        self._path = path
        self._interval = interval
        self._timeout = timeout
        self._policy = policy
        self._random = random
        self._notify = notify

    async def run(self, member: Member, changed: Callable[[], None]) -> None:
        """Check an endpoint until cancelled."""
        for pause in jittered_intervals(self._interval, self._random()):
            result = await self._check(member.endpoint)
            if result is not None:
                success, member.reason = result
                before = member.probed
                member.probed = record_probe(before, success, self._policy)
                if member.probed.healthy is not before.healthy:
                    self._log_change(member, before.healthy)
                    changed()
            await asyncio.sleep(pause)

    async def _check(self, endpoint: UpstreamEndpoint) -> tuple[bool, str] | None:
        """Return success or failure and its reason; None if the gateway itself failed."""
        try:
            async with asyncio.timeout(self._timeout):
                response = await send_control_request(
                    endpoint, "GET", self._path, MAX_PROBE_RESPONSE
                )
        except TimeoutError:
            return False, f"no response to GET {self._path} within {self._timeout:g} s"
        except GatewayError as error:
            strip_tracebacks(error)
            return None if error.kind is ErrorKind.EXHAUSTED else (False, error.message)
        return 200 <= response.status < 300, f"GET {self._path} returned {response.status}"

    def _log_change(self, member: Member, before: bool | None) -> None:
        if member.is_healthy and before is None:
            return
        what = "healthy again" if member.is_healthy else "unhealthy"
        level = log_level(self._notify(member))
        _log.log(level, "%s is %s: %s", member.endpoint.url, what, member.reason)
