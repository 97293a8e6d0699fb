"""An address of the other protocol is told apart from a broken server."""

from __future__ import annotations

import grpc
import pytest

from tests.support.gateway import UPSTREAM, gateway_client, running_gateway
from tests.support.grpc.client import grpc_client
from tests.support.http_messages import http_response, request, with_long_head
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


async def says_http1(connection: Connection) -> None:
    """Respond to the preface of HTTP/2 as a server of HTTP/1.1."""
    await connection.head()
    await connection.send(http_response(status="400 Bad Request"))


async def test_http_server_at_a_grpc_address() -> None:
    async with (
        ScriptedServer(says_http1) as server,
        running_gateway(server.url.replace("http:", "grpc:")) as gateway,
        grpc_client(gateway.url) as client,
        gateway.client() as http_client,
    ):
        called = await client.call("ModelInfer", b"\n\1m")
        response = await http_client.ask(request("GET", "/v2/models/m"))
    assert (called.code, called.text) == (grpc.StatusCode.UNAVAILABLE, ONLY_HTTP1)
    assert (response.status, response.error) == (503, ONLY_HTTP1)
