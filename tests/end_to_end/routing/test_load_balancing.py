"""Which endpoint gets a request, on the fast path and the streaming path."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.gateway import gateway_client
from tests.support.inference_messages import binary_response, infer_json
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import ScriptedServer, always_respond

# In one write it takes the fast path; if its end arrives later, it takes a task.
WAYS = {"fast path": 10_000, "streaming path": -4}
COUNT = 3


async def _ask(client: RawClient, first: int, user: str | None, header: str = "X-User") -> None:
    data = infer_json(headers={} if user is None else {header: user})
    await client.send(data[:first])
    if data[first:]:
        await asyncio.sleep(0.005)
        await client.send(data[first:])
    assert (await client.read_response()).status == 200


async def _servers(stack: AsyncExitStack) -> list[ScriptedServer]:
    script = always_respond(binary_response(bytes(4)))
    return [await stack.enter_async_context(ScriptedServer(script)) for _ in range(COUNT)]


# The gateway rewrites the second one, with the value of the client.
@pytest.mark.parametrize("header", ["X-User", "X-Request-Id"])
@pytest.mark.parametrize("first", WAYS.values(), ids=WAYS)
async def test_hash_header_keeps_a_value_on_one_endpoint(first: int, header: str) -> None:
    async with AsyncExitStack() as stack:
        servers = await _servers(stack)
        upstream = {"load_balancing": {"hash_header": header}}
        client = await stack.enter_async_context(
            gateway_client(*[server.url for server in servers], upstream=upstream)
        )
        # So many that each endpoint gets some: the hash depends on the ports.
        users = [f"user-{number}" for number in range(60)]
        for _ in range(3):
            for user in users:
                await _ask(client, first, user, header)
        seen = [{each.head.get(header) for each in server.requests} for server in servers]
        assert sum(map(len, seen)) == len(users)  # no value was at two endpoints
        assert all(seen)


@pytest.mark.parametrize("first", WAYS.values(), ids=WAYS)
async def test_round_robin_uses_each_endpoint_in_order(first: int) -> None:
    async with AsyncExitStack() as stack:
        servers = await _servers(stack)
        client = await stack.enter_async_context(
            gateway_client(
                *[server.url for server in servers], upstream={"load_balancing": "round_robin"}
            )
        )
        for _ in range(4 * COUNT):
            await _ask(client, first, "anybody")
        assert [len(server.requests) for server in servers] == [4] * COUNT
