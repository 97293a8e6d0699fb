"""Settings → the routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.app.build.limits import SharedLimits
from gateway.app.build.models import declared_models
from gateway.codec.offload import Offloader
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.operations import OPERATION_KINDS, OperationKind
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.dispatch import proxy_call
from gateway.proxy.filters.authentication import KeyGroup
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.proxy.filters.mirror import Mirror
from gateway.proxy.interfaces import Limits, Route, Upstream
from gateway.proxy.router import Rewrite, Router, Rule
from gateway.routing.matcher import Match, Pattern
from gateway.routing.retry import RetryPolicy
from gateway.settings.limits import Limits as CommonLimits
from gateway.settings.routes import Match as MatchSettings
from gateway.settings.routes import Mirror as MirrorSettings
from gateway.settings.routes import RouteLimits
from gateway.settings.schema import Settings


def build_routes(
    settings: Settings,
    upstreams: Mapping[str, Upstream],
    shared: SharedLimits,
    offloader: Offloader | None,
    keys: Mapping[str, KeyGroup],
    forwarding: ForwardedPolicy,
) -> Router:
    """Make the routes to upstreams; ``lender`` converts numbers elsewhere, if there is one."""
    replaced = forwarding.replaced_headers
    turns = ConversionScheduler()  # one for all: there is one event loop
    models = declared_models(settings.models)
    mirrors = _Mirrors(upstreams, shared.copied, offloader, models)
    # A key is meant for the gateway, whichever route it is shown to: a server could do with it what
    # its client can. Authorization may be meant for the server where no key is asked for in it.
    key_headers = {group.header.lower() for group in keys.values() if group.header}
    rules = []
    for declared in settings.routes:
        policies = JsonPolicies(Nonfinite(declared.nonfinite), BytesEncoding(declared.bytes))
        limits = _limits(settings.limits, declared.limits)
        retry = _retry(declared.retry_on)
        rewrite = declared.rewrite
        groups = tuple(keys[name] for name in declared.auth)
        shown_in = {group.header_name.lower() for group in groups}
        rules.append(
            Rule(
                _match(declared.match),
                tuple(
                    Route(
                        upstreams[share.name],
                        policies,
                        limits,
                        offloader,
                        turns,
                        shared.held,
                        retry,
                        # Who waits for an upstream takes no place of the others.
                        _gates(upstreams[share.name].concurrency_limit, shared.concurrency_limit),
                        models,
                    )
                    for share in declared.upstream
                ),
                tuple(share.weight for share in declared.upstream),
                declared.sticky_header,
                Rewrite(rewrite.model, rewrite.version) if rewrite else None,
                _kinds(declared.deny_operations),
                mirrors.make(declared.mirror, policies, limits),
                replaced | key_headers | shown_in,
                groups,
                declared.compression,
            )
        )
    return Router(rules, forwarded=forwarding)


def _gates(*concurrency_limits: ConcurrencyLimit | None) -> tuple[ConcurrencyLimit, ...]:
    return tuple(
        concurrency_limit
        for concurrency_limit in concurrency_limits
        if concurrency_limit is not None
    )


class _Mirrors:
    """Makes the mirrors of all routes: what they share is not what clients' exchanges share."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        held: MemoryBudget,
        offloader: Offloader | None,
        models: Mapping[str, DeclaredModel],
    ) -> None:
        self._upstreams = upstreams
        self._lender = offloader
        self._models = models
        self._turns = ConversionScheduler()
        self._held = held

    def make(
        self, declared: MirrorSettings | None, policies: JsonPolicies, limits: Limits
    ) -> Mirror | None:
        """Make the mirror of a route that has one."""
        if declared is None:
            return None
        upstream = self._upstreams[declared.upstream]
        route = Route(
            upstream,
            policies,
            limits,
            self._lender,
            self._turns,
            self._held,
            concurrency_limits=_gates(
                upstream.concurrency_limit
            ),  # of the gateway's own places it takes none away
            declared_models=self._models,
        )
        return Mirror(
            route, declared.percent / 100, proxy_call, max_concurrent=declared.max_concurrent
        )


def _match(declared: MatchSettings) -> Match:
    return Match(
        Pattern.of(declared.model) if declared.model else None,
        Pattern.of(declared.version) if declared.version else None,
        tuple((name, Pattern.of(value)) for name, value in declared.headers.items()),
        _kinds(declared.operations) if declared.operations else None,
    )


def _retry(declared: Iterable[str | int]) -> RetryPolicy:
    statuses = frozenset(each for each in declared if isinstance(each, int))
    return RetryPolicy("unanswered" in declared, statuses)


def _kinds(words: Iterable[str]) -> frozenset[OperationKind]:
    return frozenset(kind for word in words for kind in OPERATION_KINDS[word])


def _limits(common: CommonLimits, own: RouteLimits) -> Limits:
    """Give a route's limits: its own, and where it says nothing, those of all."""
    said = own.model_dump(exclude_none=True)
    return Limits(
        **{name: said.get(name, getattr(common, name)) for name in type(own).model_fields}
    )
