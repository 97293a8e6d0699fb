"""Failed requests are retried at another server, as far as the route allows."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.gateway import gateway_client, running_gateway, until
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import INFER, binary_response, infer_json, json_request
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    respond_in_turn,
)

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

GOOD = binary_response(bytes(4))
ASKED = {
    "small JSON": infer_json(),
    "large JSON": infer_json(json_request(*range(50_000))),
    "GET": request("GET", "/v2/x"),
}
STREAMED = {
    "large body": request("POST", "/v2/x", bytes(100_000)),
    "chunked": message(
        "POST /v2/x HTTP/1.1",
        {"Host": "x", "Transfer-Encoding": "chunked"},
        chunk(b"body") + chunk(b""),
    ),
}


async def closes(connection: Connection) -> None:
    """Read a request, and close without a response."""
    await connection.request()


def _then(faulty: Script) -> Script:
    """Return a script that responds once, and then does something else."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(GOOD)
        await faulty(connection)

    return script


UNWANTED = http_response(b'{"error":"busy"}', status="503 Busy")
FAULTS = {"no_response": closes, "503": always_respond(UNWANTED)}


async def _warm(client: RawClient) -> None:
    """Give the gateway an idle connection to either server, so that it uses the fast path."""
    for _ in range(2):
        assert (await client.ask(request("GET", "/v2/warm"))).status == 200


@pytest.mark.parametrize("data", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("warm", [False, True], ids=["new", "kept"])
async def test_route_may_allow_more_retries(data: bytes, fault: str, warm: bool) -> None:
    script = _then(FAULTS[fault]) if warm else FAULTS[fault]
    allowed = [int(fault) if fault.isdigit() else fault]
    async with (
        ScriptedServer(script, FAULTS[fault]) as bad,
        ScriptedServer(always_respond(GOOD)) as good,
        gateway_client(bad.url, good.url, route={"retry_on": allowed}) as client,
    ):
        if warm:
            await _warm(client)
        for _ in range(4):
            assert (await client.ask(data)).status == 200
        sent = [each for each in good.requests if each.head.target != "/v2/warm"]
        assert len(sent) == 4
        assert len({each.body for each in sent}) == 1
        failed = [each.body for each in bad.requests if each.head.target != "/v2/warm"]
        assert failed
        assert set(failed) == {sent[0].body}


@pytest.mark.parametrize(("fault", "status"), [("no_response", 502), ("503", 503)])
@pytest.mark.parametrize(
    ("allowed", "data"),
    [
        *(([], data) for data in ASKED.values()),
        *((["no_response", 503], data) for data in STREAMED.values()),
    ],
    ids=[*ASKED, *STREAMED],
)
async def test_request_is_not_retried_by_default_and_a_streamed_body_never(
    allowed: list[str | int], data: bytes, fault: str, status: int
) -> None:
    async with (
        ScriptedServer(FAULTS[fault]) as bad,
        ScriptedServer(always_respond(GOOD)) as good,
        gateway_client(bad.url, good.url, route={"retry_on": allowed}) as client,
    ):
        assert (await client.ask(data)).status == status
        assert good.requests == []


async def test_all_requests_of_one_of_three_servers_may_be_retried() -> None:
    """Even if that is more than the minimum of the budget."""
    gone, free = asyncio.Event(), asyncio.Event()

    async def dies(connection: Connection) -> None:
        await connection.request()
        await gone.wait()

    async def lives(connection: Connection) -> None:
        while True:
            await connection.request()
            await free.wait()
            await connection.send(GOOD)

    async with (
        ScriptedServer(dies) as one,
        ScriptedServer(lives) as two,
        ScriptedServer(lives) as three,
        running_gateway(
            one.url, two.url, three.url, route={"retry_on": ["no_response"]}
        ) as gateway,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(gateway.client()) for _ in range(120)]
        for client in clients:
            await client.send(request("GET", "/v2/x"))
        await until(lambda: gateway.pool.outstanding == [40, 40, 40])
        await until(lambda: len(one.requests) == 40)
        gone.set()
        await until(lambda: len(two.requests) + len(three.requests) == 120)
        free.set()
        assert [(await client.read_response()).status for client in clients] == [200] * 120


async def test_partial_response_is_not_retried() -> None:
    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
    async with (
        ScriptedServer(respond_in_turn(broken)) as bad,
        ScriptedServer(always_respond(GOOD)) as good,
        gateway_client(bad.url, good.url, route={"retry_on": ["no_response"]}) as client,
    ):
        reply = await client.call("GET", "/v2/x")
        assert (reply.status, good.requests) == (502, [])
        assert reply.error.endswith("closed the connection before the end of its response")


async def test_retry_keeps_target_and_headers() -> None:
    async with (
        ScriptedServer(closes) as bad,
        ScriptedServer(always_respond(GOOD)) as good,
        gateway_client(bad.url, good.url, route={"retry_on": ["no_response"]}) as client,
    ):
        for _ in range(2):
            assert (await client.call("POST", INFER, json_request(), {"x-a": "1"})).status == 200
        first, again = bad.requests[0], good.requests[0]
        assert first.head == again.head
