"""An endpoint of a pool, and all that is known of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gateway.protocol.dialect_detection import DetectedDialect
from gateway.routing.health import NOT_EJECTED, NOT_PROBED, EjectionState, ProbeState
from gateway.upstream.pool.failure_counter import FailureCounter
from gateway.upstream.pool.ready_models import ReadyModels
from gateway.upstream.transport import UpstreamEndpoint


@dataclass(slots=True, eq=False)
class Member:
    """An endpoint of a pool, and how it does."""

    endpoint: UpstreamEndpoint
    outstanding: int = 0
    """Exchanges under way."""
    health: EjectionState = NOT_EJECTED
    """By its exchanges."""
    calls: FailureCounter = field(default_factory=FailureCounter)
    probed: ProbeState = NOT_PROBED
    reason: str = ""
    """What the last probe met with."""
    models: ReadyModels | None = None
    """Those that it has ready; None where that is not known."""
    finding: DetectedDialect | None = None
    """What it was recognised as; None where it is not asked, or was not yet."""
    leaving: bool = False
    """It is given to no more exchanges; those under way finish."""

    @property
    def is_up(self) -> bool:
        """Tell whether its probes, as far as there are any, have nothing against it."""
        return self.probed.healthy is not False

    def state(self, now: float) -> MemberState:
        """Tell how it does."""
        ejected = max(0.0, self.health.until - now) if self.health.ejections else 0.0
        models = None if self.models is None else self.models.names
        calls = self.calls
        at = datetime.fromtimestamp(calls.last_error_time, UTC) if calls.failures_total else None
        return MemberState(
            self.endpoint.url,
            self.outstanding,
            calls.failures,
            self.health.ejections,
            round(ejected, 3),
            self.probed.healthy,
            self.reason,
            models,
            self.leaving,
            calls.failures_total,
            calls.responses_5xx,
            calls.last_error,
            at.isoformat(timespec="milliseconds") if at else None,
        )


@dataclass(frozen=True, slots=True)
class MemberState:
    """How an endpoint does, for those who look at it from outside."""

    url: str
    outstanding: int
    """Exchanges under way."""
    failures: int
    """Calls that failed, in a row: without a whole response, or with one of 5xx."""
    ejections: int
    """In a row; 0 for an endpoint in use."""
    ejected_for: float
    """Seconds for which it is still left out; 0 where it is not, or may be tried again."""
    healthy: bool | None
    """By its probes; None where there are none, or before the first of them."""
    reason: str
    """What the last probe met with."""
    models: tuple[str, ...] | None
    """Those that it has ready; None where it is not asked, or does not tell."""
    leaving: bool
    """It is given to no more exchanges; those under way finish."""
    failures_total: int = 0
    """Calls that failed."""
    responses_5xx: int = 0
    """Responses of the server itself of 5xx, which are among those."""
    last_error: str | None = None
    """Why the last of them failed."""
    last_error_at: str | None = None
    """When that was, in the form of ISO 8601, UTC."""


class MemberTask(ABC):
    """Looks after the members of a pool, one by one."""

    @abstractmethod
    async def attend(self, member: Member, changed: Callable[[], None]) -> None:
        """Look after a member until cancelled; ``changed`` is called when it is up, or not."""
