"""Servers that answer nothing on a connection that lives: new calls take another connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.protocol.grpc.framing import frame
from tests.support.gateway import RunningGateway, gateway_before, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.proto_file import infer_request
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import connect_http2
from tests.support.http_messages import request
from tests.support.inference_messages import binary_header, infer_binary, infer_json
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, never_respond

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

INFER = f"/{SERVICE}/ModelInfer"
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
LONG = ("x-long", "l" * 3000)
_MESSAGE = infer_request()
_BODY = frame(len(_MESSAGE)) + _MESSAGE
_TENSOR = field(1, b"OUT") + field(2, b"FP32") + field(3, b"\x01")
_RESPONSE = field(5, _TENSOR) + field(6, bytes(4))
_RESPONSE_BODY = frame(len(_RESPONSE)) + _RESPONSE
_MANY = 20


async def _hang(peer: Http2Peer) -> None:
    """Respond to the first call, and read nothing from then on."""
    await _respond(peer, 0)
    await peer.stream(1)
    await asyncio.Event().wait()


async def _get_stuck(peer: Http2Peer) -> None:
    """Respond to the first call, and only acknowledge PINGs from then on."""
    await _respond(peer, 0)
    await peer.serve_to_end()


async def _serve(peer: Http2Peer) -> None:
    for number in itertools.count():
        await _respond(peer, number)


async def _respond(peer: Http2Peer, number: int) -> None:
    stream, ok = await peer.request(number), [("grpc-status", "0")]
    await peer.respond(stream, _RESPONSE_BODY, [("content-type", "application/grpc")], ok)


HANGS, GETS_STUCK = http2_script(_hang), http2_script(_get_stuck)

Ask = Callable[[RunningGateway], Awaitable[bool]]
"""Makes a call; tells whether it got a response of the server."""


def _grpc(*headers: tuple[str, str]) -> Ask:
    async def ask(gateway: RunningGateway) -> bool:
        async with connect_http2(gateway.url) as client:
            reply = await client.call("POST", INFER, _BODY, [*GRPC, *headers])
        status = dict([*reply.headers, *reply.trailers])["grpc-status"]
        assert status in ("0", "4")
        return status == "0"

    return ask


async def _json(gateway: RunningGateway) -> bool:
    async with gateway.client() as client:
        reply = await client.ask(infer_json())
    assert reply.status in (200, 504)
    return reply.status == 200


ASKED = {
    "hangs, fast path": (HANGS, "idle_timeout", _grpc()),
    "hangs, streaming path": (HANGS, "idle_timeout", _grpc(LONG)),
    "hangs, JSON": (HANGS, "idle_timeout", _json),
    "hangs, time of a request": (HANGS, "request_timeout", _grpc(LONG)),
    "acknowledges PINGs, fast path": (GETS_STUCK, "idle_timeout", _grpc()),
    "acknowledges PINGs, streaming path": (GETS_STUCK, "idle_timeout", _grpc(LONG)),
}


@pytest.mark.parametrize(("script", "limit", "ask"), ASKED.values(), ids=ASKED)
async def test_one_call_times_out_on_a_silent_connection(
    script: Script, limit: str, ask: Ask
) -> None:
    limits: dict[str, Any] = {limit: "300ms"}
    async with (
        ScriptedServer(script, http2_script(_serve)) as server,
        running_gateway(server.url.replace("http://", "grpc://"), **limits) as gateway,
    ):
        assert await _grpc()(gateway)
        responses = [await ask(gateway) for _ in range(_MANY)]
        assert responses == [False] + [True] * (_MANY - 1)
        assert len(server.connections) == 2
        if script is GETS_STUCK:
            await server.connections[0].left.wait()


@pytest.mark.parametrize("headers", [{}, {"X-Long": "l" * 3000}], ids=["fast path", "streaming"])
async def test_call_waits_until_its_response_begins(headers: dict[str, str]) -> None:
    goes_on = asyncio.Event()

    async def serve(connection: Connection) -> None:
        await connection.request()
        await goes_on.wait()
        await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await connection.wait_for_close()

    async with gateway_before(serve) as (server, gateway):
        find_waiting = gateway.gateway.listener.find_waiting
        async with gateway.client() as client:
            await client.send(request("POST", "/v2/models/m/generate", b"{}", headers))
            await until(lambda: find_waiting(0.0))
            assert list(find_waiting(0.0)) == [("servers", server.url, "m")]
            assert find_waiting(60.0) == {}
            goes_on.set()
            await until(lambda: not find_waiting(0.0))
            assert gateway.gateway.listener.requests == 1


async def test_call_does_not_wait_while_its_client_sends() -> None:
    received = asyncio.Event()

    async def serve(connection: Connection) -> None:
        await connection.head()
        received.set()
        await connection.wait_for_close()

    async with gateway_before(serve) as (_, gateway):
        find_waiting = gateway.gateway.listener.find_waiting
        tensor = bytes(1 << 20)
        data = infer_binary(binary_header(len(tensor)), tensor)
        async with gateway.client() as client:
            await client.send(data[:-1])
            await received.wait()
            assert find_waiting(0.0) == {}
            await client.send(data[-1:])
            await until(lambda: find_waiting(0.0))


@pytest.mark.parametrize("more", [(), (LONG,)], ids=["fast path", "streaming path"])
async def test_grpc_call_waits_for_a_server_over_grpc(more: tuple[tuple[str, str], ...]) -> None:
    async with (
        ScriptedServer(HANGS) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
    ):
        assert await _grpc()(gateway)
        find_waiting = gateway.gateway.listener.find_waiting
        async with connect_http2(gateway.url) as client:
            await client.start("POST", INFER, _BODY, [*GRPC, *more])
            await until(lambda: find_waiting(0.0))
            ((upstream, url, model),) = find_waiting(0.0)
            assert (upstream, url, model) == ("servers", gateway.pool.members[0].endpoint.url, "m")


async def test_operation_that_may_take_long_does_not_wait_for_inference() -> None:
    async with gateway_before(never_respond) as (_, gateway), gateway.client() as client:
        await client.send(request("POST", "/v2/repository/models/m/load", b"{}"))
        await until(lambda: gateway.outstanding)
        assert gateway.gateway.listener.find_waiting(0.0) == {}


async def test_health_checks_find_a_silent_connection_before_calls_do() -> None:
    checks = {"health_check": {"interval": "100ms", "timeout": "100ms", "unhealthy_threshold": 9}}
    async with (
        ScriptedServer(HANGS, http2_script(_serve)) as server,
        running_gateway(server.url.replace("http://", "grpc://"), upstream=checks) as gateway,
    ):
        await until(lambda: len(server.connections) == 2)
        assert await _grpc()(gateway)
        assert len(server.connections) == 2
