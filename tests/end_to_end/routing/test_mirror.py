"""A mirror over real sockets: what it gets, and that no client notices it."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.observe.call_record import CallRecord
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.scripted_server import (
    Connection,
    ReceivedRequest,
    Script,
    ScriptedServer,
    never_respond,
)

pytestmark = pytest.mark.usefixtures("one_identity")

MIB = 2**20
MOST = 64
NOWHERE = "http://127.0.0.1:1"
GENERATE = "/v2/models/m/generate"
STREAM = GENERATE + "_stream"
EVENTS = [b"data: %d\n\n" % number for number in range(3)]


async def model(connection: Connection) -> None:
    """Respond as a server with a model."""
    while True:
        target = (await connection.request()).head.target
        if target == INFER:
            await connection.send(binary_response(FLOATS.tobytes()))
        elif target == STREAM:
            head = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
            await connection.send(message("HTTP/1.1 200 OK", head), *map(chunk, EVENTS), chunk(b""))
        elif target == "/v2/models/m":
            await connection.send(http_response(metadata(-1)))
        else:
            await connection.send(http_response(b'{"text_output":"y"}'))


_HANGS = "copies stay at a mirror that hangs until the gateway stops"


@asynccontextmanager
async def mirrored(
    server: str, shadow: str | None, unchecked: str = "", **limits: Any
) -> AsyncIterator[RunningGateway]:
    """Run a gateway with a mirror or without; closing it waits for no mirror."""
    route = {} if shadow is None else {"mirror": {"upstream": "shadow", "percent": "100%"}}
    others = {"shadow": {"endpoints": [shadow or NOWHERE], "dialect": "triton"}}
    # Else no two requests would be equal.
    general = {"request_id": False, "forwarded": {"headers": False, "via": False}}
    async with running_gateway(
        server, route=route, others=others, general=general, unchecked=unchecked, **limits
    ) as gateway:
        yield gateway


def _in_flight(gateway: RunningGateway) -> int:
    mirror = gateway.gateway.active_config.router.routes[0].mirror
    return 0 if mirror is None else mirror.in_flight


def _buffered_bytes(gateway: RunningGateway) -> int:
    mirror = gateway.gateway.active_config.router.routes[0].mirror
    assert mirror is not None
    return mirror.destination.memory_budget.total


TENSOR = random.Random(7).randbytes(MIB)
HEADER = binary_header(MIB)


async def _both_get(data: bytes, *rest: bytes) -> tuple[ReceivedRequest, ReceivedRequest]:
    """Send a request, one write per part; return what the two servers got."""
    async with ScriptedServer(model) as server, ScriptedServer(model) as shadow:
        async with mirrored(server.url, shadow.url) as gateway:
            async with gateway.client() as client:
                await client.send(data)
                for part in rest:
                    await asyncio.sleep(0.005)
                    await client.send(part)
                assert (await client.read_response()).status == 200
            await until(lambda: len(shadow.requests) == len(server.requests))
            await until(lambda: not _in_flight(gateway))
            assert _buffered_bytes(gateway) == 0
        return server.requests[-1], shadow.requests[-1]


FORMS: dict[str, tuple[bytes, ...]] = {
    "JSON": (infer_json(headers={"X-User": "u"}),),
    "JSON in two writes": (infer_json()[:-9], infer_json()[-9:]),
    "binary, 1 MiB": (infer_binary(HEADER, TENSOR),),
    "that would wait to be told": (request("POST", GENERATE, b"{}", {"Expect": "100-continue"}),),
    "a V1 request": (request("POST", "/v1/models/m:predict", b'{"inputs":%a}' % FLOATS.tolist()),),
    "generate, 1 MiB, chunked": (
        message(f"POST {GENERATE} HTTP/1.1", {"Host": "h", "Transfer-Encoding": "chunked"}),
        chunk(TENSOR[:1000]),
        chunked(TENSOR[1000:]),
    ),
}


def _without_id(body: bytes) -> bytes:
    """Drop the random id of an infer request made from a V1 request."""
    return re.sub(rb'"id":"[0-9a-f-]{36}"', b'"id":""', body)


@pytest.mark.parametrize("parts", FORMS.values(), ids=FORMS)
async def test_mirror_gets_the_same_as_the_server(parts: tuple[bytes, ...]) -> None:
    asked, copied = await _both_get(*parts)
    assert copied.head.first == asked.head.first
    # The fast path sends them in an order of its own.
    assert sorted(copied.head.headers) == sorted(asked.head.headers)
    assert _without_id(copied.body) == _without_id(asked.body)
    if HEADER_LENGTH.lower() in dict(copied.head.headers):
        size = int(copied.head.get(HEADER_LENGTH) or 0)
        assert copied.body[size:] in (TENSOR, FLOATS.tobytes())


REQUESTS = [
    infer_json(),
    infer_json(json_request(*range(50_000))),
    infer_binary(HEADER, TENSOR),
    infer_raw(FLOATS.tobytes()),
    request("GET", "/v2/models/m/stats"),
    request("POST", STREAM, b"{}"),
    request("POST", GENERATE, TENSOR),
    infer_json(b"no JSON"),
    infer_json(),
]


async def closes_during_its_response(connection: Connection) -> None:
    await connection.request()
    await connection.send(http_response(bytes(1000))[:-500])


async def reads_slowly(connection: Connection) -> None:
    """Read a few bytes at a time until the other side closes."""
    while await connection.reader.read(1000):  # noqa: ASYNC110  # that is what slow means
        await asyncio.sleep(0.01)


async def never_ends_its_response(connection: Connection) -> None:
    await connection.request()
    head = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
    await connection.send(message("HTTP/1.1 200 OK", head), *[chunk(bytes(10_000))] * 50)
    await never_respond(connection)


SHADOWS: dict[str, Script | None] = {
    "cannot be reached": None,
    "answers": model,
    "hangs": never_respond,
    "closes within its answer": closes_during_its_response,
    "reads slowly": reads_slowly,
    "never ends its answer": never_ends_its_response,
}


def _seen(reply: ReceivedResponse) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return a response without its Date."""
    return (
        reply.head.first,
        [header for header in reply.head.headers if header[0] != "date"],
        reply.body,
    )


async def _everything(shadow: str | None) -> tuple[list[Any], list[Any]]:
    """Return the responses to successive requests, and what the server got."""
    async with (
        ScriptedServer(model) as server,
        mirrored(server.url, shadow, unchecked=_HANGS if shadow else "") as gateway,
        gateway.client() as client,
    ):
        seen = [_seen(await client.ask(data)) for data in REQUESTS]
        assert not gateway.gateway.listener._active_calls
        pools = gateway.gateway.active_config.upstreams["servers"].pool
        assert pools.outstanding == [0]
        own = server.url.removeprefix("http://")  # the Host of the gateway's own requests
        got = [
            (each.head.first, str(each.head.headers).replace(own, "server"), each.body)
            for each in server.requests
        ]
        return seen, got


@pytest.mark.parametrize("script", SHADOWS.values(), ids=SHADOWS)
async def test_client_gets_the_same_as_without_a_mirror(
    script: Script | None, unused_backlog: str
) -> None:
    alone = await _everything(None)
    if script is None:
        for url in (NOWHERE, unused_backlog):
            assert await _everything(url) == alone
        return
    async with ScriptedServer(script) as shadow:
        assert await _everything(shadow.url) == alone
        assert shadow.connections


async def test_clients_continue_when_the_mirror_is_at_its_cap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hanging mirror takes no slots and no memory of clients."""
    caplog.set_level(logging.WARNING)
    large = infer_json(json_request(*[1.5] * 200_000))  # 800 kB in binary form
    async with (
        ScriptedServer(model) as server,
        ScriptedServer(never_respond) as shadow,
        mirrored(
            server.url,
            shadow.url,
            unchecked=_HANGS,
            max_requests=1,
            max_queue=0,
            max_buffered_bytes="1MiB",
        ) as gateway,
    ):
        async with gateway.client() as client:
            for number in range(MOST + 5):
                assert (await client.ask(infer_json(json_request(number)))).status == 200
            await until(lambda: len(shadow.connections) == MOST)
            for _ in range(3):
                assert (await client.ask(large)).status == 200
        assert _in_flight(gateway) == MOST
    assert (
        "requests failed, 1 were not sent, last: 64 copies are in progress (mirror.max_concurrent)"
        in caplog.messages[0]
    )


@pytest.mark.parametrize(
    ("data", "leave"),
    [
        (infer_binary(HEADER, TENSOR), RawClient.shutdown_write),
        (request("POST", GENERATE, TENSOR), RawClient.reset),
    ],
    ids=["binary, and closes", "generate, and resets"],
)
async def test_client_disconnect_within_its_body_sends_nothing_to_the_mirror(
    data: bytes, leave: Callable[[RawClient], None]
) -> None:
    async with ScriptedServer(model) as server, ScriptedServer(model) as shadow:
        async with mirrored(server.url, shadow.url) as gateway:
            async with gateway.client() as client:
                await client.send(data[:-1000])
                await until(lambda: _buffered_bytes(gateway) > len(data) - 1500)
                leave(client)
                await gateway.until_idle()
            assert (_buffered_bytes(gateway), _in_flight(gateway)) == (0, 0)
        assert shadow.connections == []


async def test_hanging_mirror_does_not_delay_a_drain(call_records: list[CallRecord]) -> None:
    async with ScriptedServer(model) as server, ScriptedServer(never_respond) as shadow:
        async with asyncio.timeout(5):
            async with mirrored(
                server.url, shadow.url, unchecked=_HANGS, drain_timeout=30
            ) as gateway:
                async with gateway.client() as client:
                    for data in (infer_json(), request("POST", GENERATE, TENSOR)):
                        assert (await client.ask(data)).status == 200
                await until(lambda: len(shadow.connections) == 2)
                assert not gateway.gateway.listener._active_calls
            assert gateway.gateway.dropped == 0
            for connection in shadow.connections:
                await connection.left.wait()
    assert len(call_records) == 2, "observers see the clients' calls, not the copies"


async def test_call_during_a_drain_is_still_mirrored() -> None:
    free = asyncio.Event()

    async def waits(connection: Connection) -> None:
        await connection.request()
        await free.wait()
        await connection.send(http_response(b"{}"))

    async with ScriptedServer(waits) as server, ScriptedServer(never_respond) as shadow:
        serving = mirrored(server.url, shadow.url, unchecked=_HANGS, drain_timeout=30)
        gateway = await serving.__aenter__()
        async with gateway.client() as client, asyncio.timeout(5):
            await client.send(request("POST", GENERATE, b"{}"))
            await until(lambda: shadow.connections)
            leaving = asyncio.create_task(serving.__aexit__(None, None, None))
            await until(lambda: gateway.gateway.listener.draining)
            assert _in_flight(gateway) == 1
            free.set()
            assert (await client.read_response()).status == 200
            await leaving
        assert _in_flight(gateway) == 0
