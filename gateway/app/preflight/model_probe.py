"""The declared models, compared with what a server says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from gateway.app.preflight.report import Verdict, excerpt
from gateway.errors import GatewayError
from gateway.protocol.declared_model import DeclaredModel, find_differences
from gateway.routing.matcher import Pattern
from gateway.settings.routes import Route
from gateway.upstream.metadata_cache import (
    UpstreamResponseError,
    fetch_max_batch_size,
    fetch_metadata,
)
from gateway.upstream.transport import UpstreamEndpoint

# Triton says one or the other of a model that it does not have, by what it is asked.
_UNKNOWN = (400, 404)

_Answer = tuple[Verdict, Sequence[str]]


def upstreams_serving(model: str, routes: Sequence[Route]) -> Iterator[str]:
    """Yield the upstreams that requests to infer with a model may go to, in order."""
    taken = False  # all requests that name the model are, by a route before
    for route in routes:
        match, rewrite = route.match, route.rewrite
        if match.operations is not None and "infer" not in match.operations:
            continue
        named = match.model is None or Pattern.of(match.model).matches(model)
        if rewrite.model == model if rewrite is not None else named and not taken:
            yield from (share.name for share in route.upstream if share.weight)
            if route.mirror is not None:
                yield route.mirror.upstream
        taken = taken or (named and match.version is None and not match.headers)


async def probe_models(
    endpoint: UpstreamEndpoint, models: Sequence[DeclaredModel], time: float
) -> Mapping[str, _Answer]:
    """Ask a server for models, one after the other, ``time`` seconds for each.

    Gives what it says of each, by name; it is asked no more once it fails.
    """
    answers: dict[str, _Answer] = {}
    answer: _Answer = (Verdict.AS_DECLARED, ())
    for model in models:
        if answer[0] is not Verdict.UNAVAILABLE:
            answer = await _compared(endpoint, model, time)
        answers[model.metadata.name] = answer
    return answers


async def _compared(endpoint: UpstreamEndpoint, model: DeclaredModel, time: float) -> _Answer:
    name = model.metadata.name
    try:
        async with asyncio.timeout(time):
            known = await fetch_metadata(name, None, endpoint)
            max_batch_size = await fetch_max_batch_size(name, None, endpoint)
    except TimeoutError:
        return Verdict.UNAVAILABLE, (f"no answer within {time:g} s",)
    except UpstreamResponseError as refusal:
        said = f"{refusal.status} {excerpt(refusal.body)}"
        if refusal.status in _UNKNOWN:
            return Verdict.MISMATCH, (f"does not know it: {said}",)
        return Verdict.UNAVAILABLE, (f"answered {said}",)
    except GatewayError as error:
        return Verdict.UNAVAILABLE, (error.message,)
    told = list(find_differences(model, known, max_batch_size))
    if told:
        return Verdict.MISMATCH, told
    silent = [] if known.inputs else ["does not say what it takes: what is declared is used"]
    return Verdict.AS_DECLARED, silent
