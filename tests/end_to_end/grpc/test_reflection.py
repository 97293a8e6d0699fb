"""The gateway serves reflection itself, in front of any server."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from gateway.proxy.grpc.own_services import MAX_REFLECTION_REQUEST
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.grpc.client import GrpcClient, grpc_client
from tests.support.grpc.proto_file import message_class
from tests.support.servers.grpc_server import GrpcServer

VERSIONS = ("v1", "v1alpha")
Request = message_class("grpc.reflection.v1.ServerReflectionRequest")
Response = message_class("grpc.reflection.v1.ServerReflectionResponse")
LIST = bytes(Request(list_services="*").SerializeToString())


def _path(version: str = "v1") -> str:
    return f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"


@asynccontextmanager
async def _client(*urls: str, **settings: Any) -> AsyncIterator[tuple[RunningGateway, GrpcClient]]:
    async with running_gateway(*urls, **settings) as gateway, grpc_client(gateway.url) as client:
        yield gateway, client


class _Stream:
    """A stream on which questions and answers take turns."""

    def __init__(self, client: GrpcClient) -> None:
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        self.call = client.channel.stream_stream(_path())(
            iter(self._requests.get, None), timeout=20
        )

    async def ask(self) -> Any:
        self._requests.put(LIST)
        return Response.FromString(await asyncio.to_thread(next, self.call))

    async def code(self) -> grpc.StatusCode:
        """Wait until the call has ended."""
        code = await asyncio.to_thread(self.call.code)
        self._requests.put(None)  # ends the thread that reads it
        assert isinstance(code, grpc.StatusCode)
        return code


@pytest.mark.parametrize("version", VERSIONS)
async def test_client_builds_the_services_from_what_it_is_told(gone: str, version: str) -> None:
    """No server has to be there."""
    pool = descriptor_pool.DescriptorPool()
    async with _client(gone) as (_, client):
        listed = await client.call(_path(version), LIST)
        services = [
            each.name for each in Response.FromString(listed.message).list_services_response.service
        ]
        questions = [
            bytes(Request(file_containing_symbol=name).SerializeToString()) for name in services
        ]
        described = await client.call(_path(version), *questions)
    assert described.code is grpc.StatusCode.OK, described.text
    assert len(described.messages) == len(services) == 4
    for message in described.messages:
        (file,) = Response.FromString(message).file_descriptor_response.file_descriptor_proto
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    method = pool.FindMethodByName("inference.GRPCInferenceService.ModelInfer")
    assert method.input_type.fields_by_name["raw_input_contents"].number == 7
    assert all(pool.FindServiceByName(name) for name in services)


async def test_server_is_asked_for_other_methods_of_the_service_alone(server: GrpcServer) -> None:
    path = "/grpc.reflection.v1.ServerReflection/Other"
    async with _client(server.url) as (_, client):
        assert (await client.call(_path(), LIST)).code is grpc.StatusCode.OK
        assert (await client.call(path, b"")).code is grpc.StatusCode.UNIMPLEMENTED
    assert server.paths == [path]


async def test_compressed_request_is_answered_unless_it_becomes_too_large(gone: str) -> None:
    request = Request(file_containing_symbol="x" * 9000).SerializeToString()
    bomb = bytes(MAX_REFLECTION_REQUEST + 1)
    async with _client(gone) as (_, client):
        response = await client.call(_path(), request, compression=grpc.Compression.Gzip)
        refused = await client.call(_path(), bomb, compression=grpc.Compression.Gzip)
    assert Response.FromString(response.message).error_response.error_code == 5
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (b"\x1a\xff", grpc.StatusCode.INVALID_ARGUMENT, "not valid protobuf"),
        (bytes(MAX_REFLECTION_REQUEST + 1), grpc.StatusCode.RESOURCE_EXHAUSTED, "reflection"),
    ],
    ids=["invalid", "too large"],
)
async def test_only_a_request_that_cannot_be_read_ends_the_stream(
    gone: str, request_: bytes, code: grpc.StatusCode, text: str
) -> None:
    unknown = bytes(Request(file_containing_symbol="unknown.Service").SerializeToString())
    async with _client(gone) as (_, client):
        response = await client.call(_path(), unknown, LIST, request_)
    first, second = map(Response.FromString, response.messages)
    assert first.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert second.list_services_response.service
    assert response.code is code
    assert text in response.text


async def test_reflection_may_be_denied_and_needs_a_route(gone: str) -> None:
    for route, code in (
        ({"deny_operations": ["other"]}, grpc.StatusCode.PERMISSION_DENIED),
        ({"match": {"model": "m"}}, grpc.StatusCode.NOT_FOUND),
    ):
        async with _client(gone, route=route) as (_, client):
            assert (await client.call(_path(), LIST)).code is code


async def test_stream_may_be_idle_for_longer_than_other_calls(gone: str) -> None:
    async with _client(gone, idle_timeout=0.1, request_timeout=0.2) as (_, client):
        stream = _Stream(client)
        await stream.ask()
        await asyncio.sleep(0.5)  # longer than both timeouts
        await stream.ask()
        stream.call.cancel()
        await stream.code()


@pytest.mark.parametrize("cause", ["drain", "reload"])
async def test_stream_ends_with_the_gateway_or_its_settings(gone: str, cause: str) -> None:
    """Else it would keep the upstreams of the old ones."""
    async with _client(gone) as (gateway, client):
        stream = _Stream(client)
        await stream.ask()
        if cause == "drain":
            gateway.gateway.begin_draining()
        else:
            await gateway.gateway.reload(gateway.gateway.settings)
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        if cause == "reload":
            assert stream.call.details() == "the gateway has new settings"
            assert (await client.call(_path(), LIST)).code is grpc.StatusCode.OK
