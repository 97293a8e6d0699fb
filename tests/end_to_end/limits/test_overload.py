"""Overload: requests are queued for a while, or refused with 503."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.system.buffers import MAX_WINDOW, MIN_WINDOW
from tests.support.gateway import RunningGateway, gateway_before, running_gateway, until
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import INFER, infer_json, json_request
from tests.support.servers.gated_response import GatedResponse
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer


def _gated(*, is_open: bool = False) -> GatedResponse:
    """Make the script of a server that responds when the test says so."""
    script = GatedResponse(b'{"outputs":[]}')
    if is_open:
        script.may_respond.set()
    return script


def _limits(gateway: RunningGateway) -> tuple[ConcurrencyLimit, ...]:
    return gateway.gateway.active_config.router.routes[0].destinations[0].concurrency_limits


def _active_calls_per_limit(gateway: RunningGateway) -> list[int]:
    return [concurrency_limit.active for concurrency_limit in _limits(gateway)]


def _waiting(gateway: RunningGateway) -> int:
    return sum(concurrency_limit.queued for concurrency_limit in _limits(gateway))


@pytest.mark.parametrize("where", ["gateway", "upstream"])
async def test_concurrency_is_capped_and_the_rest_is_queued(
    where: str, path: Callable[[bytes], bytes]
) -> None:
    script = _gated(is_open=True)
    data = path(infer_json())
    concurrency: dict[str, Any] = {"max_requests": 2, "max_queue": 3, "queue_timeout": 30}
    own = {"upstream": {"concurrency": concurrency}} if where == "upstream" else concurrency
    async with (
        gateway_before(script, **own) as (_, gateway),
        AsyncExitStack() as stack,
        asyncio.TaskGroup() as tasks,
    ):
        clients = [await stack.enter_async_context(gateway.client()) for _ in range(6)]
        # There is an idle connection from now on.
        assert (await clients[0].ask(data)).status == 200
        script.may_respond.clear()
        asked = [tasks.create_task(client.ask(data)) for client in clients[:5]]
        await until(lambda: _waiting(gateway) == 3)
        assert _active_calls_per_limit(gateway) == [2]
        reply = await clients[5].ask(data)
        assert (reply.status, reply.head.get("Retry-After")) == (503, "1")
        name = "the gateway" if where == "gateway" else "upstream 'servers'"
        assert reply.error == f"{name} is busy: 2 calls in progress, and 3 more wait"
        assert gateway.outstanding == 2
        script.may_respond.set()
        assert [(await task).status for task in asked] == [200] * 5
        assert (await clients[5].ask(data)).status == 200


each_form = pytest.mark.parametrize("target", [INFER, "/v2/models/m/generate"])


@each_form
async def test_refused_call_is_answered_before_its_body_is_sent(target: str) -> None:
    script = _gated()
    headers = {"Content-Length": "900000", "Expect": "100-continue"}
    async with (
        gateway_before(script, max_requests=1, max_queue=0) as (server, gateway),
        gateway.client() as one,
        gateway.client() as other,
    ):
        await one.send(request("GET", "/v2/one"))
        await until(lambda: gateway.outstanding == 1)
        await other.send(request("POST", target, headers=headers))
        reply = await other.read_response()  # a 100 would come first
        assert reply.status == 503
        assert "the gateway is busy: 1 call in progress" in reply.error
        script.may_respond.set()
        assert (await one.read_response()).status == 200
        assert [each.head.target for each in server.requests] == ["/v2/one"]


@each_form
async def test_slow_upload_holds_no_slot(target: str) -> None:
    async with (
        gateway_before(max_requests=1, max_queue=0) as (_, gateway),
        gateway.client() as slow,
        gateway.client() as other,
    ):
        await slow.send(request("POST", target, headers={"Content-Length": "100"}))
        listener = gateway.gateway.listener
        await until(lambda: listener.requests == 1 and not listener.deferrals.size)
        assert (await other.ask(request("GET", "/v2/x"))).status == 200
        assert _active_calls_per_limit(gateway) == [0]


def _then_busy(busy: asyncio.Event) -> Script:
    """Return a script that responds once, and then with 503 when the test says so."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        while True:
            await connection.request()
            await busy.wait()
            await connection.send(http_response(status="503 Busy"))

    return script


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_retried_request_keeps_its_slot(leaves: bool, fast_path_requests: list[str]) -> None:
    busy, script = asyncio.Event(), _gated(is_open=True)
    concurrency = {"max_requests": 1, "max_queue": 1, "queue_timeout": 30}
    async with (
        ScriptedServer(_then_busy(busy)) as bad,
        ScriptedServer(script) as good,
        running_gateway(
            bad.url, good.url, upstream={"concurrency": concurrency}, route={"retry_on": [503]}
        ) as gateway,
        gateway.client() as other,
    ):
        async with gateway.client() as one:
            for _ in range(2):  # so that either has an idle connection
                assert (await one.ask(request("GET", "/v2/warm"))).status == 200
            script.may_respond.clear()
            await one.send(request("GET", "/v2/one"))
            await until(lambda: gateway.outstanding == 1)
            await other.send(request("GET", "/v2/other"))
            await until(lambda: _waiting(gateway) == 1)
            busy.set()
            await until(lambda: len(good.requests) == 2)
            assert _active_calls_per_limit(gateway) == [1]
            if not leaves:
                script.may_respond.set()
                assert (await one.read_response()).status == 200
        script.may_respond.set()
        assert (await other.read_response()).status == 200
        assert [each.head.target for each in good.requests] == ["/v2/warm", "/v2/one", "/v2/other"]
        assert "/v2/one" in fast_path_requests
        await gateway.until_idle()
        assert _active_calls_per_limit(gateway) == [0]


MIB = 2**20


async def test_buffered_bytes_of_all_bodies_are_bounded() -> None:
    body = json_request(*[1.5] * 200_000)  # 800 kB in binary form
    async with (
        gateway_before(max_buffered_bytes="1MiB") as (_, gateway),
        gateway.client() as one,
        gateway.client() as other,
    ):
        head = request("POST", INFER, headers={"Content-Length": str(len(body))})
        await one.send(head, body[:-100])
        budget = gateway.gateway.active_config.router.routes[0].destinations[0].memory_budget
        await until(lambda: budget.total > 700_000)
        reply = await other.ask(infer_json(body))
        assert reply.status == 503
        assert reply.head.get("Retry-After") == "1"
        assert "at most 1048576 bytes may be buffered (limits.max_buffered_bytes)" in reply.error
        # Small and passthrough requests are not affected.
        assert (await other.ask(infer_json())).status == 200
        assert (await other.call("POST", "/v2/x", bytes(2 * MIB))).status == 200
        await one.send(body[-100:])
        assert (await one.read_response()).status == 200
        await gateway.until_idle()
        assert budget.total == 0
        assert (await other.ask(infer_json(body))).status == 200


async def test_bytes_that_clients_send_ahead_are_bounded_together() -> None:
    """Each client may send requests ahead, but all together not as much as each alone."""
    free = asyncio.Event()
    count, budget = 40, 2**20

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            await free.wait()
            await connection.send(http_response(b"%d" % len(received.body)))

    data, next_one = request("GET", "/v2/x"), request("POST", "/v2/x", bytes(200_000))
    async with (
        gateway_before(script, max_buffered_bytes=budget) as (server, gateway),
        AsyncExitStack() as stack,
    ):
        buffers = gateway.gateway.listener.buffers
        clients = [await stack.enter_async_context(gateway.client()) for _ in range(count)]
        for client in clients:
            await client.send(data)
        await until(lambda: len(server.requests) == count)
        for client in clients:
            client.send_nowait(next_one)
        await until(lambda: buffers.free < 0)
        await asyncio.sleep(0.2)  # time for more to arrive
        assert buffers.total < budget + MAX_WINDOW + count * MIN_WINDOW
        free.set()
        for client in clients:
            assert (await client.read_response()).body == b"0"
            reply = await client.read_response()
            assert reply.body == b"200000" or reply.status == 503
        await gateway.until_idle()
        assert (buffers.reserved, buffers.buffered, buffers.streams) == (0, 0, 0)


async def test_long_heads_of_responses_count() -> None:
    fields = {f"X{n}": "x" * 500 for n in range(100)}
    head = message("HTTP/1.1 200 OK", {**fields, "Content-Length": "5"})
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(head[:-2])
            await go_on.wait()
            await connection.send(b"\r\nhello")

    async with gateway_before(script) as (_, gateway):
        buffers = gateway.gateway.listener.buffers
        async with gateway.client() as client:
            for _ in range(2):  # the second takes the fast path
                await client.send(request("GET", "/v2/x"))
                await until(lambda: buffers.buffered > 50_000)
                go_on.set()
                assert (await client.read_response()).body == b"hello"
                assert buffers.buffered == 0
                go_on.clear()
            await client.send(request("GET", "/v2/x"))
            await until(lambda: buffers.buffered > 50_000)
        await until(lambda: buffers.buffered == 0)
