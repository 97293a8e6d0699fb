"""Every server that routes lead to, asked what it is and what it knows of the declared models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.app.build.models import declared_models
from gateway.app.build.pools import build_pool
from gateway.app.build.upstreams import UpstreamSpec
from gateway.app.preflight.model_probe import probe_models, upstreams_serving
from gateway.app.preflight.report import ProbeResult, Report, Verdict
from gateway.app.preflight.server_probe import probe_server
from gateway.app.reload.resources import Resources
from gateway.protocol.declared_model import DeclaredModel
from gateway.settings.schema import Settings
from gateway.upstream.transport import UpstreamEndpoint

_TIME = 10.0
"""Seconds within which a server has to say what it is, and again what it knows of each model."""

_AT_ONCE = 100
"""Servers that are asked at a time: each takes a connection, and names take threads."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """What an endpoint says of itself, and of models by name."""

    server: ProbeResult
    models: Mapping[str, ProbeResult]


async def probe(material: Resources, time: float = _TIME) -> Report:
    """Ask every endpoint that routes or mirrors lead to; each answer may take ``time`` seconds."""
    settings = material.settings
    models = declared_models(settings.models)
    leading_to = {name: set(upstreams_serving(name, settings.routes)) for name in models}
    used = _used(settings)
    places = asyncio.Semaphore(_AT_ONCE)
    tasks: list[asyncio.Task[_Visit]] = []
    async with asyncio.TaskGroup() as group:
        for spec in material.upstream_specs:
            if spec.name in used:
                wanted = [models[name] for name in models if spec.name in leading_to[name]]
                tasks += [
                    group.create_task(_visit(spec, endpoint, wanted, time, places))
                    for endpoint in _endpoints(spec)
                ]
    visits = [task.result() for task in tasks]
    return Report(
        [visit.server for visit in visits],
        {name: [each.models[name] for each in visits if name in each.models] for name in models},
    )


def _used(settings: Settings) -> set[str]:
    """Name the upstreams that get requests, or copies of them."""
    shares = (share for route in settings.routes for share in route.upstream)
    mirrors = (route.mirror for route in settings.routes)
    return {share.name for share in shares if share.weight} | {
        mirror.upstream for mirror in mirrors if mirror is not None
    }


def _endpoints(spec: UpstreamSpec) -> Sequence[UpstreamEndpoint]:
    # Names stay names: it does not matter here which of their addresses answers.
    care = {"dns_refresh": None, "health_check": None, "model_discovery": False}
    declared = spec.declared.model_copy(update=care)
    return build_pool(
        spec.name,
        declared,
        spec.context,
        spec.connect_timeout,
        own_request_headers=spec.own_request_headers,
    ).endpoints


async def _visit(
    spec: UpstreamSpec,
    endpoint: UpstreamEndpoint,
    models: Sequence[DeclaredModel],
    time: float,
    places: asyncio.Semaphore,
) -> _Visit:
    """Ask a server what it is, and for models; one that does not answer is asked no more."""

    def finding(verdict: Verdict, told: Sequence[str]) -> ProbeResult:
        return ProbeResult(spec.name, endpoint.url, verdict, told)

    async with places:
        try:
            server = finding(*await probe_server(endpoint, spec.declared.dialect, time))
            if server.verdict is Verdict.UNAVAILABLE:
                return _Visit(server, {model.metadata.name: server for model in models})
            answers = await probe_models(endpoint, models, time)
        finally:
            await endpoint.close()
    return _Visit(server, {name: finding(*answer) for name, answer in answers.items()})
