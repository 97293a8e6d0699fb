"""Settings → the routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.app.processes import part_of
from gateway.app.upstreams import for_mirrors
from gateway.codec.loans import Lender
from gateway.codec.policies import BytesAs, JsonPolicies, Nonfinite
from gateway.exchange.base import Limits, Route, Upstream
from gateway.exchange.dispatch import dispatch
from gateway.exchange.held import HeldBytes
from gateway.exchange.mirror import Mirror
from gateway.exchange.routes import Rewrite, Routes, Rule
from gateway.exchange.turns import Turns
from gateway.protocol.endpoints import KINDS, EndpointKind
from gateway.routing.matcher import Match, Pattern
from gateway.settings.limits import Limits as CommonLimits
from gateway.settings.routes import Match as MatchSettings
from gateway.settings.routes import Mirror as MirrorSettings
from gateway.settings.routes import RouteLimits
from gateway.settings.schema import Settings

_MIRRORED_PART = 4
"""How many times less than clients' exchanges, and apart from them, copies may hold of bodies."""


def build_routes(
    settings: Settings, upstreams: Mapping[str, Upstream], lender: Lender | None
) -> Routes:
    """Make the routes to upstreams; ``lender`` converts numbers elsewhere, if there is one."""
    turns = Turns()  # one for all: there is one event loop
    held = HeldBytes(part_of(settings.limits.held_bytes, settings))
    mirrors = _Mirrors(settings, upstreams, lender)
    rules = []
    for declared in settings.routes:
        policies = JsonPolicies(Nonfinite(declared.nonfinite), BytesAs(declared.bytes))
        limits = _limits(settings.limits, declared.limits)
        rewrite = declared.rewrite
        rules.append(
            Rule(
                _match(declared.match),
                tuple(
                    Route(upstreams[share.name], policies, limits, lender, turns, held)
                    for share in declared.upstream
                ),
                tuple(share.weight for share in declared.upstream),
                declared.sticky,
                Rewrite(rewrite.model, rewrite.version) if rewrite else None,
                _kinds(declared.deny),
                mirrors.make(declared.mirror, policies, limits),
            )
        )
    return Routes(rules)


class _Mirrors:
    """Makes the mirrors of all routes: what they share is not what clients' exchanges share."""

    def __init__(
        self, settings: Settings, upstreams: Mapping[str, Upstream], lender: Lender | None
    ) -> None:
        self._settings = settings
        self._upstreams = upstreams
        self._lender = lender
        self._turns = Turns()
        self._held = HeldBytes(part_of(settings.limits.held_bytes // _MIRRORED_PART, settings))

    def make(
        self, declared: MirrorSettings | None, policies: JsonPolicies, limits: Limits
    ) -> Mirror | None:
        """Make the mirror of a route that has one."""
        if declared is None:
            return None
        upstream = for_mirrors(self._upstreams[declared.upstream], self._settings)
        route = Route(upstream, policies, limits, self._lender, self._turns, self._held)
        return Mirror(route, declared.share, dispatch)


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
