"""Every server that routes lead to, asked what it is and what it knows of the declared models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.app.build.models import declared_models
from gateway.app.build.pools import build_pool
from gateway.app.build.upstreams import Recipe
from gateway.app.preflight.model_probe import ask_models, upstreams_of
from gateway.app.preflight.report import Finding, Report, Verdict
from gateway.app.preflight.server_probe import ask_server
from gateway.app.reload.resources import Material
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

    server: Finding
    models: Mapping[str, Finding]


async def probe(material: Material, time: float = _TIME) -> Report:
    """Ask every endpoint that routes or mirrors lead to; each answer may take ``time`` seconds."""
    settings = material.settings
    models = declared_models(settings.models)
    leading_to = {name: set(upstreams_of(name, settings.routes)) for name in models}
    used = _used(settings)
    places = asyncio.Semaphore(_AT_ONCE)
    tasks: list[asyncio.Task[_Visit]] = []
    async with asyncio.TaskGroup() as group:
        for recipe in material.recipes:
            if recipe.name in used:
                wanted = [models[name] for name in models if recipe.name in leading_to[name]]
                tasks += [
                    group.create_task(_visit(recipe, endpoint, wanted, time, places))
                    for endpoint in _endpoints(recipe)
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


def _endpoints(recipe: Recipe) -> Sequence[UpstreamEndpoint]:
    # Names stay names: it does not matter here which of their addresses answers.
    care = {"resolve": None, "health": None, "discover": None}
    declared = recipe.declared.model_copy(update=care)
    return build_pool(
        recipe.name,
        declared,
        recipe.context,
        recipe.connect_time,
        own_request=recipe.own_request,
    ).endpoints


async def _visit(
    recipe: Recipe,
    endpoint: UpstreamEndpoint,
    models: Sequence[DeclaredModel],
    time: float,
    places: asyncio.Semaphore,
) -> _Visit:
    """Ask a server what it is, and for models; one that does not answer is asked no more."""

    def finding(verdict: Verdict, told: Sequence[str]) -> Finding:
        return Finding(recipe.name, endpoint.url, verdict, told)

    async with places:
        try:
            server = finding(*await ask_server(endpoint, recipe.declared.dialect, time))
            if server.verdict is Verdict.NOT_ASKED:
                return _Visit(server, {model.metadata.name: server for model in models})
            answers = await ask_models(endpoint, models, time)
        finally:
            await endpoint.close()
    return _Visit(server, {name: finding(*answer) for name, answer in answers.items()})
