"""A mirror over real sockets: what it gets, and that no client notices it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.observe.call_record import CallRecord
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, never_respond

pytestmark = pytest.mark.usefixtures("one_identity")

MIB = 2**20
MOST = 64
NOWHERE = "http://127.0.0.1:1"
GENERATE = "/v2/models/m/generate"
STREAM = GENERATE + "_stream"
EVENTS = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
TENSOR = random.Random(7).randbytes(MIB)
BINARY = infer_binary(binary_header(MIB), TENSOR)


async def model(connection: Connection) -> None:
    """Respond as a server with a model."""
    responses = {
        INFER: binary_response(FLOATS.tobytes()),
        STREAM: message("HTTP/1.1 200 OK", EVENTS, chunked(b"data: 1\n\n", b"data: 2\n\n")),
        "/v2/models/m": http_response(metadata(-1)),
    }
    other = http_response(b'{"text_output":"y"}')
    while True:
        target = (await connection.request()).head.target
        await connection.send(responses.get(target, other))


_HANGS = "copies stay at a mirror that hangs until the gateway stops"


@asynccontextmanager
async def mirrored(
    server: str, shadow: str | None, unchecked: str = _HANGS, **limits: Any
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


def _state(gateway: RunningGateway) -> tuple[int, int]:
    """Return the copies in flight, and their bytes."""
    mirror = gateway.gateway.active_config.router.routes[0].mirror
    if mirror is None:
        return 0, 0
    return mirror.in_flight, mirror.destination.memory_budget.total


COPIED = [
    infer_json(headers={"X-User": "u"}),
    infer_json(json_request(*range(50_000))),
    BINARY,
    infer_raw(FLOATS.tobytes()),
    request("POST", STREAM, b"{}"),
    request("POST", GENERATE, TENSOR),
    message(f"POST {GENERATE} HTTP/1.1", EVENTS | {"Host": "h"}, chunked(TENSOR[:9], TENSOR[9:])),
]
REQUESTS = [*COPIED, request("GET", "/v2/models/m/stats"), infer_json(b"no JSON"), infer_json()]


async def closes_during_its_response(connection: Connection) -> None:
    await connection.request()
    await connection.send(http_response(bytes(1000))[:-500])


async def reads_slowly(connection: Connection) -> None:
    """Read a few bytes at a time until the other side closes."""
    while await connection.reader.read(1000):  # noqa: ASYNC110  # that is what slow means
        await asyncio.sleep(0.01)


async def never_ends_its_response(connection: Connection) -> None:
    await connection.request()
    await connection.send(message("HTTP/1.1 200 OK", EVENTS), *[chunk(bytes(10_000))] * 50)
    await never_respond(connection)


SHADOWS: dict[str, Script | None] = {
    "cannot be reached": None,
    "answers": model,
    "hangs": never_respond,
    "closes within its answer": closes_during_its_response,
    "reads slowly": reads_slowly,
    "never ends its answer": never_ends_its_response,
}


def _received(server: ScriptedServer) -> list[tuple[str, list[tuple[str, str]], bytes]]:
    """Return what a server got; the fast path sends headers in an order of its own."""
    own = server.url.removeprefix("http://")  # the Host of the gateway's own requests
    return [
        (
            each.head.first,
            sorted((name, value.replace(own, "server")) for name, value in each.head.headers),
            each.body,
        )
        for each in server.requests
    ]


async def _everything(shadow: str | None) -> tuple[list[Any], list[Any]]:
    """Return the responses to successive requests, and what the server got."""
    async with (
        ScriptedServer(model) as server,
        mirrored(server.url, shadow) as gateway,
        gateway.client() as client,
    ):
        seen = []
        for data in REQUESTS:
            reply = await client.ask(data)
            headers = [header for header in reply.head.headers if header[0] != "date"]
            seen.append((reply.head.first, headers, reply.body))
        assert not gateway.gateway.listener._active_calls
        assert gateway.gateway.active_config.upstreams["servers"].pool.outstanding == [0]
        return seen, _received(server)


@pytest.mark.parametrize("script", SHADOWS.values(), ids=SHADOWS)
async def test_client_gets_the_same_as_without_a_mirror_which_gets_the_same_as_the_server(
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
        if script is model:
            await until(lambda: len(_posts(_received(shadow))) == len(COPIED) + 1)
            assert sorted(_posts(_received(shadow))) == sorted(_posts(alone[1]))


def _posts(received: list[Any]) -> list[Any]:
    return [each for each in received if each[0].startswith("POST")]


async def test_clients_continue_when_the_mirror_is_at_its_cap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hanging mirror takes no slots and no memory of clients."""
    caplog.set_level(logging.WARNING)
    large = infer_json(json_request(*[1.5] * 200_000))  # 800 kB in binary form
    limits: dict[str, Any] = {"max_requests": 1, "max_queue": 0, "max_buffered_bytes": "1MiB"}
    async with (
        ScriptedServer(model) as server,
        ScriptedServer(never_respond) as shadow,
        mirrored(server.url, shadow.url, **limits) as gateway,
    ):
        async with gateway.client() as client:
            for number in range(MOST + 5):
                assert (await client.ask(infer_json(json_request(number)))).status == 200
            await until(lambda: len(shadow.connections) == MOST)
            for _ in range(3):
                assert (await client.ask(large)).status == 200
        assert _state(gateway)[0] == MOST
    assert (
        "requests failed, 1 were not sent, last: 64 copies are in progress (mirror.max_concurrent)"
        in caplog.messages[0]
    )


@pytest.mark.parametrize("data", [BINARY, request("POST", GENERATE, TENSOR)], ids=["binary", "any"])
async def test_client_disconnect_within_its_body_sends_nothing_to_the_mirror(data: bytes) -> None:
    async with ScriptedServer(model) as server, ScriptedServer(model) as shadow:
        async with mirrored(server.url, shadow.url, unchecked="") as gateway:
            async with gateway.client() as client:
                await client.send(data[:-1000])
                await until(lambda: _state(gateway)[1] > len(data) - 1500)
                client.reset()
                await gateway.until_idle()
            assert _state(gateway) == (0, 0)
        assert shadow.connections == []


async def test_hanging_mirror_does_not_delay_a_drain(call_records: list[CallRecord]) -> None:
    async with ScriptedServer(model) as server, ScriptedServer(never_respond) as shadow:
        async with asyncio.timeout(5):
            async with mirrored(server.url, shadow.url, drain_timeout=30) as gateway:
                async with gateway.client() as client:
                    for data in (infer_json(), request("POST", GENERATE, TENSOR)):
                        assert (await client.ask(data)).status == 200
                await until(lambda: len(shadow.connections) == 2)
                assert not gateway.gateway.listener._active_calls
            assert gateway.gateway.dropped == 0
            for connection in shadow.connections:
                await connection.left.wait()
    assert len(call_records) == 2, "observers see the clients' calls, not the copies"
