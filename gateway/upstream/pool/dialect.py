"""How the servers of an upstream speak the protocol: configured, or detected by asking them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from gateway.errors import (
    ErrorKind,
    GatewayError,
    bad_response,
    copy_error,
    strip_tracebacks,
    upstream_name,
)
from gateway.protocol.dialect_detection import DetectedDialect, parse_server_metadata
from gateway.protocol.dialects import Dialect, common_dialect
from gateway.sizes import MAX_SERVER_DOCUMENT
from gateway.upstream.control_client import send_control_request
from gateway.upstream.grpc.choices import InferenceProtocol
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.watch import Watch
from gateway.upstream.transport import UpstreamEndpoint

_SERVER_METADATA = "/v2"

TIMEOUT = 5.0
"""Seconds for the whole response."""

_CERTAIN_FACTOR = 10
"""How many times longer the interval is for a server that has shown what it is."""

# These statuses are temporary: they say nothing about the server.
_TEMPORARY = frozenset((408, 425, 429))

_log = logging.getLogger("tensorgate.upstream")


class DialectState:
    """The dialect of an upstream's servers; ``dialect`` is None while it is unknown."""

    def __init__(self, dialect: Dialect | None, reason: str = "configured") -> None:
        self.dialect = dialect
        self.reason = reason
        """What shows the dialect, or why it is unknown."""

    async def wait_until_known(self) -> None:
        """Wait until the dialect is known."""


@dataclass(eq=False)
class DialectDetector(Watch[Member], DialectState):
    """Detects the dialect of an upstream by asking each endpoint: ``GET /v2``.

    It asks at the start, once woken, and every ``interval`` seconds while a server has not
    shown what it is. It goes on to ask seldom, as a load balancer may put another server there
    without a failure. After an error it asks again after ``retry_delay`` seconds (the first time
    after a part of them: see Watch), then after twice as many each time, up to ``interval``.

    If endpoints differ, the dialect is what all of them understand. A known dialect stays until a
    new response. Workers detect the same at the start: one logs it, the others pass
    ``logs_startup=False`` and log it at DEBUG. The log also says which ``inference_protocol``
    follows from the dialect.
    """

    upstream: str
    interval: float
    retry_delay: float
    logs_startup: bool = True
    inference_protocol: InferenceProtocol = field(default_factory=InferenceProtocol)
    dialect: Dialect | None = field(default=None, init=False)
    reason: str = field(default="dialect detection has not started", init=False)
    _asking: set[Member] = field(default_factory=set)
    _progress: asyncio.Event = field(default_factory=asyncio.Event)
    _error: GatewayError = field(init=False)

    def __post_init__(self) -> None:
        """Fail calls that wait while no endpoint is asked."""
        what = f"the dialect of {upstream_name(self.upstream)} cannot be detected"
        text = f"{what}: no endpoint is being probed"
        self._error = GatewayError(ErrorKind.UNREACHABLE, text)

    @property
    def wake_delay(self) -> float:
        """Return the pause before a server is asked again that may be another one by now.

        A server that fails all the time must not be asked all the time, unless calls wait.
        """
        return 0.0 if self.dialect is None else self.retry_delay

    def add(self, member: Member) -> None:
        """Count an endpoint, whose task starts soon."""
        super().add(member)
        self._asking.add(member)

    def remove(self, member: Member) -> None:
        """Stop counting an endpoint."""
        super().remove(member)
        self._asking.discard(member)
        self.update()
        self._wake_waiters()

    async def probe(self, member: Member) -> float:
        """Bring an endpoint's dialect up to date."""
        self._asking.add(member)
        try:
            detected = member.detected_dialect = await detect_dialect(member.endpoint, TIMEOUT)
        except GatewayError as error:
            self._record_error(member, error)
            pause = member.dialect_delay or self.retry_delay
            member.dialect_delay = min(2 * pause, self.interval)
            return pause
        else:
            self._record_success(member)
            self.update()
            if (lane := member.endpoint.shared_memory) is not None:
                lane.set_supported(detected.lists_shared_memory)
            member.dialect_delay = 0.0
            return (_CERTAIN_FACTOR if detected.certain else 1) * self.interval
        finally:
            self._asking.discard(member)
            self._wake_waiters()

    async def wait_until_known(self) -> None:
        """Wait until the dialect is known; endpoints that pause are asked at once.

        Raises the last endpoint's GatewayError (502, 503, 504) if none tells its dialect.
        """
        if self.dialect is not None:
            return
        for member in self.wakes:
            if member not in self._asking:
                self._asking.add(member)
                self.wake(member)
        while self.dialect is None:
            if not self._asking:
                raise copy_error(self._error)
            await self._progress.wait()

    def update(self) -> None:
        """Compute the dialect from what is known of the endpoints."""
        known = [
            (member.endpoint.url, member.detected_dialect)
            for member in self.wakes
            if member.detected_dialect is not None
        ]
        if not known:
            return
        dialect = common_dialect([detected.dialect for _, detected in known])
        self.reason, differ = _explain(known)
        if dialect == self.dialect:
            return  # keep the object: caches are keyed by its identity
        before, self.dialect = self.dialect, dialect
        unsure = differ or not all(detected.certain for _, detected in known)
        level = logging.WARNING if unsure else logging.INFO
        if before is None and not self.logs_startup:
            level = logging.DEBUG
        why = "; ".join(filter(None, (self.reason, self.inference_protocol.describe(dialect))))
        _log.log(level, "upstream %s: dialect %s: %s", self.upstream, dialect.name, why)

    def _record_error(self, member: Member, error: GatewayError) -> None:
        self._error = strip_tracebacks(error)
        if self.dialect is not None:
            self._log_loss(member, self.dialect, error)
        elif error.message != self.reason:
            self.reason = error.message
            level = logging.WARNING if self.logs_startup else logging.DEBUG
            _log.log(level, "upstream %s: dialect unknown: %s", self.upstream, self.reason)

    def _log_loss(self, member: Member, dialect: Dialect, error: GatewayError) -> None:
        """Log once that the only endpoint is lost; health checks and ejections log other losses."""
        is_logged = len(self.wakes) > 1 or member.probed.healthy is not None
        if member.detected_dialect is None or member.is_dialect_lost or is_logged:
            return
        member.is_dialect_lost = True
        kept = f"keeping dialect {dialect.name}"
        _log.warning("upstream %s: %s; %s", self.upstream, error.message, kept)

    def _record_success(self, member: Member) -> None:
        if member.is_dialect_lost:
            member.is_dialect_lost = False
            _log.info("upstream %s: %s is reachable again", self.upstream, member.endpoint.url)

    def _wake_waiters(self) -> None:
        self._progress.set()
        self._progress.clear()


def _explain(known: list[tuple[str, DetectedDialect]]) -> tuple[str, bool]:
    """Return why the dialect is what it is, and whether endpoints differ in theirs."""
    reasons: dict[Dialect, str] = {}
    for url, detected in known:
        reasons.setdefault(detected.dialect, f"{url} {detected.reason}")
    if len(reasons) == 1:
        return next(iter(reasons.values())), False
    each = "; ".join(f"{dialect.name}: {why}" for dialect, why in reasons.items())
    return f"its endpoints differ, and all of them understand this one ({each})", True


async def detect_dialect(
    endpoint: UpstreamEndpoint, max_seconds: float | None = None
) -> DetectedDialect:
    """Ask a server for its metadata and tell its dialect; raises GatewayError (502, 503, 504)."""
    response = await send_control_request(
        endpoint, _SERVER_METADATA, MAX_SERVER_DOCUMENT, max_seconds
    )
    temporary = response.status >= 500 and response.status != 501
    if temporary or response.status in _TEMPORARY:
        returned = f"returned {response.status} to GET {_SERVER_METADATA}"
        raise bad_response(f"dialect detection failed: {endpoint.url} {returned}", endpoint.name)
    detected = parse_server_metadata(response.status, response.body)
    if endpoint.speaks_grpc:
        detected = replace(detected, dialect=detected.dialect.over_grpc())
    return detected
