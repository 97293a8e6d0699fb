"""One endpoint of a pool: its load, its ejection, its health checks and its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum

from gateway.protocol.dialect_detection import DetectedDialect
from gateway.protocol.operations import ModelName
from gateway.routing.endpoint_state import WORST_FIRST, EndpointRecord, State
from gateway.upstream.transport import UpstreamEndpoint


class Outcome(Enum):
    """What a call says about its endpoint."""

    SUCCEEDED = "succeeded"
    UNKNOWN = "unknown"
    """The call says nothing about the endpoint: the client left, for example."""
    UNREACHABLE = "unreachable"
    """It could not be connected to."""
    TIMED_OUT = "server_timeout"
    NO_RESPONSE = "no_response"
    """It closed the connection before it responded."""
    BAD_RESPONSE = "bad_response"
    """The response was invalid or cut short."""
    FAILED = "status"
    """It responded with a status that counts as a failure."""

    @property
    def is_failure(self) -> bool:
        """Tell whether the endpoint has failed; the value names how."""
        return self is not Outcome.SUCCEEDED and self is not Outcome.UNKNOWN


@dataclass(frozen=True, slots=True)
class ReadyModels:
    """The versions of each ready model; empty for a model whose versions are unknown.

    ``versions`` is None if the endpoint does not say: it may have any model.
    """

    versions: Mapping[str, frozenset[str]] | None
    names: tuple[str, ...] | None = field(init=False)
    """The sorted names of all models; None if unknown."""

    def __post_init__(self) -> None:
        # Once, as each publication of the status takes them.
        names = None if self.versions is None else tuple(sorted(self.versions))
        object.__setattr__(self, "names", names)

    def includes(self, model: ModelName) -> bool:
        """Tell whether a model is ready; without a version, whether any version is."""
        if self.versions is None:
            return True
        versions = self.versions.get(model.name)
        if versions is None:
            return False
        return model.version is None or not versions or model.version in versions


ANY_MODEL = ReadyModels(None)


@dataclass(slots=True, eq=False)
class Member(EndpointRecord):
    """An endpoint of a pool and its current state."""

    endpoint: UpstreamEndpoint
    outstanding: int = 0
    """Calls in flight."""
    models: ReadyModels | None = None
    """The models that are ready there; None if unknown."""
    models_error: str = ""
    """Why it does not say which; empty if it does."""
    detected_dialect: DetectedDialect | None = None
    """None until the server has said what it is, or if it is not asked."""
    dialect_delay: float = 0.0
    """Seconds until it is asked again, if it did not respond when it was asked last."""
    is_dialect_lost: bool = False
    """Whether the log has told that it does not respond any more."""
    logged: State = State.IN_USE
    """The state that the log has told last."""
    slow_until: float = 0.0
    """Until then, its latency is that from before an ejection; in seconds of the pool's clock."""

    def __post_init__(self) -> None:
        """Count calls that the server works on, although their clients are gone."""
        if self.endpoint.drain_counters is not None:
            self.endpoint.drain_counters.append(self)

    def count_call(self) -> None:
        """Count a call in flight; see CallCounter."""
        self.outstanding += 1

    def uncount_call(self) -> None:
        """Count a call in flight no more; see CallCounter."""
        self.outstanding -= 1

    def state(self, now: float) -> MemberState:
        """Describe the endpoint for the admin address."""
        ejected = max(0.0, self.ejection.until - now) if self.ejection.ejections else 0.0
        models = None if self.models is None else self.models.names
        calls = self.calls
        detected = self.detected_dialect
        sentence = self.find_state(now)
        return MemberState(
            self.endpoint.url,
            self.outstanding,
            calls.failures,
            self.ejection.ejections,
            round(ejected, 3),
            self.probed.healthy,
            self.reason,
            models,
            self.leaving,
            calls.last_error if calls.failures_total else None,
            _isoformat(calls.last_error_time) if calls.failures_total else None,
            {"name": detected.dialect.name, "reason": detected.reason} if detected else None,
            next((address.url for address in self.endpoint.addresses[1:]), None),
            self.drained,
            self.current.value,
            sentence,
            _isoformat(self.since),
            str(self.outlier) if self.outlier else None,
            None if (lane := self.endpoint.shared_memory) is None else lane.describe(),
        )


def _isoformat(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


STATES_WORST_FIRST = tuple(state.value for state in WORST_FIRST)
"""The states of endpoints as the admin address shows them. The worst that a worker finds counts."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """An endpoint's state as the admin address shows it."""

    url: str
    requests_in_progress: int
    """Calls in flight."""
    consecutive_failures: int
    """Failed calls in a row: without a complete response, or with a response of 5xx."""
    consecutive_ejections: int
    """In a row; 0 for an endpoint in use."""
    ejection_remaining_seconds: float
    """Seconds that the ejection still lasts; 0 without one, or if a trial may start."""
    healthy: bool | None
    """By health checks; None without them, or before the first."""
    health_check_result: str
    """The result of the last health check."""
    models: tuple[str, ...] | None
    """The models that are ready there; None if the endpoint is not asked, or does not tell."""
    draining: bool
    """It gets no new calls; those in flight finish."""
    last_error: str | None = None
    """Why the last failed call failed."""
    last_error_at: str | None = None
    """When that was: ISO 8601, UTC."""
    dialect: dict[str, str] | None = None
    """The name of its dialect, and the reason; None if it was not detected."""
    grpc_url: str | None = None
    """Its address over gRPC beside that over HTTP; None without one."""
    drained: bool = False
    """An operator has taken it out of use."""
    state: str = State.IN_USE.value
    state_text: str = ""
    """Why it is in that state, in a sentence; empty if all is well."""
    state_since: str | None = None
    """When it came into that state: ISO 8601, UTC."""
    latency_outlier: str | None = None
    """How its latency is an outlier; None if it is not."""
    shared_memory: dict[str, int | str] | None = None
    """See ``SharedMemoryLane.describe``; None if the endpoint need not have any."""
