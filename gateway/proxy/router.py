"""Finds the route of a request: the first one that matches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Final
from urllib.parse import unquote

from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_record import NO_LABELS, CallLabels
from gateway.protocol.operations import (
    OPERATION_KINDS,
    PASSTHROUGH,
    PASSTHROUGH_IF_SINGLE,
    Operation,
    OperationKind,
    decode_names,
    parse_operation,
    parse_operation_variants,
    replace_model,
)
from gateway.protocol.request_header import client_form
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.cluster.scatter_gather import count_endpoints
from gateway.proxy.destination import Destination, Limits, Upstream
from gateway.proxy.filters.authentication import Authenticator, KeyGroup
from gateway.proxy.filters.forwarded_headers import (
    NO_FORWARDED_HEADERS,
    NOTED_HEADERS,
    ForwardedPolicy,
)
from gateway.proxy.filters.interfaces import FilteredHead
from gateway.proxy.filters.mirror import MIRRORED_KINDS, Mirror
from gateway.proxy.headers import ResponseHeaderPolicy
from gateway.proxy.readiness import Readiness
from gateway.routing.balancer import TrafficSplit, WeightedChoice
from gateway.routing.matcher import Match, find_first_match, not_found_text
from gateway.upstream.shared_memory import NOT_SHARED

_LIMIT_NAMES = tuple(field.name for field in fields(Limits))
_AUTHORIZATION = frozenset(("authorization",))

_ALL_ROUTES_KINDS = frozenset(
    (OperationKind.INDEX, OperationKind.V1_MODELS, OperationKind.ALL_STATISTICS)
)
"""Operations over the upstreams of all routes, whichever one the request matches."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The model that servers get instead, and its version if there is one: quoted, as in paths."""

    model: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """What applies to requests that match.

    ``destinations`` differ in their upstreams alone, and have a weight each. Every value of
    ``sticky_header`` stays with one destination. Operations in ``denied_kinds`` are refused.
    ``mirror`` gets copies of requests. ``dropped_headers``, in lower case, do not go to servers. If
    there are ``keys``, a request needs one. Responses are compressed with one of ``codings`` that
    the client accepts; the first wins among equals. With ``server_timing``, they say where the time
    went.
    """

    match: Match
    destinations: tuple[Destination, ...]
    weights: tuple[int, ...] = (1,)
    sticky_header: str | None = None
    rewrite: Rewrite | None = None
    denied_kinds: frozenset[OperationKind] = frozenset()
    mirror: Mirror | None = None
    dropped_headers: frozenset[str] = frozenset()
    keys: tuple[KeyGroup, ...] = ()
    codings: tuple[str, ...] = ()
    name: str = ""
    server_timing: bool = False

    def admits(self, authenticated: frozenset[KeyGroup]) -> bool:
        """Tell whether the route is open to a client with keys of these groups."""
        return not self.keys or not authenticated.isdisjoint(self.keys)

    def lists(self, kind: OperationKind, authenticated: frozenset[KeyGroup]) -> bool:
        """Tell whether responses of this kind include the route's upstreams for such a client.

        A route for health alone leads to no model: it is open to probes, which have no key.
        """
        is_for_health = (
            self.match.kinds is not None and self.match.kinds <= OPERATION_KINDS["health"]
        )
        return kind not in self.denied_kinds and not is_for_health and self.admits(authenticated)

    @property
    def limits(self) -> Limits:
        """Return the limits, which are the same for all destinations of the route."""
        return self.destinations[0].limits


def collect_upstreams(routes: Iterable[Route]) -> tuple[Upstream, ...]:
    """Return the upstreams of routes in order, each once; upstreams of no weight are left out."""
    upstreams = [
        destination.upstream
        for route in routes
        for destination, weight in zip(route.destinations, route.weights, strict=True)
        if weight
    ]
    return tuple(dict.fromkeys(upstreams))


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """Where requests with the same head go, and what the server gets.

    ``operation`` and ``target`` are those for the server. ``rewrite`` is what a gRPC call's
    messages have still to get. ``upstreams`` are all that serve an operation over several servers:
    those of the route, or those of all routes open to the client.
    """

    choice: WeightedChoice[Destination]
    operation: Operation
    target: str
    upstreams: tuple[Upstream, ...]
    dropped_headers: frozenset[str]
    sample_mirror: Callable[[], Mirror | None] | None = None
    """Returns the mirror of the next request, if that is to be copied."""
    codings: tuple[str, ...] = ()
    header_policy: ResponseHeaderPolicy | None = None
    labels: CallLabels = NO_LABELS
    rewrite: Rewrite | None = None

    @property
    def is_passthrough(self) -> bool:
        """Tell whether the request passes untouched to one server."""
        kind = self.operation.kind
        if kind not in PASSTHROUGH_IF_SINGLE:
            return kind in PASSTHROUGH
        if any(upstream.pool.is_dynamic for upstream in self.upstreams):
            return False  # plans of the fast path are cached for longer than that
        # The servers of an upstream have the same models, unless models are discovered.
        if kind is OperationKind.INDEX and not self.upstreams[0].pool.discovers_models:
            return len(self.upstreams) == 1
        return count_endpoints(self.upstreams) == 1

    def filtered_head(self, method: str, headers: CIMultiDictProxy[str]) -> FilteredHead:
        """Return what decides, for a client's method and headers, which filters apply."""
        return FilteredHead(method, headers, self.operation, self.codings)


def call_labels(
    route: str, operation: Operation, headers: CIMultiDictProxy[str], is_grpc: bool = False
) -> CallLabels:
    """Return what observers learn of a call by its head; the operation is that for the server."""
    model, version = (unquote(each or "") for each in (operation.model, operation.version))
    form = "grpc" if is_grpc else client_form(operation.kind, headers)
    return CallLabels(route, operation.kind.word, model, version, form)


class Router:
    """Finds the route for a request.

    ``random`` returns numbers in [0, 1). ``forwarded`` recognizes a request that has been here
    before.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        random: Callable[[], float] = random.random,
        forwarded: ForwardedPolicy = NO_FORWARDED_HEADERS,
    ) -> None:
        self.routes = tuple(routes)
        self._forwarded = forwarded
        self._matches = [route.match for route in routes]
        self._targets = [_RouteTargets(route, random) for route in routes]
        self.widest_limits = _widest([route.limits for route in routes])
        """Limits that no route exceeds: those of a call whose route is not known yet."""
        upstreams = collect_upstreams(routes)
        self.readiness = Readiness(upstreams)
        lanes = [each.lanes.policy.min_bytes for each in upstreams if each.lanes is not None]
        self.min_shared_bytes: Final = min(lanes, default=NOT_SHARED)
        """Bytes of a body from which on its tensors may go to any server through shared memory."""
        self.message_scheduler = ConversionScheduler()
        """Shares the event loop among gRPC messages that are read before their route is known."""
        self._authenticator = Authenticator(group for route in routes for group in route.keys)

    @property
    def header_names(self) -> frozenset[str]:
        """Return the names, in lower case, of the headers that decide where a request goes."""
        names = {"via", "cdn-loop"}  # the forwarding policy recognizes loops by them
        for route in self.routes:
            names.update(name.lower() for name, _ in route.match.headers)
            names.update(group.header_name.lower() for group in route.keys)
            # Noted headers are dropped from each request: as keys they would cost a plan each.
            names |= route.dropped_headers - NOTED_HEADERS
            if route.sticky_header is not None:
                names.add(route.sticky_header.lower())
            for destination in route.destinations:
                if (header := destination.upstream.pool.load_balancing.hash_header) is not None:
                    names.add(header.lower())
        if self._authenticator:
            names |= _AUTHORIZATION
        return frozenset(names)

    @property
    def memory_budget(self) -> MemoryBudget:
        """Return the memory budget that all routes share."""
        return self.routes[0].destinations[0].memory_budget

    def find(
        self,
        method: str,
        target: str,
        headers: CIMultiDictProxy[str],
        rpcs: tuple[Operation, ...] = (),
    ) -> RouteMatch:
        """Find where a request goes: a pure function of its head, but for the weighted choice.

        Of a gRPC call, ``rpcs`` are the operations that servers may take its first message for.
        Raises GatewayError: 508 for a request that has been here before, 401 without a key, 404
        without a route that is open to the client, 403 for a denied operation. A path that servers
        read in several ways matches only if all readings match the same route, and none is denied.
        """
        if self._forwarded.is_loop(headers):
            # RFC 9110, section 7.6.3: else it would go round until all connections are in use.
            raise GatewayError(
                ErrorKind.LOOP, "loop: the request came back from an upstream of this gateway"
            )
        if rpcs:
            operation, readings = rpcs[0], tuple(map(decode_names, rpcs))
        else:
            operation = parse_operation(method, target)
            readings = parse_operation_variants(method, target)
        shown = f"{target} of model {operation.model}" if rpcs and operation.model else target
        index = self._find_route(readings, method, shown, headers)
        route = self.routes[index]
        for reading in readings:
            if reading.kind in route.denied_kinds:
                name = reading.kind.word
                raise GatewayError(
                    ErrorKind.FORBIDDEN, f"operation '{name}' is denied on this route"
                )
        targets = self._targets[index]
        upstreams = targets.upstreams
        if operation.kind in _ALL_ROUTES_KINDS:
            keys = self._authenticator.authenticated_groups(headers)
            upstreams = collect_upstreams(
                each for each in self.routes if each.lists(operation.kind, keys)
            )
        rewrite = None
        if route.rewrite is not None and rpcs:
            operation = _rewrite_operation(route.rewrite, operation)
            rewrite = None if operation.model is None else route.rewrite
        elif route.rewrite is not None:
            target = self._rewrite(route.rewrite, method, target, headers)
            operation = parse_operation(method, target)
        dropped_headers = targets.dropped_headers
        if self._authenticator and self._authenticator.uses_authorization(headers):
            dropped_headers |= _AUTHORIZATION
        mirror = targets.mirror if operation.kind in MIRRORED_KINDS else None
        choice = targets.split.choice(headers)
        return RouteMatch(
            choice,
            operation,
            target,
            upstreams,
            dropped_headers,
            mirror,
            route.codings,
            targets.header_policy,
            call_labels(route.name, operation, headers, is_grpc=bool(rpcs)),
            rewrite,
        )

    def _find_route(
        self,
        readings: tuple[Operation, ...],
        method: str,
        target: str,
        headers: CIMultiDictProxy[str],
    ) -> int:
        """Return the number of the first route that matches, if it is open to the client."""
        index, *others = {find_first_match(self._matches, each, headers) for each in readings}
        if others:
            index = None
        if index is not None and not self.routes[index].keys:
            return index
        keys = self._authenticator.authenticated_groups(headers)
        if index is not None and self.routes[index].admits(keys):
            return index
        if self._authenticator and not keys:
            raise self._authenticator.unauthenticated_error(headers)
        raise self._not_found(method, target, keys)

    def _rewrite(
        self, rewrite: Rewrite, method: str, target: str, headers: CIMultiDictProxy[str]
    ) -> str:
        """Replace the model in a target; raises GatewayError (404) if another reading remains."""
        rewritten = replace_model(target, rewrite.model, rewrite.version)
        readings = parse_operation_variants(method, rewritten)
        if len({(each.model, each.version) for each in readings}) > 1:
            raise self._not_found(method, target, self._authenticator.authenticated_groups(headers))
        return rewritten

    def _not_found(self, method: str, target: str, keys: frozenset[KeyGroup]) -> GatewayError:
        matches = [route.match for route in self.routes if route.admits(keys)]
        return GatewayError(
            ErrorKind.NOT_FOUND, not_found_text(method, target, matches, with_key=bool(keys))
        )


def _rewrite_operation(rewrite: Rewrite, operation: Operation) -> Operation:
    """Replace the model of a gRPC call.

    A call for the server as a whole names none. An infer call whose first message names none gets
    the model too: a later message of the stream might name another one.
    """
    if operation.model is None and operation.kind is not OperationKind.INFER:
        return operation
    version = operation.version if rewrite.version is None else rewrite.version
    return Operation(operation.kind, rewrite.model, version)


def _widest(limits: Sequence[Limits]) -> Limits:
    """Return the greatest of each limit; a lower rate is less strict."""
    widest = {name: max(getattr(each, name) for each in limits) for name in _LIMIT_NAMES}
    return Limits(**widest | {"min_body_rate": min(each.min_body_rate for each in limits)})


class _RouteTargets:
    """The choices of destinations, and what else a route computes once for all its requests."""

    def __init__(self, route: Route, random: Callable[[], float]) -> None:
        self.upstreams = collect_upstreams([route])
        # Servers must not compress what the gateway compresses.
        own = frozenset(("accept-encoding",)) if route.codings else frozenset()
        self.dropped_headers = route.dropped_headers | own
        header_policy = ResponseHeaderPolicy(bool(route.codings), route.server_timing)
        # The fast path saves a function call if there is nothing to change.
        self.header_policy = None if header_policy == ResponseHeaderPolicy() else header_policy
        self.mirror = None if route.mirror is None else partial(route.mirror.sample, random)
        self.split = TrafficSplit(route.destinations, route.weights, route.sticky_header, random)
