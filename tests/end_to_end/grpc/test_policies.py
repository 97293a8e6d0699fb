"""Calls that a route refuses reach no server over gRPC, in whatever form they come."""

from __future__ import annotations

import itertools

import pytest

from gateway.protocol.grpc.framing import frame
from tests.support.gateway import gateway_client, running_gateway
from tests.support.grpc.client import SERVICE
from tests.support.http2_client import connect_http2
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import ScriptedServer

_UNLOAD = f"/{SERVICE}/RepositoryModelUnload"
_MESSAGE = b"\x12\x01m"
_DENIED = {"deny_operations": ["repository"]}


class _Lenient:
    """A server that takes every request for a call, as grpc-go does without ``te``."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, peer: Http2Peer) -> None:
        for number in itertools.count():
            stream = await peer.request(number)
            self.paths.append(stream.path)
            await peer.respond(stream, frame(0), trailers=[("grpc-status", "0")])


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto"])
async def test_request_over_http1_that_looks_like_a_call_is_none(content_type: str) -> None:
    lenient = _Lenient()
    body = frame(len(_MESSAGE)) + _MESSAGE
    async with (
        ScriptedServer(http2_script(lenient)) as server,
        gateway_client(server.url.replace("http://", "grpc://"), route=_DENIED) as client,
    ):
        head = f"POST {_UNLOAD} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n"
        await client.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        response = await client.read_response()
    assert response.status == 501
    assert lenient.paths == []


@pytest.mark.parametrize("method", ["PUT", "GET"])
async def test_request_of_another_method_that_looks_like_a_call_is_none(method: str) -> None:
    lenient = _Lenient()
    async with (
        ScriptedServer(http2_script(lenient)) as server,
        running_gateway(server.url.replace("http://", "grpc://"), route=_DENIED) as gateway,
        connect_http2(gateway.url) as client,
    ):
        headers = [("content-type", "application/grpc"), ("te", "trailers")]
        response = await client.call(method, _UNLOAD, frame(0), headers)
    assert response.status == 501
    assert lenient.paths == []
