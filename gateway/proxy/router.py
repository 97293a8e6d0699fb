"""Which route a request takes: the first rule that it matches tells."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import (
    OPERATION_KINDS,
    PASSTHROUGH,
    PASSTHROUGH_IF_SINGLE,
    Operation,
    OperationKind,
    operation_name,
    parse_operation,
    parse_operation_variants,
    replace_model,
)
from gateway.proxy.cluster.health import Readiness
from gateway.proxy.cluster.scatter_gather import endpoints_of
from gateway.proxy.filters.authentication import Authenticator, KeyGroup
from gateway.proxy.filters.forwarded_headers import NO_FORWARDED_HEADERS, ForwardedPolicy
from gateway.proxy.filters.mirror import MIRRORED_KINDS, Mirror, MirrorSampler
from gateway.proxy.interfaces import Limits, Route, Upstream
from gateway.proxy.not_found import unmatched
from gateway.routing.matcher import Match, find_first_match
from gateway.routing.weights import CumulativeWeights, hash_to_fraction

_AUTHORIZATION = frozenset(("authorization",))

_OF_ALL_RULES = frozenset(
    (OperationKind.INDEX, OperationKind.V1_MODELS, OperationKind.ALL_STATISTICS)
)
"""Kinds for which the gateway is one server, whichever rule the request matches."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The model that a server is asked for instead, and its version if there is one."""

    model: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of requests that match.

    ``routes`` differ in their upstreams alone, and have a weight each. ``sticky`` is the header of
    which every value stays with one route. Kinds in ``deny`` are refused. ``mirror`` sends copies.
    The headers ``withheld``, named in lower case, do not go to servers. Where there are ``keys``, a
    request has to show one. Answers are compressed for clients that accept one of the codings in
    ``compress``, of which the first of equals is taken.
    """

    match: Match
    routes: tuple[Route, ...]
    weights: tuple[int, ...] = (1,)
    sticky: str | None = None
    rewrite: Rewrite | None = None
    deny: frozenset[OperationKind] = frozenset()
    mirror: Mirror | None = None
    dropped_headers: frozenset[str] = frozenset()
    keys: tuple[KeyGroup, ...] = ()
    compress: tuple[str, ...] = ()

    def admits(self, known: frozenset[KeyGroup]) -> bool:
        """Tell whether it is open to who shows keys of these groups."""
        return not self.keys or not known.isdisjoint(self.keys)

    def lists(self, kind: OperationKind, known: frozenset[KeyGroup]) -> bool:
        """Tell whether what its upstreams have is in answers of this kind to who shows such keys.

        A rule for health alone leads to no model: it is open to probes, which have no key.
        """
        is_for_health = (
            self.match.kinds is not None and self.match.kinds <= OPERATION_KINDS["health"]
        )
        return kind not in self.deny and not is_for_health and self.admits(known)

    @property
    def limits(self) -> Limits:
        """Give the limits of all its routes."""
        return self.routes[0].limits


def collect_upstreams(rules: Iterable[Rule]) -> tuple[Upstream, ...]:
    """Give the upstreams that rules lead to, each once and in order; those of no weight are not."""
    upstreams = [
        route.upstream
        for rule in rules
        for route, weight in zip(rule.routes, rule.weights, strict=True)
        if weight
    ]
    return tuple(dict.fromkeys(upstreams))


class WeightedChoice:
    """Chooses the routes of requests, one after the other, by weight.

    ``next`` stands until it is taken. So what is chosen for a request that the straight way leaves,
    as no connection is free there, is not lost: all that is chosen is used, in the weights' shares.
    """

    __slots__ = ("_draw", "next")

    def __init__(self, draw: Callable[[], Route] | None, first: Route) -> None:
        self._draw = draw
        self.next = first

    def take(self) -> Route:
        """Give the route for a request, and choose that of the next one."""
        route = self.next
        if self._draw is not None:
            self.next = self._draw()
        return route


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """Where requests with the same head go, what the server is asked for, and is not shown.

    ``upstreams`` are all that answer for a request which is for more than one server: those that
    its rule chooses from, or those of all rules that are open to it.
    """

    choice: WeightedChoice
    asked: Operation
    target: str
    upstreams: tuple[Upstream, ...]
    dropped_headers: frozenset[str]
    mirror: MirrorSampler | None = None
    compress: tuple[str, ...] = ()

    @property
    def is_passthrough(self) -> bool:
        """Tell whether the request goes to one server, as it is."""
        kind = self.asked.kind
        if kind not in PASSTHROUGH_IF_SINGLE:
            return kind in PASSTHROUGH
        if any(upstream.pool.is_dynamic for upstream in self.upstreams):
            return False  # what is found for a head is remembered, for longer than that
        # Of most upstreams, the servers have the same models.
        if kind is OperationKind.INDEX and not self.upstreams[0].pool.discovers_models:
            return len(self.upstreams) == 1
        return endpoints_of(self.upstreams) == 1


class Router:
    """Finds the rule for a request.

    ``random`` gives numbers in [0, 1); ``forwarding`` knows a request that has been here before.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        random: Callable[[], float] = random.random,
        forwarding: ForwardedPolicy = NO_FORWARDED_HEADERS,
    ) -> None:
        self.rules = tuple(rules)
        self._forwarding = forwarding
        self._matches = [rule.match for rule in rules]
        self._ways = [_Ways(rule, random) for rule in rules]
        self.readiness = Readiness(collect_upstreams(rules))
        self._doorkeeper = Authenticator(group for rule in rules for group in rule.keys)

    def find(self, method: str, target: str, headers: CIMultiDictProxy[str]) -> RouteMatch:
        """Tell where a request goes: a pure function of its head, but for the choice by weight.

        Raises GatewayError: 508 for a request that has been here before, 401 where no key is shown
        that there has to be, 404 where no rule matches that is open to the key, 403 for what is
        denied. A path that servers read in more than one way matches where each of them leads to
        the same rule, and none is denied.
        """
        if self._forwarding.is_loop(headers):
            # RFC 9110, section 7.6.3: else it would go round until all connections are taken.
            raise GatewayError(
                ErrorKind.LOOP, "loop: the request came back from an upstream of this gateway"
            )
        readings = parse_operation_variants(method, target)
        index = self._followed(readings, method, target, headers)
        rule = self.rules[index]
        for reading in readings:
            if reading.kind in rule.deny:
                word = operation_name(reading.kind)
                raise GatewayError(
                    ErrorKind.FORBIDDEN, f"what is asked for ({word}) is not served here"
                )
        asked = parse_operation(method, target)
        ways = self._ways[index]
        upstreams = ways.upstreams
        if asked.kind in _OF_ALL_RULES:
            known = self._doorkeeper.known(headers)
            upstreams = collect_upstreams(
                each for each in self.rules if each.lists(asked.kind, known)
            )
        if rule.rewrite is not None:
            target = self._rewritten(rule.rewrite, method, target, headers)
            asked = parse_operation(method, target)
        dropped_headers = ways.dropped_headers
        if self._doorkeeper and self._doorkeeper.is_in_authorization(headers):
            dropped_headers |= _AUTHORIZATION
        mirror = ways.mirror if asked.kind in MIRRORED_KINDS else None
        choice = ways.choice(headers)
        return RouteMatch(choice, asked, target, upstreams, dropped_headers, mirror, rule.compress)

    def _followed(
        self,
        readings: tuple[Operation, ...],
        method: str,
        target: str,
        headers: CIMultiDictProxy[str],
    ) -> int:
        """Give the number of the first rule that matches, if it is open to the request."""
        index, *others = {find_first_match(self._matches, each, headers) for each in readings}
        if others:
            index = None
        if index is not None and not self.rules[index].keys:
            return index
        known = self._doorkeeper.known(headers)
        if index is not None and self.rules[index].admits(known):
            return index
        if self._doorkeeper and not known:
            raise self._doorkeeper.unauthenticated_error(headers)
        raise self._unmatched(method, target, known)

    def _rewritten(
        self, rewrite: Rewrite, method: str, target: str, headers: CIMultiDictProxy[str]
    ) -> str:
        """Put the other model into a target; raises GatewayError (404) where one is still named."""
        rewritten = replace_model(target, rewrite.model, rewrite.version)
        models = {
            (each.model, each.version) for each in parse_operation_variants(method, rewritten)
        }
        if len(models) > 1:
            raise self._unmatched(method, target, self._doorkeeper.known(headers))
        return rewritten

    def _unmatched(self, method: str, target: str, known: frozenset[KeyGroup]) -> GatewayError:
        matches = [rule.match for rule in self.rules if rule.admits(known)]
        return GatewayError(
            ErrorKind.NOT_FOUND, unmatched(method, target, matches, with_key=bool(known))
        )


class _Ways:
    """The choices that a rule leaves."""

    def __init__(self, rule: Rule, random: Callable[[], float]) -> None:
        self.upstreams = collect_upstreams([rule])
        shares = self._shares = CumulativeWeights.of(rule.weights)
        # What is compressed here is not asked for in that form.
        own = frozenset(("accept-encoding",)) if rule.compress else frozenset()
        self.dropped_headers = rule.dropped_headers | own
        self._sticky = rule.sticky
        self.mirror = None if rule.mirror is None else MirrorSampler(rule.mirror, random)
        self._settled = [WeightedChoice(None, route) for route in rule.routes]
        if len(rule.routes) == 1:
            self._free = self._settled[0]
        else:

            def draw() -> Route:
                return rule.routes[shares.at(random())]

            self._free = WeightedChoice(draw, draw())

    def choice(self, headers: CIMultiDictProxy[str]) -> WeightedChoice:
        """Give the choice for requests with these headers."""
        value = None if self._sticky is None else headers.get(self._sticky)
        return (
            self._free if value is None else self._settled[self._shares.at(hash_to_fraction(value))]
        )
