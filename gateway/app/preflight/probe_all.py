"""``check --probe``: asks each server that routes lead to what it is, and for declared models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.app.build.routes import declared_models
from gateway.app.build.upstreams import UpstreamSpec, build_pool
from gateway.app.loaded_resources import LoadedResources
from gateway.app.preflight.model_probe import probe_models, upstreams_serving
from gateway.app.preflight.report import ProbeResult, Report, Verdict
from gateway.app.preflight.server_probe import probe_grpc_address, probe_server
from gateway.protocol.declared_model import DeclaredModel
from gateway.settings.schema import Settings
from gateway.upstream.transport import UpstreamEndpoint

_TIMEOUT = 10.0
"""Seconds for a server to say what it is, and again for each model."""

_MAX_CONCURRENT = 100
"""Servers that are probed at a time: each takes a connection, and DNS takes threads."""


@dataclass(frozen=True, slots=True)
class _EndpointResult:
    """The results of the addresses of an endpoint, and of models there by name."""

    servers: Sequence[ProbeResult]
    models: Mapping[str, ProbeResult]


async def probe_servers(resources: LoadedResources, time_limit: float = _TIMEOUT) -> Report:
    """Probe every endpoint that routes or mirrors lead to; ``time_limit`` is for each request."""
    settings = resources.settings
    models = declared_models(settings.models)
    serving = {name: set(upstreams_serving(name, settings.routes)) for name in models}
    used = _used_upstreams(settings)
    slots = asyncio.Semaphore(_MAX_CONCURRENT)
    tasks: list[asyncio.Task[_EndpointResult]] = []
    async with asyncio.TaskGroup() as group:
        for spec in resources.upstream_specs:
            if spec.name in used:
                wanted = [models[name] for name in models if spec.name in serving[name]]
                tasks += [
                    group.create_task(_probe_endpoint(spec, endpoint, wanted, time_limit, slots))
                    for endpoint in _endpoints(spec)
                ]
    results = [task.result() for task in tasks]
    return Report(
        [server for result in results for server in result.servers],
        {name: [each.models[name] for each in results if name in each.models] for name in models},
    )


def _used_upstreams(settings: Settings) -> set[str]:
    """Return the names of upstreams that get requests, or copies of them."""
    shares = (share for route in settings.routes for share in route.upstream)
    mirrors = (route.mirror for route in settings.routes)
    return {share.name for share in shares if share.weight} | {
        mirror.upstream for mirror in mirrors if mirror is not None
    }


def _endpoints(spec: UpstreamSpec) -> Sequence[UpstreamEndpoint]:
    # Without DNS refresh an endpoint per name, whichever of its addresses model_results.
    unsupervised = {"dns_refresh": None, "health_check": None, "model_discovery": False}
    declared = spec.declared.model_copy(update=unsupervised)
    return build_pool(replace(spec, declared=declared)).endpoints


async def _probe_endpoint(
    spec: UpstreamSpec,
    endpoint: UpstreamEndpoint,
    models: Sequence[DeclaredModel],
    time_limit: float,
    slots: asyncio.Semaphore,
) -> _EndpointResult:
    """Probe a server and its models; after a first failure it gets no more requests."""

    def result(verdict: Verdict, messages: Sequence[str], url: str = endpoint.url) -> ProbeResult:
        return ProbeResult(spec.name, url, verdict, messages)

    async with slots:
        try:
            server = result(*await probe_server(endpoint, spec.declared.dialect, time_limit))
            servers = [server]
            for address in endpoint.addresses[1:]:
                probed = await probe_grpc_address(address, time_limit)
                servers.append(result(*probed, url=address.url))
            if server.verdict is Verdict.UNAVAILABLE:
                return _EndpointResult(servers, {model.metadata.name: server for model in models})
            model_results = await probe_models(endpoint, models, time_limit)
        finally:
            await endpoint.close()
    return _EndpointResult(servers, {name: result(*each) for name, each in model_results.items()})
