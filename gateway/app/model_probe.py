"""The declared models, compared with what servers say of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gateway.app.material import Material
from gateway.app.models import declared_models
from gateway.app.pools import build_pool
from gateway.errors import GatewayError
from gateway.protocol.declared import DeclaredModel, differences
from gateway.routing.matcher import Pattern
from gateway.settings.routes import Route
from gateway.settings.schema import Settings
from gateway.upstream.base import UpstreamEndpoint
from gateway.upstream.metadata_cache import (
    ServerRefusalError,
    fetch_max_batch_size,
    fetch_metadata,
)

_TIME = 10.0
"""Seconds within which a server has to say what it knows of a model."""

# Triton says one or the other of a model that it does not have, by what it is asked.
_UNKNOWN = (400, 404)
_SHOWN = 200
"""Characters that are repeated of a server's own error."""


class Verdict(IntEnum):
    """What came of a comparison; the exit status of ``check --probe`` is the worst of all."""

    AS_DECLARED = 0
    DIFFERENT = 3
    NOT_ASKED = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """What an endpoint says of a model; ``upstream`` is the one that it belongs to."""

    model: str
    upstream: str
    url: str
    verdict: Verdict
    told: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of all models, in order; a model to which no route leads has none."""

    models: Sequence[str]
    findings: Sequence[Finding]

    @property
    def status(self) -> int:
        """Give the exit status: 3 where anything differs, else 4 where a server cannot be asked."""
        found = {finding.verdict for finding in self.findings}
        asked = {finding.model for finding in self.findings}
        if Verdict.DIFFERENT in found or not asked.issuperset(self.models):
            return Verdict.DIFFERENT
        return max(found, default=Verdict.AS_DECLARED)

    def lines(self) -> Iterator[str]:
        """Yield what an operator reads."""
        if not self.models:
            yield "no models are declared"
        for model in self.models:
            findings = [finding for finding in self.findings if finding.model == model]
            yield f"model {model}:" + ("" if findings else " no route leads to it")
            for finding in findings:
                told = "; ".join(finding.told) or "as declared"
                yield f"  {finding.url} (upstream {finding.upstream}): {told}"


async def probe_models(material: Material, time: float = _TIME) -> Report:
    """Ask every server that routes lead a declared model to; each answer may take ``time`` s."""
    models = declared_models(material.settings.models)
    asked_for = _asked_for(material.settings)
    tasks: list[asyncio.Task[list[Finding]]] = []
    async with asyncio.TaskGroup() as group:
        for recipe in material.recipes:
            wanted = [models[name] for name in models if recipe.name in asked_for[name]]
            # Names stay names: it does not matter here which of their addresses answers.
            care = {"resolve": None, "health": None, "discover": None}
            declared = recipe.declared.model_copy(update=care)
            pool = build_pool(declared, recipe.context, recipe.connect_time)
            tasks += [
                group.create_task(_of_endpoint(recipe.name, endpoint, wanted, time))
                for endpoint in pool.endpoints
                if wanted
            ]
    return Report(tuple(models), [finding for task in tasks for finding in task.result()])


def _asked_for(settings: Settings) -> Mapping[str, set[str]]:
    """Tell to which upstreams requests to infer with a model may go, for each that is declared."""
    return {name: set(_upstreams_of(name, settings.routes)) for name in settings.models}


def _upstreams_of(model: str, routes: Sequence[Route]) -> Iterator[str]:
    taken = False  # all requests that name the model are, by a route before
    for route in routes:
        match, rewrite = route.match, route.rewrite
        if match.kinds is not None and "infer" not in match.kinds:
            continue
        named = match.model is None or Pattern.of(match.model).fits(model)
        if rewrite.model == model if rewrite is not None else named and not taken:
            yield from (share.name for share in route.upstream if share.weight)
            if route.mirror is not None:
                yield route.mirror.upstream
        taken = taken or (named and match.version is None and not match.headers)


async def _of_endpoint(
    upstream: str, endpoint: UpstreamEndpoint, models: Sequence[DeclaredModel], time: float
) -> list[Finding]:
    """Ask one server for models, one after the other; it is asked no more once it fails."""
    findings: list[Finding] = []
    verdict = Verdict.AS_DECLARED
    told: Sequence[str] = ()
    try:
        for model in models:
            if verdict is not Verdict.NOT_ASKED:
                verdict, told = await _compared(endpoint, model, time)
            findings.append(Finding(model.metadata.name, upstream, endpoint.url, verdict, told))
    finally:
        await endpoint.close()
    return findings


async def _compared(
    endpoint: UpstreamEndpoint, model: DeclaredModel, time: float
) -> tuple[Verdict, Sequence[str]]:
    name = model.metadata.name
    try:
        async with asyncio.timeout(time):
            known = await fetch_metadata(name, None, endpoint)
            max_batch_size = await fetch_max_batch_size(name, None, endpoint)
    except TimeoutError:
        return Verdict.NOT_ASKED, (f"no answer within {time:g} s",)
    except ServerRefusalError as refusal:
        text = " ".join(refusal.body[:_SHOWN].decode(errors="replace").split())
        if refusal.status in _UNKNOWN:
            return Verdict.DIFFERENT, (f"does not know it: {refusal.status} {text}",)
        return Verdict.NOT_ASKED, (f"answered {refusal.status} {text}",)
    except GatewayError as error:
        return Verdict.NOT_ASKED, (error.message,)
    told = list(differences(model, known, max_batch_size))
    if told:
        return Verdict.DIFFERENT, told
    silent = [] if known.inputs else ["does not say what it takes: what is declared is used"]
    return Verdict.AS_DECLARED, silent
