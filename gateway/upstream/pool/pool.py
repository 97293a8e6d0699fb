"""The endpoints of one upstream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.model_name import ModelName
from gateway.routing import health
from gateway.routing.balancer import (
    LEAST_REQUEST,
    LoadBalancingPolicy,
    choose_least_request,
    chosen,
)
from gateway.routing.health import EjectionState, OutlierPolicy
from gateway.upstream.pool.lease import Lease, Outcome
from gateway.upstream.pool.member import Member, MemberState
from gateway.upstream.pool.outlier_detection import EjectionListener, OutlierDetector
from gateway.upstream.pool.reachability import Reachability
from gateway.upstream.pool.supervisor import PoolSupervisor
from gateway.upstream.transport import HeaderLines, UpstreamEndpoint

_NEWS = 10.0
"""Seconds for which it counts for other processes that the endpoints are unreachable."""


class Pool:
    """Lends endpoints to exchanges: of those that do not fail, the least busy one first.

    ``clock`` gives seconds. ``keeper`` looks after the endpoints from ``start`` to ``close``.
    ``tell`` is called when what exchanges here meet with changes which endpoints are used; the log
    names the ``upstream``.
    """

    def __init__(
        self,
        endpoints: Sequence[UpstreamEndpoint],
        ejection: OutlierPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        keeper: PoolSupervisor | None = None,
        balance: LoadBalancingPolicy | None = None,
        tell: EjectionListener | None = None,
        upstream: str = "",
    ) -> None:
        self.leases_total = 0
        """Endpoints lent so far."""
        self.balance = balance or LEAST_REQUEST
        self._clock = clock
        self._keeper = keeper or PoolSupervisor()
        self._tell = tell
        self._reachability = Reachability(upstream, self._try_again, self._tell_unreachable)
        doubt = self._keeper.doubt
        policy = ejection or OutlierPolicy()
        self.ejections = OutlierDetector(policy, clock, doubt, self._reachability, tell)
        """What exchanges tell of endpoints, and other processes."""
        self._started = False
        self._leaving: list[Member] = []
        self._change = asyncio.Event()
        self._lend(tuple(Member(endpoint) for endpoint in endpoints))

    def _lend(self, members: tuple[Member, ...]) -> None:
        self.members = members
        self.endpoints = tuple(member.endpoint for member in members)
        self.has_single_endpoint = len(members) == 1
        """There is no other to turn to, so that it does not matter how it does."""
        self.ejections.among(members)
        self._find_up()

    def _find_up(self) -> None:
        up = tuple(member for member in self.members if member.is_up)
        # Where no probe succeeds, an exchange still may: better tried in vain than refused unasked.
        self._up = up or self.members
        self._change.set()
        self._change.clear()

    def _heed(self, member: Member) -> None:
        """Note that the probes of an endpoint say something else than before."""
        if member.probed.healthy:
            # What was ejected failed before: it has come back since.
            self.ejections.note(member, Outcome.SUCCEEDED, "")
        self._find_up()

    @property
    def outstanding(self) -> list[int]:
        """Give the exchanges under way at each endpoint."""
        return [member.outstanding for member in self.members]

    @property
    def is_usable(self) -> bool | None:
        """Tell whether an endpoint is healthy by its probes; None where none are made."""
        if self._keeper.prober is None:
            return None
        return any(member.probed.healthy for member in self.members)

    @property
    def unreachable(self) -> str | None:
        """Tell why calls of late could not connect to any endpoint; None where that is not so."""
        return self._reachability.unreachable

    def _try_again(self) -> None:
        """Have the gateway itself connect to the endpoints until one responds."""
        if self._started:
            self._keeper.run(self._reachability.try_again(lambda: self.members))

    def _tell_unreachable(self, unreachable: bool) -> None:
        if self._tell is not None:
            self._tell("", EjectionState(ejections=int(unreachable), until=self._clock() + _NEWS))

    def record_remote_unreachable(self, until: float) -> None:
        """Note that another process finds all endpoints unreachable, and until when that counts."""
        if until > self._clock():
            self._reachability.hear(until)

    async def probed(self) -> None:
        """Wait until an endpoint is healthy by its probes, or all have been probed."""
        while self.is_usable is False and any(each.probed.healthy is None for each in self.members):
            await self._change.wait()

    def endpoint(
        self,
        but: Collection[UpstreamEndpoint] = (),
        model: ModelName | None = None,
        key: str | None = None,
    ) -> Lease:
        """Lend an endpoint for the length of an exchange; it counts once it is taken.

        It has ``model`` ready, if any is known to. One that is none of ``but`` is preferred to one
        that does not fail. Among these, it is chosen as the policy says; ``key`` is the value of
        the policy's header. Raises GatewayError (503) where no endpoint is known.
        """
        if self.has_single_endpoint:
            return Lease(self, self.members[0])
        fitting = self._fitting(model)
        if not fitting:
            raise self._nobody()
        others = [each for each in fitting if each.endpoint not in but] if but else fitting
        now = self._clock()
        usable = [member for member in others if member.health.is_usable(now)]
        allowed = usable or others or fitting
        outstanding = [member.outstanding for member in allowed]
        if self.balance is LEAST_REQUEST:
            return Lease(self, allowed[choose_least_request(outstanding, self.leases_total)])
        names = [member.endpoint.url for member in allowed]
        return Lease(
            self, allowed[chosen(self.balance, names, outstanding, self.leases_total, key)]
        )

    def hash_key_of(self, headers: Mapping[str, str], added: HeaderLines = ()) -> str | None:
        """Give what an endpoint is chosen by: of a request's headers, or of those behind them."""
        header = self.balance.header
        if header is None:
            return None
        behind = (value for name, value in added if name.lower() == header.lower())
        return headers.get(header) or next(behind, None)

    def lease_all(self) -> list[Lease]:
        """Lend each endpoint, those that are left out too, for which that is no trial.

        Raises GatewayError (503) where no endpoint is known.
        """
        if not self.members:
            raise self._nobody()
        return [Lease(self, member, is_trial=False) for member in self.members]

    def has_alternative(
        self, but: Collection[UpstreamEndpoint], model: ModelName | None = None
    ) -> bool:
        """Tell whether an exchange may go to an endpoint that is none of these."""
        return any(member.endpoint not in but for member in self._fitting(model))

    def _fitting(self, model: ModelName | None) -> Sequence[Member]:
        """Give the members that an exchange for a model may go to."""
        if model is None or self._keeper.discovery is None:
            return self._up
        having = (
            self._having(model)
            or [member for member in self.members if member.models is None]
            # These can say that it is the version that they do not have.
            or self._having(ModelName(model.name))
        )
        return [member for member in having if member.is_up] or having or self._up

    def _having(self, model: ModelName) -> list[Member]:
        """Give the members that are known to have a model ready."""
        members = self.members
        return [each for each in members if each.models is not None and each.models.have(model)]

    @property
    def is_dynamic(self) -> bool:
        """Tell whether endpoints may come and go."""
        return self._keeper.resolver is not None

    @property
    def discovers_models(self) -> bool:
        """Tell whether endpoints are asked for the models that they have, as those may differ."""
        return self._keeper.discovery is not None

    @property
    def empty_reason(self) -> str:
        """Tell why no endpoint is known."""
        resolver = self._keeper.resolver
        return resolver.fault if resolver else "the upstream has no endpoint"

    def _nobody(self) -> GatewayError:
        return GatewayError(ErrorKind.UNREACHABLE, self.empty_reason)

    def snapshot(self) -> tuple[MemberState, ...]:
        """Tell how all endpoints do: first those that are lent, then those that leave."""
        now = self._clock()
        leaving = (member for member in self._leaving if member.outstanding)
        return tuple(member.state(now) for member in (*self.members, *leaving))

    def adopt_addresses(self, before: Pool) -> None:
        """Lend, from the start, what a pool that this one replaces found for the same names."""
        resolver, known = self._keeper.resolver, before._keeper.resolver
        if resolver is not None and known is not None:
            resolver.adopt_state(known)
            self._lend(tuple(Member(endpoint) for endpoint in resolver.endpoints))

    async def start(self) -> None:
        """Begin to look after the endpoints; wait for the addresses of names, but not for long."""
        self._started = True
        self._keeper.take_in(self.members, self._heed)
        await self._keeper.look_up(self.set_endpoints)

    def set_endpoints(self, endpoints: Sequence[UpstreamEndpoint]) -> None:
        """Lend these from now on; exchanges at others finish, and then their connections close."""
        before = {member.endpoint: member for member in self.members}
        members = tuple(before.get(each) or Member(each) for each in endpoints)
        new = set(members).difference(self.members)
        gone = set(self.members).difference(members)
        for member in gone:
            member.leaving = True
        self._leaving = [member for member in (*self._leaving, *gone) if member.outstanding]
        self._lend(members)
        self._keeper.let_go(gone)
        self._keeper.take_in(new, self._heed)

    def refresh_models(self) -> None:
        """Have the endpoints asked for their models, which may have changed, at once."""
        if self._keeper.discovery is not None:
            self._keeper.discovery.refresh_models()

    def adopt_state(self, before: Pool) -> None:
        """Know of endpoints what a pool that this one replaces knows of those at the same URLs."""
        known = {member.endpoint.url: member for member in before.members}
        for member in self.members:
            if (same := known.get(member.endpoint.url)) is not None:
                # Exchanges that are under way there, as the one of a trial, tell that pool alone.
                member.health = health.left(same.health)
                member.calls = same.calls
                # What it was not asked before, it may have been asked here meanwhile.
                if self._keeper.prober is not None and same.probed.healthy is not None:
                    member.probed, member.reason = same.probed, same.reason
                if self._keeper.discovery is not None:
                    member.models = same.models
                member.finding = member.finding or same.finding
        if self._keeper.dialect_detector is not None:
            self._keeper.dialect_detector.look()
        self._lend(self.members)

    async def close(self) -> None:
        """Look after the endpoints no more, and close the connections that no exchange uses."""
        self._started = False
        await self._keeper.close()
        for member in (*self.members, *self._leaving):
            await member.endpoint.close()
