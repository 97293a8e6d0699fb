"""Loads and unloads: which endpoints get them under model discovery, and cached metadata."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.protocol.tensors import ModelMetadata
from gateway.proxy.destination import Destination
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from tests.support.doubles.cluster import (
    A,
    B,
    ServerStep,
    connect_error,
    received_requests,
    scripted_response,
    send_request,
    servers,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    LIMITS,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_destination,
    ready,
    single_destination,
)
from tests.support.inference_messages import metadata

LOAD = "/v2/repository/models/m/load"
OK = scripted_response(b"")
SHORT = replace(LIMITS, idle_timeout=0.2)


# ---------------------------------------------------------------------------------- model discovery


INDEX = "POST /v2/repository/index"
UNLOAD = "/v2/repository/models/m/unload"


def _has(*models: str) -> ServerStep:
    """Return the index of a server."""
    return scripted_response(
        json.dumps([{"name": model, "state": "READY"} for model in models]).encode()
    )


def _discovering(endpoints: Sequence[ScriptedEndpoint], known: str) -> Destination:
    """Return a route to endpoints with these models, a letter each; ? if they are unknown."""
    destination = make_destination(
        *endpoints, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(60))
    )
    for member, model in zip(destination.upstream.pool.members, known, strict=True):
        member.models = None if model == "?" else ready(*model)
    return destination


@pytest.mark.parametrize("known", ["nmn", "???"])
@pytest.mark.parametrize(
    ("method", "target", "sent"),
    [("POST", UNLOAD, UNLOAD), ("GET", "/v2/models/m/trace", "/v2/models/m/trace/setting")],
)
async def test_unload_goes_to_the_endpoints_that_have_the_model(
    known: str, method: str, target: str, sent: str
) -> None:
    endpoints = servers(a=(_has("n", "m"), OK), b=(_has("m"), OK), c=_has("n"))
    response = await send_request(
        single_destination(_discovering(endpoints, known)), method, target
    )
    assert response.status == 200
    assert received_requests(*endpoints) == [[INDEX, f"{method} {sent}"]] * 2 + [[INDEX]]


async def test_unload_of_an_unknown_model_goes_to_all_endpoints() -> None:
    endpoints = servers(
        a=(_has("n"), scripted_response(b"no", 400)), b=(_has(), scripted_response(b"none", 400))
    )
    response = await send_request(single_destination(_discovering(endpoints, "mm")), "POST", UNLOAD)
    assert (response.status, response.body) == (400, b"no")
    assert received_requests(*endpoints) == [[INDEX, f"POST {UNLOAD}"]] * 2


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (connect_error(B), f"cannot connect to {B}: Connection refused"),
        (asyncio.Event(), f"waiting for {B}: nothing moved for 0.2 s (limits.idle_timeout)"),
    ],
)
async def test_endpoint_whose_models_cannot_be_listed_is_named(step: ServerStep, why: str) -> None:
    endpoints = servers(a=(_has("m"), OK), b=(step, step))
    destination = replace(_discovering(endpoints, "mn"), limits=SHORT)
    response = await send_request(single_destination(destination), "POST", UNLOAD)
    assert response.status == 502
    error = json.loads(response.body)["error"]
    assert error == f"POST {UNLOAD} succeeded at {A}; failed: {why}"
    assert sum(destination.upstream.pool.outstanding) == 0


@pytest.mark.parametrize("step", [scripted_response(b"", 500), scripted_response(b"no index")])
async def test_endpoint_without_a_model_list_gets_the_unload(step: ServerStep) -> None:
    endpoints = servers(a=(_has("m"), OK), b=(step, OK))
    assert (
        await send_request(single_destination(_discovering(endpoints, "mn")), "POST", UNLOAD)
    ).status == 200
    assert received_requests(*endpoints) == [[INDEX, f"POST {UNLOAD}"]] * 2


async def test_load_goes_to_all_endpoints_without_listing_models() -> None:
    endpoints = servers(a=OK, b=OK)
    assert (
        await send_request(single_destination(_discovering(endpoints, "mn")), "POST", LOAD)
    ).status == 200
    assert received_requests(*endpoints) == [[f"POST {LOAD}"]] * 2


# ---------------------------------------------------------------------------------- cached metadata


async def _known(destination: Destination) -> ModelMetadata:
    """Fill the cache with the model, or return what it has."""
    (source,) = servers(source=(scripted_response(metadata(-1)), ScriptedUpstreamResponse(404)))
    return await destination.upstream.metadata.get("m", None, source)


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize("step", [OK, connect_error(B)])
async def test_load_drops_cached_metadata_in_every_upstream(verb: str, step: ServerStep) -> None:
    one, canary = servers(a=OK, b=step)
    router = [make_destination(one), make_destination(canary, name="canary")]
    before = [await _known(destination) for destination in router]
    assert [await _known(destination) for destination in router] == before
    await send_request(weighted_destinations(*router), "POST", f"/v2/repository/r/models/m/{verb}")
    for destination, old in zip(router, before, strict=True):
        assert await _known(destination) is not old


async def test_load_keeps_cached_metadata_of_other_models_and_upstreams() -> None:
    endpoints = servers(a=(OK, OK), b=(OK, OK), c=OK)
    one, two, elsewhere = (make_destination(each) for each in endpoints)
    router = Router([Route(Match(), (one, two), (1, 1)), Route(Match(), (elsewhere,))], lambda: 0.0)
    before = [await _known(destination) for destination in (one, two, elsewhere)]
    await send_request(router, "POST", "/v2/repository/models/m2/load")
    assert [await _known(destination) for destination in (one, two, elsewhere)] == before
    await send_request(router, "POST", LOAD)
    assert await _known(elsewhere) is before[2]
