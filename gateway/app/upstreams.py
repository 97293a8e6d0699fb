"""Settings → the upstreams."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import replace

from gateway.app.processes import part_of
from gateway.exchange.base import Upstream
from gateway.exchange.gate import Gate
from gateway.protocol.dialects import DIALECTS
from gateway.settings.limits import Places
from gateway.settings.schema import Settings
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.upstream.address import server_at
from gateway.upstream.http import HttpEndpoint
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool import Pool


def build_upstreams(
    settings: Settings, contexts: Mapping[str, ssl.SSLContext]
) -> dict[str, Upstream]:
    """Make the upstreams, by name; ``contexts`` are those for TLS."""
    limits = settings.limits
    common = _gates("the gateway", limits, settings)
    clock = asyncio.get_running_loop().time
    return {
        name: Upstream(
            name,
            DIALECTS[declared.dialect],
            Pool(_endpoints(declared, contexts.get(name), limits.connect_time)),
            MetadataCache(limits.metadata_time, limits.metadata_models, limits.idle_time, clock),
            gates=common + _gates(f"upstream '{name}'", declared.limits, settings),
        )
        for name, declared in settings.upstreams.items()
    }


def for_mirrors(upstream: Upstream, settings: Settings) -> Upstream:
    """Give an upstream as mirrors use it: of the gateway's own places they take none away."""
    common = len(_gates("the gateway", settings.limits, settings))
    return replace(upstream, gates=upstream.gates[common:])


def _endpoints(
    declared: UpstreamSettings, context: ssl.SSLContext | None, connect_time: float
) -> list[HttpEndpoint]:
    server_name = declared.tls.server_name if declared.tls is not None else None
    return [
        HttpEndpoint(server_at(url, context, server_name), connect_time)
        for url in declared.endpoints
    ]


def _gates(place: str, declared: Places, settings: Settings) -> tuple[Gate, ...]:
    if declared.requests == "unlimited":
        return ()
    most = part_of(declared.requests, settings)
    waiting = part_of(declared.waiting, settings) if declared.waiting else 0
    return (Gate(place, most, waiting, declared.wait_time),)
