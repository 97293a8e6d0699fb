"""Settings → the upstreams."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

from gateway.exchange.base import Upstream
from gateway.protocol.dialects import DIALECTS
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
    clock = asyncio.get_running_loop().time
    return {
        name: Upstream(
            name,
            DIALECTS[declared.dialect],
            Pool(_endpoints(declared, contexts.get(name), limits.connect_time)),
            MetadataCache(limits.metadata_time, limits.metadata_models, limits.idle_time, clock),
        )
        for name, declared in settings.upstreams.items()
    }


def _endpoints(
    declared: UpstreamSettings, context: ssl.SSLContext | None, connect_time: float
) -> list[HttpEndpoint]:
    server_name = declared.tls.server_name if declared.tls is not None else None
    return [
        HttpEndpoint(server_at(url, context, server_name), connect_time)
        for url in declared.endpoints
    ]
