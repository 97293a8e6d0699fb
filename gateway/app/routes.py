"""Settings → the routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.app.forwarding import forwarding
from gateway.codec.loans import Lender
from gateway.codec.policies import BytesAs, JsonPolicies, Nonfinite
from gateway.exchange.base import Limits, Route, Upstream
from gateway.exchange.keys import KeyGroup
from gateway.exchange.routes import Rewrite, Routes, Rule
from gateway.exchange.turns import Turns
from gateway.protocol.endpoints import KINDS, EndpointKind
from gateway.routing.matcher import Match, Pattern
from gateway.settings.limits import Limits as CommonLimits
from gateway.settings.routes import Match as MatchSettings
from gateway.settings.routes import RouteLimits
from gateway.settings.schema import Settings


def build_routes(
    settings: Settings,
    upstreams: Mapping[str, Upstream],
    lender: Lender | None,
    keys: Mapping[str, KeyGroup],
) -> Routes:
    """Make the routes to upstreams; ``lender`` converts numbers elsewhere, if there is one."""
    replaced = forwarding(settings).replaced
    turns = Turns()  # one for all: there is one event loop
    rules = []
    for declared in settings.routes:
        policies = JsonPolicies(Nonfinite(declared.nonfinite), BytesAs(declared.bytes))
        limits = _limits(settings.limits, declared.limits)
        rewrite = declared.rewrite
        groups = tuple(keys[name] for name in declared.auth)
        # A key is meant for the gateway: a server could do with it what its client can.
        shown_in = {group.shown_in.lower() for group in groups}
        rules.append(
            Rule(
                _match(declared.match),
                tuple(
                    Route(upstreams[share.name], policies, limits, lender, turns)
                    for share in declared.upstream
                ),
                tuple(share.weight for share in declared.upstream),
                declared.sticky,
                Rewrite(rewrite.model, rewrite.version) if rewrite else None,
                _kinds(declared.deny),
                replaced | shown_in,
                groups,
            )
        )
    return Routes(rules)


def _match(declared: MatchSettings) -> Match:
    return Match(
        Pattern.of(declared.model) if declared.model else None,
        Pattern.of(declared.version) if declared.version else None,
        tuple((name, Pattern.of(value)) for name, value in declared.headers.items()),
        _kinds(declared.kinds) if declared.kinds else None,
    )


def _kinds(words: Iterable[str]) -> frozenset[EndpointKind]:
    return frozenset(kind for word in words for kind in KINDS[word])


def _limits(common: CommonLimits, own: RouteLimits) -> Limits:
    """Give a route's limits: its own, and where it says nothing, those of all."""
    said = own.model_dump(exclude_none=True)
    return Limits(
        **{name: said.get(name, getattr(common, name)) for name in type(own).model_fields}
    )
