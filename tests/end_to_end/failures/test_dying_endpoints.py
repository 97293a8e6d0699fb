"""Upstreams with several endpoints, some of which die, or that health checks find unhealthy."""

from contextlib import AsyncExitStack

import pytest

from tests.support.addresses import HOST, free_address, free_port
from tests.support.gateway import gateway_client, running_gateway, until
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_json,
    json_request,
)
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

GET = request("GET", "/v2/models/m")
POST = request("POST", INFER, json_request())
CHUNKED = request("POST", "/v2/x", None, {"Transfer-Encoding": "chunked"}) + b"1\r\na\r\n0\r\n\r\n"


def _binary(size: int) -> bytes:
    header = binary_header(size)
    return request("POST", INFER, header + bytes(size), {HEADER_LENGTH: str(len(header))})


def _named(name: bytes) -> Script:
    return always_respond(http_response(b'{"name":"%b","outputs":[]}' % name))


@pytest.mark.parametrize(
    "data", [GET, POST, CHUNKED, _binary(8), _binary(200_000)], ids=lambda data: len(data)
)
async def test_dead_endpoint_is_not_noticed_by_clients(data: bytes) -> None:
    async with ScriptedServer(_named(b"here")) as server:
        urls = [f"http://{free_address()}", server.url, f"http://{free_address()}"]
        async with gateway_client(*urls) as client:
            for _ in range(12):
                reply = await client.ask(data)
                assert (reply.status, reply.json["name"]) == (200, "here")
        assert len(server.requests) == 12


async def test_endpoint_that_dies_on_a_reused_connection_is_retried_elsewhere() -> None:
    async def dying(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(b'{"name":"first","outputs":[]}'))
        await connection.request()
        first._server.close()

    async with ScriptedServer(dying) as first, ScriptedServer(_named(b"second")) as second:
        async with gateway_client(first.url, second.url) as client:
            replies = [await client.ask(data) for data in (GET, GET, POST, GET, POST)]
        assert [reply.status for reply in replies] == [200] * 5
        assert [reply.json["name"] for reply in replies] == ["first", *["second"] * 4]


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
