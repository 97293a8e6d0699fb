"""Settings → the upstreams."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping

from gateway.app.processes import part_of
from gateway.exchange.base import Upstream
from gateway.exchange.gate import Gate
from gateway.protocol.dialects import DIALECTS
from gateway.routing.health import EjectionPolicy, ProbePolicy
from gateway.routing.retry import RetryBudget
from gateway.settings.limits import Places
from gateway.settings.schema import Settings
from gateway.settings.upstreams import Ejection, Health
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.upstream.address import ServerAddress, server_at
from gateway.upstream.discovery import Discovery
from gateway.upstream.http import HttpEndpoint
from gateway.upstream.keeper import Keeper
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool import Pool
from gateway.upstream.probe import Prober
from gateway.upstream.resolver import Resolver, addresses_of

_DISCOVER_EVERY = 10.0
"""Seconds between two questions for an endpoint's models."""


def build_upstreams(
    settings: Settings, contexts: Mapping[str, ssl.SSLContext]
) -> dict[str, Upstream]:
    """Make the upstreams, by name; ``contexts`` are those for TLS."""
    limits = settings.limits
    common = _gates("the gateway", limits, settings)
    clock = asyncio.get_running_loop().time

    def connect(address: ServerAddress) -> HttpEndpoint:
        return HttpEndpoint(address, limits.connect_time)

    return {
        name: Upstream(
            name,
            DIALECTS[declared.dialect],
            _pool(declared, contexts.get(name), connect),
            MetadataCache(limits.metadata_time, limits.metadata_models, limits.idle_time, clock),
            RetryBudget(declared.retries.share, declared.retries.reserve),
            gates=common + _gates(f"upstream '{name}'", declared.limits, settings),
            required=declared.required,
        )
        for name, declared in settings.upstreams.items()
    }


def _pool(
    declared: UpstreamSettings,
    context: ssl.SSLContext | None,
    connect: Callable[[ServerAddress], HttpEndpoint],
) -> Pool:
    server_name = declared.tls.server_name if declared.tls is not None else None
    servers = [server_at(url, context, server_name) for url in declared.endpoints]
    resolver = None
    if declared.resolve is not None:
        resolver = Resolver(servers, declared.resolve, connect, addresses_of)
    keeper = Keeper(
        None if declared.health is None else _prober(declared.health),
        None if declared.discover is None else Discovery(_DISCOVER_EVERY),
        resolver,
    )
    endpoints = resolver.endpoints if resolver else [connect(server) for server in servers]
    return Pool(endpoints, _ejection(declared.ejection), keeper=keeper)


def _ejection(declared: Ejection) -> EjectionPolicy:
    return EjectionPolicy(
        declared.failures,
        declared.time,
        declared.longest,
        declared.most,
        frozenset(declared.statuses),
    )


def _prober(declared: Health) -> Prober:
    policy = ProbePolicy(declared.healthy, declared.unhealthy)
    return Prober(declared.path, declared.every, declared.time, policy)


def _gates(place: str, declared: Places, settings: Settings) -> tuple[Gate, ...]:
    if declared.requests == "unlimited":
        return ()
    most = part_of(declared.requests, settings)
    waiting = part_of(declared.waiting, settings) if declared.waiting else 0
    return (Gate(place, most, waiting, declared.wait_time),)
