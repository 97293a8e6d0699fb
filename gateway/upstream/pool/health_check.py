"""Active health checks of endpoints."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.routing.endpoint_health import HealthCheckPolicy, record_probe
from gateway.routing.intervals import jittered_intervals
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.outlier_detection import log_level
from gateway.upstream.transport import UpstreamEndpoint

_log = logging.getLogger("tensorgate.upstream")


@dataclass(eq=False)
class HealthChecker:
    """Requests ``path`` every ``interval`` seconds; a 2xx within ``timeout`` is a success.

    ``random`` gives numbers in [0, 1). ``notify`` is called with a member that has become
    unhealthy, or healthy again; it returns True if another worker has told the same before.
    """

    path: str
    interval: float
    timeout: float
    policy: HealthCheckPolicy
    random: Callable[[], float] = random.random
    notify: Callable[[Member], bool | None] = lambda _: None

    async def run(self, member: Member, changed: Callable[[], None]) -> None:
        """Check an endpoint until cancelled."""
        for pause in jittered_intervals(self.interval, self.random()):
            result = await self._check(member.endpoint)
            if result is not None:
                success, member.reason = result
                before = member.probed
                member.probed = record_probe(before, success, self.policy)
                if member.probed.healthy is not before.healthy:
                    self._log_change(member, before.healthy)
                    changed()
            await asyncio.sleep(pause)

    async def _check(self, endpoint: UpstreamEndpoint) -> tuple[bool, str] | None:
        """Return success or failure and its reason; None if the gateway itself failed."""
        try:
            async with asyncio.timeout(self.timeout):
                response = await send_control_request(
                    endpoint, "GET", self.path, MAX_PROBE_RESPONSE
                )
        except TimeoutError:
            return False, f"no response to GET {self.path} within {self.timeout:g} s"
        except GatewayError as error:
            strip_tracebacks(error)
            return None if error.kind is ErrorKind.EXHAUSTED else (False, error.message)
        return 200 <= response.status < 300, f"GET {self.path} returned {response.status}"

    def _log_change(self, member: Member, before: bool | None) -> None:
        if member.is_healthy and before is None:
            return
        what = "healthy again" if member.is_healthy else "unhealthy"
        level = log_level(self.notify(member))
        _log.log(level, "%s is %s: %s", member.endpoint.url, what, member.reason)
