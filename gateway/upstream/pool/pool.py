"""The pool of an upstream's endpoints: it leases one to each call, which reports its outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from gateway.errors import ErrorKind, GatewayError, describe_error, escape_for_log, upstream_name
from gateway.protocol.operations import ModelName
from gateway.routing import endpoint_health
from gateway.routing.balancer import (
    LEAST_REQUEST,
    LoadBalancingPolicy,
    choose_endpoint,
    choose_least_request,
)
from gateway.routing.endpoint_health import OutlierPolicy
from gateway.routing.endpoint_state import NO_CALLS, RecentCalls, State
from gateway.routing.latency_outliers import Latencies, find_outliers
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.checks import PoolSupervisor, may_have_model
from gateway.upstream.pool.member import Member, MemberState, Outcome
from gateway.upstream.pool.outlier_detection import (
    EjectionListener,
    FailureListener,
    OutlierDetector,
    ignore,
)
from gateway.upstream.transport import FIRST_ERROR_STATUS, HeaderLines, UpstreamEndpoint

_LOGGED_STATES: Final = (State.UNREACHABLE, State.FAILING, State.SLOW)
"""Others are logged where they begin."""

_FAILURES: Final = {
    ErrorKind.UNREACHABLE: Outcome.UNREACHABLE,
    ErrorKind.SERVER_TIMEOUT: Outcome.TIMED_OUT,
    ErrorKind.NO_RESPONSE: Outcome.NO_RESPONSE,
    ErrorKind.BAD_RESPONSE: Outcome.BAD_RESPONSE,
    ErrorKind.NOT_ONE_MESSAGE: Outcome.BAD_RESPONSE,
}
"""What each error that is an upstream's failure says about the endpoint."""
_SERVER_ERROR, _NOT_IMPLEMENTED = 500, 501
"""The first status of a failed call; the policy decides whether the endpoint failed too.

With 501, and UNIMPLEMENTED of gRPC, the client has asked for something that the server never does.
"""

_log = logging.getLogger("tensorgate.upstream")


class Lease:
    """The right to use an endpoint for one call, and to report how that went.

    Call ``acquire``, and then ``release`` or ``finish``.
    """

    def __init__(self, pool: Pool, member: Member, is_trial: bool = True) -> None:
        self._pool = pool
        self._member = member
        self._is_trial = is_trial
        self._began_in_use = False
        self._server_error = 0
        self._server_said = ""
        self.endpoint = member.endpoint

    def acquire(self) -> UpstreamEndpoint:
        """Count the call as in flight and return the endpoint."""
        pool, member = self._pool, self._member
        self._began_in_use = not member.ejection.ejections
        if self._is_trial and not self._began_in_use:
            pool.outlier_detector.start_trial(member)
        pool.leases_total += 1
        member.outstanding += 1
        return self.endpoint

    async def may_have_model(self, model: str) -> bool:
        """Ask the endpoint whether a model is ready there, if endpoints may differ."""
        return not self._pool.discovers_models or await may_have_model(self.endpoint, model)

    def release(self, outcome: Outcome, why: str = "") -> None:
        """Report the outcome; ``why`` is the error of a failure."""
        member, pool = self._member, self._pool
        member.outstanding -= 1
        if outcome is Outcome.TIMED_OUT:
            self.endpoint.after_timeout()
        # The fast path: a success of the only endpoint changes nothing.
        if (
            outcome is not Outcome.SUCCEEDED
            or self._server_error
            or not pool.has_single_endpoint
            or member.calls.failures
        ):
            try:
                if not outcome.is_failure and self._server_error:
                    why = self._server_said
                pool.outlier_detector.record(
                    member, outcome, why, self._server_error, self._began_in_use
                )
            except Exception:
                # What else the call holds must be released, too.
                _log.exception("the outcome of a call at %s was not recorded", member.endpoint.url)

    def classify_status(self, status: int, error: str = "") -> tuple[Outcome, str]:
        """Return what a response's status says about the endpoint, and the error if it failed.

        The lease also counts any 5xx but 501 as a failed call. ``error`` is what the server says;
        see UpstreamResponse.
        """
        if status < FIRST_ERROR_STATUS:
            return Outcome.SUCCEEDED, ""
        said = f"it returned {error or status}"
        if status >= _SERVER_ERROR and status != _NOT_IMPLEMENTED:
            self._server_error, self._server_said = status, said
        if status in self._pool.outlier_detector.policy.failure_statuses:
            return Outcome.FAILED, said
        return Outcome.SUCCEEDED, ""

    def classify_retried(self, status: int, error: str = "") -> tuple[Outcome, str]:
        """Return a failure for a status that the call retries on another endpoint."""
        self.classify_status(status, error)
        return Outcome.FAILED, f"it returned {error or status}"

    def classify_error(self, error: BaseException | None) -> tuple[Outcome, str]:
        """Return what a call's error says about the endpoint, and its text; None is a success."""
        if isinstance(error, UpstreamResponseError):
            self.classify_status(error.status, describe_error(error.status, error.message))
        return outcome_of(error)

    def finish(self, error: BaseException | None) -> None:
        """Release the endpoint with the outcome that an error stands for; None is a success."""
        self.release(*self.classify_error(error))


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """Return what a call's error says about the endpoint, and its text; None is a success."""
    if error is None:
        return Outcome.SUCCEEDED, ""
    if not isinstance(error, GatewayError) or not error.kind.value.upstream_failed:
        return Outcome.UNKNOWN, str(error)
    return _FAILURES[error.kind], str(error)


class Pool:
    """Leases endpoints to calls: of those that do not fail, the least busy one first.

    ``clock`` gives seconds. ``supervisor`` checks the endpoints from ``start`` to ``close``.
    ``notify`` is called with ejections and recoveries that calls here cause, ``on_failure`` with
    each failed call. The log names the ``upstream``. ``exposes_endpoints`` tells whether clients
    may learn the addresses.
    """

    def __init__(
        self,
        endpoints: Sequence[UpstreamEndpoint],
        outlier_policy: OutlierPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        supervisor: PoolSupervisor | None = None,
        load_balancing: LoadBalancingPolicy | None = None,
        notify: EjectionListener = ignore,
        upstream: str = "",
        on_failure: FailureListener = ignore,
        exposes_endpoints: bool = False,
    ) -> None:
        self._upstream = upstream
        self.exposes_endpoints = exposes_endpoints
        self.leases_total = 0
        """Leases acquired so far."""
        self.load_balancing = load_balancing or LEAST_REQUEST
        self._clock = clock
        self._supervisor = supervisor or PoolSupervisor()
        if self._supervisor.health_checker is not None:
            self._supervisor.health_checker.on_change = self._on_health_change
        self.outlier_detector = OutlierDetector(
            upstream,
            outlier_policy or OutlierPolicy(),
            clock,
            self._supervisor,
            notify,
            on_failure,
        )
        self._leaving: list[Member] = []
        self._drained: frozenset[str] = frozenset()
        self._health_changed = asyncio.Event()
        self._set_members(tuple(Member(endpoint) for endpoint in endpoints))

    def _set_members(self, members: tuple[Member, ...]) -> None:
        self.members = members
        self.endpoints = tuple(member.endpoint for member in members)
        self.outlier_detector.set_members(members)
        for member in members:
            member.drained = member.endpoint.url in self._drained
        self._find_up()

    def set_drained(self, urls: Collection[str]) -> None:
        """Give no new calls to endpoints with these URLs, and calls to all others again."""
        if self._drained != urls:
            self._drained = frozenset(urls)
            self._set_members(self.members)

    def _find_up(self) -> None:
        self._in_use = tuple(member for member in self.members if not member.drained)
        self.has_single_endpoint = len(self.members) == len(self._in_use) == 1
        """There is no alternative, so its health does not matter."""
        up = tuple(member for member in self._in_use if member.is_healthy)
        # If every health check fails, a call may still succeed: trying beats refusing.
        self._up = up or self._in_use
        self._health_changed.set()
        self._health_changed.clear()

    def _on_health_change(self, member: Member) -> None:
        self._supervisor.recheck(member)
        if member.probed.healthy:
            # The failures behind an ejection are older than this success.
            self.outlier_detector.record(member, Outcome.SUCCEEDED, "")
        self._find_up()

    @property
    def outstanding(self) -> list[int]:
        """Return the calls in flight at each endpoint."""
        return [member.outstanding for member in self.members]

    @property
    def any_healthy(self) -> bool | None:
        """Tell whether health checks find an endpoint healthy; None without health checks."""
        if self._supervisor.health_checker is None:
            return None
        return any(member.probed.healthy for member in self.members)

    @property
    def unreachable(self) -> str | None:
        """Return why recent calls could not connect to any endpoint; None if they could."""
        return self.outlier_detector.unreachable

    async def wait_until_probed(self) -> None:
        """Wait until health checks find an endpoint healthy, or have checked each once."""
        while self.any_healthy is False and any(
            member.probed.healthy is None for member in self.members
        ):
            await self._health_changed.wait()

    def lease(
        self,
        exclude: Collection[UpstreamEndpoint] = (),
        model: ModelName | None = None,
        hash_key: str | None = None,
    ) -> Lease:
        """Choose an endpoint for a call.

        The endpoint has ``model`` ready if any is known to. It prefers endpoints outside
        ``exclude``, then healthy ones, then those that are not ejected. Among these the load
        balancing policy chooses; ``hash_key`` is the value of its header. Raises GatewayError (503)
        without endpoints.
        """
        if self.has_single_endpoint:
            return Lease(self, self.members[0])
        others = self._others(exclude, model) or self._candidates(model)
        if not others:
            raise self._empty_error()
        now = self._clock()
        usable = [member for member in others if member.ejection.is_usable(now)]
        allowed = usable or others
        outstanding = [member.outstanding for member in allowed]
        counter = self.leases_total
        if self.load_balancing is LEAST_REQUEST:
            return Lease(self, allowed[choose_least_request(outstanding, counter)])
        names = [member.endpoint.url for member in allowed]
        chosen = choose_endpoint(self.load_balancing, names, outstanding, counter, hash_key)
        return Lease(self, allowed[chosen])

    def hash_key_of(self, headers: Mapping[str, str], added: HeaderLines = ()) -> str | None:
        """Return the value of the policy's hash header, from ``headers`` or else from ``added``."""
        header = self.load_balancing.hash_header
        if header is None:
            return None
        values = (value for name, value in added if name.lower() == header.lower())
        return headers.get(header) or next(values, None)

    def lease_all(self) -> list[Lease]:
        """Lease every endpoint, also ejected ones; that starts no trial.

        Raises GatewayError (503) without endpoints.
        """
        if not self.members:
            raise self._empty_error()
        return [Lease(self, member, is_trial=False) for member in self.members]

    def has_alternative(
        self, exclude: Collection[UpstreamEndpoint], model: ModelName | None = None
    ) -> bool:
        """Tell whether a call may go to an endpoint outside ``exclude``."""
        return bool(self._others(exclude, model))

    def _others(
        self, exclude: Collection[UpstreamEndpoint], model: ModelName | None
    ) -> Sequence[Member]:
        """Return the members outside ``exclude`` to which a call for a model may go.

        If no healthy one is left, they are the unhealthy ones: health checks may not have found yet
        that one of them works again.
        """
        candidates = self._candidates(model)
        if not exclude:
            return candidates
        others = [member for member in candidates if member.endpoint not in exclude]
        return others or [
            member
            for member in self._in_use
            if member.endpoint not in exclude and self._may_have(member, model)
        ]

    def _may_have(self, member: Member, model: ModelName | None) -> bool:
        """Tell whether a member may have a model ready, as far as is known."""
        if model is None or self._supervisor.model_discovery is None or member.models is None:
            return True
        return member.models.includes(model)

    def _candidates(self, model: ModelName | None) -> Sequence[Member]:
        """Return the members to which a call for a model may go."""
        if model is None or self._supervisor.model_discovery is None:
            return self._up
        candidates = (
            self._with_model(model)
            or [member for member in self._in_use if member.models is None]
            # These can respond that they lack only the version.
            or self._with_model(ModelName(model.name))
        )
        return [member for member in candidates if member.is_healthy] or candidates or self._up

    def _with_model(self, model: ModelName) -> list[Member]:
        members = self._in_use
        return [each for each in members if each.models is not None and each.models.includes(model)]

    @property
    def is_dynamic(self) -> bool:
        """Tell whether endpoints may come and go."""
        return self._supervisor.resolver is not None

    @property
    def discovers_models(self) -> bool:
        """Tell whether endpoints are asked for their models, as those may differ."""
        return self._supervisor.model_discovery is not None

    @property
    def is_drained(self) -> bool:
        """Tell whether there are endpoints, and all are drained."""
        return bool(self.members) and not self._in_use

    @property
    def empty_reason(self) -> str:
        """Return why the pool has no endpoint for calls."""
        if self.is_drained:
            return "an operator has drained all endpoints of the upstream"
        resolver = self._supervisor.resolver
        return resolver.error if resolver else "the upstream has no endpoint"

    def _empty_error(self) -> GatewayError:
        public = None
        if self.is_dynamic and not self.exposes_endpoints and not self.is_drained:
            public = f"cannot connect to {upstream_name(self._upstream)}: no address of it is known"
        return GatewayError(ErrorKind.UNREACHABLE, self.empty_reason, public_message=public)

    def judge(
        self, recent: Mapping[str, RecentCalls], latencies: Mapping[str, Latencies], leads: bool
    ) -> None:
        """Find the states of the endpoints by what calls have said of them lately, by their URLs.

        The worker that ``leads`` logs the states, and ejects slow endpoints if the policy says so.
        """
        now = self._clock()
        for member in self.members:
            member.recent = recent.get(member.endpoint.url, NO_CALLS)
            member.find_state(now)
        slow = {
            member.endpoint.url: member.outlier.model
            for member in self.members
            if member.outlier is not None
        }
        # When an endpoint drops out, the others get its load: they are not slow beside it.
        in_use = {
            member.endpoint.url: latencies[member.endpoint.url]
            for member in self.members
            if member.current in (State.IN_USE, State.SLOW) and member.endpoint.url in latencies
        }
        outliers = find_outliers(in_use, slow, len(self.members) == 1)
        for member in self.members:
            member.outlier = outliers.get(member.endpoint.url)
            if leads:
                self.outlier_detector.eject_slow(member)
        for member in self.members:
            sentence = member.find_state(now)
            if leads and member.logged is not member.current:
                self._log_state(member, sentence)

    def _log_state(self, member: Member, sentence: str) -> None:
        url, before, state = member.endpoint.url, member.logged, member.current
        if state in (State.UNREACHABLE, State.FAILING) and self.unreachable is not None:
            # The log has said it of the upstream. A worker that replaces a dead one has it from
            # the others, and of the endpoint it knows only that all of its calls fail.
            return
        member.logged = state
        if state in _LOGGED_STATES:
            said = escape_for_log(sentence)
            _log.warning("%s of upstream %s is %s: %s", url, self._upstream, state.value, said)
        elif before in _LOGGED_STATES and state is State.IN_USE:
            _log.warning("%s of upstream %s is not %s any more", url, self._upstream, before.value)

    def snapshot(self) -> tuple[MemberState, ...]:
        """Describe all endpoints: first those in use, then those that leave."""
        now = self._clock()
        leaving = (member for member in self._leaving if member.outstanding)
        return tuple(member.state(now) for member in (*self.members, *leaving))

    def adopt_addresses(self, before: Pool) -> None:
        """Start with the addresses that the pool this one replaces found for the same names."""
        resolver, known = self._supervisor.resolver, before._supervisor.resolver
        if resolver is not None and known is not None:
            resolver.adopt_state(known)
            self._set_members(tuple(Member(endpoint) for endpoint in resolver.endpoints))

    async def start(self) -> None:
        """Start to check the endpoints; wait a moment for the addresses of names."""
        self._supervisor.is_running = True
        self._supervisor.add(self.members)
        await self._supervisor.resolve_names(self.set_endpoints)
        self._start_shared_memory()

    def _start_shared_memory(self) -> None:
        for endpoint in self.endpoints:
            if endpoint.shared_memory is not None:
                endpoint.shared_memory.start()

    def set_endpoints(self, endpoints: Sequence[UpstreamEndpoint]) -> None:
        """Replace the endpoints; those that leave finish their calls and then disconnect."""
        before = {member.endpoint: member for member in self.members}
        members = tuple(before.get(each) or Member(each) for each in endpoints)
        new = set(members).difference(self.members)
        gone = set(self.members).difference(members)
        for member in gone:
            member.leaving = True
        self._leaving = [member for member in (*self._leaving, *gone) if member.outstanding]
        self._set_members(members)
        self._supervisor.remove(gone)
        self._supervisor.add(new)
        self._start_shared_memory()

    def refresh_models(self) -> None:
        """Ask the endpoints for their models at once, as those may have changed."""
        if self._supervisor.model_discovery is not None:
            self._supervisor.model_discovery.refresh_models()

    def adopt_state(self, before: Pool) -> None:
        """Take over what the pool this one replaces knows about endpoints at the same URLs."""
        known = {member.endpoint.url: member for member in before.members}
        for member in self.members:
            if (same := known.get(member.endpoint.url)) is not None:
                # A trial in flight reports to the old pool: here the endpoint is not on trial.
                member.ejection = endpoint_health.record_inconclusive(same.ejection)
                member.calls = same.calls
                member.recent, member.outlier = same.recent, same.outlier
                member.current, member.since = same.current, same.since
                member.recovered_at, member.slow_until = same.recovered_at, same.slow_until
                member.logged, member.ejection_reason = same.logged, same.ejection_reason
                # Without an old result, keep what a first check here may have found meanwhile.
                if self._supervisor.health_checker is not None and same.probed.healthy is not None:
                    member.probed, member.reason = same.probed, same.reason
                if self._supervisor.model_discovery is not None:
                    member.models = same.models
                member.detected_dialect = member.detected_dialect or same.detected_dialect
        if self._supervisor.dialect_detector is not None:
            self._supervisor.dialect_detector.update()
        self._set_members(self.members)

    async def close(self) -> None:
        """Stop all checks and close the idle connections."""
        await self._supervisor.close()
        for member in (*self.members, *self._leaving):
            await member.endpoint.close()
