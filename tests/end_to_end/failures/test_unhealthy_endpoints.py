"""An endpoint that health checks found unhealthy still gets a call before its client gets a 503."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from tests.support.addresses import HOST, free_port
from tests.support.gateway import running_gateway, until
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import binary_response, infer_json
from tests.support.servers.scripted_server import Connection, ScriptedServer

GOOD = binary_response(bytes(4))
CALLS = 100
"""More than the retry budget allows."""

REQUESTS = {
    "fast path": infer_json(),
    "streaming path": message(
        "POST /v2/x HTTP/1.1",
        {"Host": "x", "Content-Length": "100000", "Expect": "100-continue"},
        bytes(100_000),
    ),
    "pass-through": request("GET", "/v2/x"),
}


async def _recovering(connection: Connection) -> None:
    """Be not ready for the first health check, and serve calls nevertheless."""
    while True:
        is_check = (await connection.request()).head.target == "/v2/health/ready"
        await connection.send(http_response(status="503 Not Ready") if is_check else GOOD)


@pytest.mark.parametrize("data", REQUESTS.values(), ids=REQUESTS)
async def test_unhealthy_endpoint_is_tried_if_the_healthy_one_refuses(data: bytes) -> None:
    checks = {"health_check": {"interval": "1h"}}
    async with AsyncExitStack() as until_it_dies, ScriptedServer(_recovering) as recovering:
        healthy = ScriptedServer(host=HOST, port=free_port())
        await until_it_dies.enter_async_context(healthy)
        async with running_gateway(healthy.url, recovering.url, upstream=checks) as gateway:
            members = gateway.pool.members
            await until(lambda: [each.probed.healthy for each in members] == [True, False])
            await until_it_dies.aclose()
            async with gateway.client() as client:
                replies = [await client.ask(data) for _ in range(CALLS)]
    assert [reply.status for reply in replies] == [200] * CALLS
