"""Which endpoint gets a request, on the fast path and the streaming path."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.gateway import gateway_client
from tests.support.inference_messages import binary_response, infer_json
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import ScriptedServer, always_respond

COUNT = 3
MODEL = always_respond(binary_response(bytes(4)))


@asynccontextmanager
async def _balanced(policy: object) -> AsyncIterator[tuple[list[ScriptedServer], RawClient]]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer(MODEL)) for _ in range(COUNT)]
        urls = [server.url for server in servers]
        upstream = {"load_balancing": policy}
        yield servers, await stack.enter_async_context(gateway_client(*urls, upstream=upstream))


# The gateway rewrites the second one, with the value of the client.
@pytest.mark.parametrize("header", ["X-User", "X-Request-Id"])
async def test_hash_header_keeps_a_value_on_one_endpoint(
    header: str, path: Callable[[bytes], bytes]
) -> None:
    async with _balanced({"hash_header": header}) as (servers, client):
        # So many that each endpoint gets some: the hash depends on the ports.
        users = [f"user-{number}" for number in range(60)]
        for user in users * 3:
            assert (await client.ask(path(infer_json(headers={header: user})))).status == 200
        seen = [{each.head.get(header) for each in server.requests} for server in servers]
        assert sum(map(len, seen)) == len(users)  # no value was at two endpoints
        assert all(seen)


async def test_round_robin_uses_each_endpoint_in_order(path: Callable[[bytes], bytes]) -> None:
    async with _balanced("round_robin") as (servers, client):
        for _ in range(4 * COUNT):
            assert (await client.ask(path(infer_json()))).status == 200
        assert [len(server.requests) for server in servers] == [4] * COUNT
