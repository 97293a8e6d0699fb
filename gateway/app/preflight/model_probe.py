"""Probes the declared models of a server: whether its metadata is as declared."""

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

_UNKNOWN_MODEL = (400, 404)
"""Triton answers one or the other for a model that it does not have, by the request."""

_Result = tuple[Verdict, Sequence[str]]


def upstreams_serving(model: str, routes: Sequence[Route]) -> Iterator[str]:
    """Yield the upstreams to which inference requests for a model may go, in order."""
    is_taken = False  # a route before takes all requests for the model
    for route in routes:
        match, rewrite = route.match, route.rewrite
        if match.operations is not None and "infer" not in match.operations:
            continue
        matches = match.model is None or Pattern.of(match.model).matches(model)
        if rewrite.model == model if rewrite is not None else matches and not is_taken:
            yield from (share.name for share in route.upstream if share.weight)
            if route.mirror is not None:
                yield route.mirror.upstream
        is_taken = is_taken or (matches and match.version is None and not match.headers)


async def probe_models(
    endpoint: UpstreamEndpoint, models: Sequence[DeclaredModel], time_limit: float
) -> Mapping[str, _Result]:
    """Probe models one after the other, each within ``time_limit`` seconds; return results by name.

    After a first failure the server gets no more requests.
    """
    results: dict[str, _Result] = {}
    result: _Result = (Verdict.AS_DECLARED, ())
    for model in models:
        if result[0] is not Verdict.UNAVAILABLE:
            result = await _probe_model(endpoint, model, time_limit)
        results[model.metadata.name] = result
    return results


async def _probe_model(
    endpoint: UpstreamEndpoint, model: DeclaredModel, time_limit: float
) -> _Result:
    name = model.metadata.name
    try:
        async with asyncio.timeout(time_limit):
            metadata = await fetch_metadata(name, None, endpoint)
            max_batch_size = await fetch_max_batch_size(name, None, endpoint)
    except TimeoutError:
        return Verdict.UNAVAILABLE, (f"no response within {time_limit:g} s",)
    except UpstreamResponseError as error:
        quoted = f"{error.status} {excerpt(error.body)}"
        if error.status in _UNKNOWN_MODEL:
            return Verdict.MISMATCH, (f"does not know it: {quoted}",)
        return Verdict.UNAVAILABLE, (f"returned {quoted}",)
    except GatewayError as error:
        return Verdict.UNAVAILABLE, (error.message,)
    differences = list(find_differences(model, metadata, max_batch_size))
    if differences:
        return Verdict.MISMATCH, differences
    messages = [] if metadata.inputs else ["does not say what it takes: what is declared is used"]
    return Verdict.AS_DECLARED, messages
