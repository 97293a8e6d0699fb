"""Which route a request takes: the first rule that it matches tells."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import (
    KINDS,
    UNTOUCHED,
    UNTOUCHED_IF_ONE,
    Endpoint,
    EndpointKind,
    kind_word,
    parse_endpoint,
    read_endpoint,
    with_model,
)
from gateway.proxy.cluster.health import Readiness
from gateway.proxy.cluster.scatter_gather import endpoints_of
from gateway.proxy.filters.authentication import Doorkeeper, KeyGroup
from gateway.proxy.filters.forwarded_headers import SILENT, Forwarding
from gateway.proxy.filters.mirror import MIRRORED, Mirror, Sample
from gateway.proxy.interfaces import Limits, Route, Upstream
from gateway.proxy.not_found import unmatched
from gateway.routing.matcher import Match, first_match
from gateway.routing.weights import Shares, number_of

_AUTHORIZATION = frozenset(("authorization",))

_OF_ALL_RULES = frozenset((EndpointKind.INDEX, EndpointKind.V1_MODELS, EndpointKind.ALL_STATISTICS))
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
    deny: frozenset[EndpointKind] = frozenset()
    mirror: Mirror | None = None
    withheld: frozenset[str] = frozenset()
    keys: tuple[KeyGroup, ...] = ()
    compress: tuple[str, ...] = ()

    def admits(self, known: frozenset[KeyGroup]) -> bool:
        """Tell whether it is open to who shows keys of these groups."""
        return not self.keys or not known.isdisjoint(self.keys)

    def lists(self, kind: EndpointKind, known: frozenset[KeyGroup]) -> bool:
        """Tell whether what its upstreams have is in answers of this kind to who shows such keys.

        A rule for health alone leads to no model: it is open to probes, which have no key.
        """
        is_for_health = self.match.kinds is not None and self.match.kinds <= KINDS["health"]
        return kind not in self.deny and not is_for_health and self.admits(known)

    @property
    def limits(self) -> Limits:
        """Give the limits of all its routes."""
        return self.routes[0].limits


def led_to(rules: Iterable[Rule]) -> tuple[Upstream, ...]:
    """Give the upstreams that rules lead to, each once and in order; those of no weight are not."""
    upstreams = [
        route.upstream
        for rule in rules
        for route, weight in zip(rule.routes, rule.weights, strict=True)
        if weight
    ]
    return tuple(dict.fromkeys(upstreams))


class Choice:
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
class Found:
    """Where requests with the same head go, what the server is asked for, and is not shown.

    ``upstreams`` are all that answer for a request which is for more than one server: those that
    its rule chooses from, or those of all rules that are open to it.
    """

    choice: Choice
    asked: Endpoint
    target: str
    upstreams: tuple[Upstream, ...]
    withheld: frozenset[str]
    mirror: Sample | None = None
    compress: tuple[str, ...] = ()

    @property
    def is_forwarded(self) -> bool:
        """Tell whether the request goes to one server, as it is."""
        kind = self.asked.kind
        if kind not in UNTOUCHED_IF_ONE:
            return kind in UNTOUCHED
        if any(upstream.pool.changes for upstream in self.upstreams):
            return False  # what is found for a head is remembered, for longer than that
        # Of most upstreams, the servers have the same models.
        if kind is EndpointKind.INDEX and not self.upstreams[0].pool.differs:
            return len(self.upstreams) == 1
        return endpoints_of(self.upstreams) == 1


class Routes:
    """Finds the rule for a request.

    ``random`` gives numbers in [0, 1); ``forwarding`` knows a request that has been here before.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        random: Callable[[], float] = random.random,
        forwarding: Forwarding = SILENT,
    ) -> None:
        self.rules = tuple(rules)
        self._forwarding = forwarding
        self._matches = [rule.match for rule in rules]
        self._ways = [_Ways(rule, random) for rule in rules]
        self.readiness = Readiness(led_to(rules))
        self._doorkeeper = Doorkeeper(group for rule in rules for group in rule.keys)

    def find(self, method: str, target: str, headers: CIMultiDictProxy[str]) -> Found:
        """Tell where a request goes: a pure function of its head, but for the choice by weight.

        Raises GatewayError: 508 for a request that has been here before, 401 where no key is shown
        that there has to be, 404 where no rule matches that is open to the key, 403 for what is
        denied. A path that servers read in more than one way matches where each of them leads to
        the same rule, and none is denied.
        """
        if self._forwarding.has_passed(headers):
            # RFC 9110, section 7.6.3: else it would go round until all connections are taken.
            raise GatewayError(
                ErrorKind.LOOP, "loop: the request came back from an upstream of this gateway"
            )
        readings = read_endpoint(method, target)
        index = self._followed(readings, method, target, headers)
        rule = self.rules[index]
        for reading in readings:
            if reading.kind in rule.deny:
                word = kind_word(reading.kind)
                raise GatewayError(
                    ErrorKind.FORBIDDEN, f"what is asked for ({word}) is not served here"
                )
        asked = parse_endpoint(method, target)
        ways = self._ways[index]
        upstreams = ways.upstreams
        if asked.kind in _OF_ALL_RULES:
            known = self._doorkeeper.known(headers)
            upstreams = led_to(each for each in self.rules if each.lists(asked.kind, known))
        if rule.rewrite is not None:
            target = self._rewritten(rule.rewrite, method, target, headers)
            asked = parse_endpoint(method, target)
        withheld = ways.withheld
        if self._doorkeeper and self._doorkeeper.is_in_authorization(headers):
            withheld |= _AUTHORIZATION
        mirror = ways.mirror if asked.kind in MIRRORED else None
        choice = ways.choice(headers)
        return Found(choice, asked, target, upstreams, withheld, mirror, rule.compress)

    def _followed(
        self,
        readings: tuple[Endpoint, ...],
        method: str,
        target: str,
        headers: CIMultiDictProxy[str],
    ) -> int:
        """Give the number of the first rule that matches, if it is open to the request."""
        index, *others = {first_match(self._matches, each, headers) for each in readings}
        if others:
            index = None
        if index is not None and not self.rules[index].keys:
            return index
        known = self._doorkeeper.known(headers)
        if index is not None and self.rules[index].admits(known):
            return index
        if self._doorkeeper and not known:
            raise self._doorkeeper.refusal(headers)
        raise self._unmatched(method, target, known)

    def _rewritten(
        self, rewrite: Rewrite, method: str, target: str, headers: CIMultiDictProxy[str]
    ) -> str:
        """Put the other model into a target; raises GatewayError (404) where one is still named."""
        rewritten = with_model(target, rewrite.model, rewrite.version)
        models = {(each.model, each.version) for each in read_endpoint(method, rewritten)}
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
        self.upstreams = led_to([rule])
        shares = self._shares = Shares.of(rule.weights)
        # What is compressed here is not asked for in that form.
        own = frozenset(("accept-encoding",)) if rule.compress else frozenset()
        self.withheld = rule.withheld | own
        self._sticky = rule.sticky
        self.mirror = None if rule.mirror is None else Sample(rule.mirror, random)
        self._settled = [Choice(None, route) for route in rule.routes]
        if len(rule.routes) == 1:
            self._free = self._settled[0]
        else:

            def draw() -> Route:
                return rule.routes[shares.at(random())]

            self._free = Choice(draw, draw())

    def choice(self, headers: CIMultiDictProxy[str]) -> Choice:
        """Give the choice for requests with these headers."""
        value = None if self._sticky is None else headers.get(self._sticky)
        return self._free if value is None else self._settled[self._shares.at(number_of(value))]
