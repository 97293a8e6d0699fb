"""When a fast path call gives back its endpoint, and what the endpoint is blamed for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.errors import bad_response
from tests.proxy.calls.scene import Scene
from tests.support.doubles.fast_path import ReadyEndpoint, response_head
from tests.support.doubles.streaming import (
    LIMITS,
    BodyStep,
    ScriptedClientResponse,
    ScriptedUpstreamResponse,
)

LEFT = "left before its task ran"
BAD: dict[str, tuple[int, BodyStep]] = {
    "broken off": (200, bad_response("it fell over")),
    "stalled": (200, asyncio.Event()),
    "unavailable": (503, b"no"),
    LEFT: (503, b"no"),
}


@pytest.mark.parametrize("how", BAD)
async def test_endpoint_that_begins_a_bad_response_has_failed(how: str) -> None:
    scene = Scene(replace(LIMITS, idle_timeout=0.1))
    other = ReadyEndpoint(url="http://other")
    scene.destination.upstream.pool.set_endpoints([scene.endpoint, other])
    scene.get()
    status, step = BAD[how]
    scene.receiver.on_headers(ScriptedUpstreamResponse(status, {}, [b"begun", step]))
    task = scene.client.begin_task(ScriptedClientResponse(scene.log))
    if how == LEFT:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    members = scene.destination.upstream.pool.members
    assert [member.ejection.failures for member in members] == [1, 0]


async def test_connection_is_released_before_the_response_is_sent() -> None:
    """The client's next request may need the connection to the server."""
    scene = Scene()
    scene.get()
    scene.receiver.on_complete(response_head(), b"")
    scene.get()
    scene.receiver.on_error(bad_response("it fell over"))
    assert scene.log == [
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 200",
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 502",
    ]
