"""An address of the other protocol is told apart from a broken server."""

from __future__ import annotations

import logging

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.http2.frames import encode_settings
from tests.support.gateway import UPSTREAM, gateway_client, running_gateway
from tests.support.grpc.client import grpc_client
from tests.support.http_messages import request, with_long_head
from tests.support.servers.grpc_server import GrpcServer
from tests.support.servers.scripted_server import Connection, ScriptedServer

ONLY_HTTP2 = (
    f"{UPSTREAM} responded in HTTP/2 to a request in HTTP/1.1; the address of a gRPC server "
    "begins with grpc://"
)
ONLY_HTTP1 = (
    f"cannot connect to {UPSTREAM}: it responded in HTTP/1.1; the address of a server that speaks "
    "HTTP/1.1 begins with http:// or https://"
)


@pytest.mark.parametrize("path", [bytes, with_long_head], ids=["fast", "streaming"])
async def test_grpc_server_at_an_http_address(path: type[bytes], server: GrpcServer) -> None:
    url = server.url.replace("grpc:", "http:")
    async with gateway_client(url) as client:
        for _ in range(3):
            response = await client.ask(path(request("GET", "/v2/models/m")))
            assert (response.status, response.error) == (502, ONLY_HTTP2)


async def test_server_that_sends_its_settings_before_the_request_and_leaves() -> None:
    async def play(connection: Connection) -> None:
        await connection.send(encode_settings([]))

    async with ScriptedServer(play) as server, gateway_client(server.url) as client:
        for _ in range(10):
            response = await client.ask(request("GET", "/v2/models/m"))
            assert (response.status, response.error) == (502, ONLY_HTTP2)


async def test_http_server_at_a_grpc_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aiohttp.server")  # it logs the preface as an error
    server = TestServer(web.Application())
    await server.start_server()
    try:
        async with (
            running_gateway(f"grpc://127.0.0.1:{server.port}") as gateway,
            grpc_client(gateway.url) as client,
            gateway.client() as http_client,
        ):
            called = await client.call("ModelInfer", b"\n\1m")
            response = await http_client.ask(request("GET", "/v2/models/m"))
    finally:
        await server.close()
    assert (called.code, called.text) == (grpc.StatusCode.UNAVAILABLE, ONLY_HTTP1)
    assert (response.status, response.error) == (503, ONLY_HTTP1)
