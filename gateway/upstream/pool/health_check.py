"""Endpoints are asked how they are, every so often."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.routing.health import HealthCheckPolicy, probed
from gateway.routing.intervals import pauses
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import Member, MemberTask
from gateway.upstream.transport import UpstreamEndpoint

_log = logging.getLogger("tensorgate.upstream")


class HealthChecker(MemberTask):
    """Asks for ``path`` every so many seconds; an answer of 2xx within ``time`` is a good one.

    ``random`` gives numbers in [0, 1).
    """

    def __init__(
        self,
        path: str,
        every: float,
        time: float,
        policy: HealthCheckPolicy,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._path = path
        self._every = every
        self._time = time
        self._policy = policy
        self._random = random

    async def attend(self, member: Member, changed: Callable[[], None]) -> None:
        """Probe an endpoint until cancelled."""
        for pause in pauses(self._every, self._random()):
            answer = await self._ask(member.endpoint)
            if answer is not None:
                well, member.reason = answer
                before, member.probed = member.probed, probed(member.probed, well, self._policy)
                if member.probed.healthy is not before.healthy:
                    self._tell(member, before.healthy)
                    changed()
            await asyncio.sleep(pause)

    async def _ask(self, endpoint: UpstreamEndpoint) -> tuple[bool, str] | None:
        """Tell whether the endpoint is well, and what it answered or why it did not.

        None where the gateway itself could not ask.
        """
        try:
            async with asyncio.timeout(self._time):
                answer = await send_control_request(endpoint, "GET", self._path, MAX_PROBE_RESPONSE)
        except TimeoutError:
            return False, f"no answer to GET {self._path} within {self._time:g} s"
        except GatewayError as error:
            strip_tracebacks(error)
            return None if error.kind is ErrorKind.EXHAUSTED else (False, error.message)
        return 200 <= answer.status < 300, f"GET {self._path} answered {answer.status}"

    def _tell(self, member: Member, before: bool | None) -> None:
        url, reason = member.endpoint.url, member.reason
        if not member.is_up:
            _log.warning("%s is unhealthy and is not used: %s", url, reason)
        elif before is not None:
            _log.warning("%s is healthy and is used again: %s", url, reason)
