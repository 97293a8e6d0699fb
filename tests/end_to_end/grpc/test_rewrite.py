"""A route that rewrites the model does so for clients and servers over gRPC, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.sizes import CONVERT_CHUNK
from tests.support.gateway import gateway_client, until
from tests.support.grpc.client import GrpcResponse, grpc_client_of, take_turns
from tests.support.grpc.proto_file import infer_request, message_class
from tests.support.http_messages import request
from tests.support.inference_messages import infer_json
from tests.support.servers.grpc_server import GrpcServer, Unary, grpc_server
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import ScriptedServer

REWRITE: dict[str, Any] = {"rewrite": {"model": "new"}}
VERSIONED: dict[str, Any] = {"rewrite": {"model": "new", "version": "3"}}

OF_MODEL = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
LOADS = ("RepositoryModelLoad", "RepositoryModelUnload")
INFER = {"model_name": "old", "model_version": "1"}
REWRITTEN: list[tuple[str, dict[str, str], dict[str, str], dict[str, Any]]] = [
    ("ModelInfer", INFER, {"model_name": "new", "model_version": "3"}, VERSIONED),
    ("ModelInfer", INFER, {"model_name": "new", "model_version": "1"}, REWRITE),
    ("ModelInfer", {}, {"model_name": "new"}, REWRITE),
    *(
        (name, {"name": "old", "version": "1"}, {"name": "new", "version": "3"}, VERSIONED)
        for name in OF_MODEL
    ),
    *(
        (name, {"model_name": "old"}, {"model_name": "new"}, VERSIONED)
        for name in (*LOADS, "TraceSetting")
    ),
    # KServe has the model's name where Triton has that of a repository.
    ("RepositoryModelLoad", {"repository_name": "old"}, {"model_name": "new"}, VERSIONED),
    # For the whole server.
    *((name, {}, {}, VERSIONED) for name in ("TraceSetting", "ModelStatistics")),
]
"""Methods, fields of a client's message, those that the server gets, and the route."""


def _message(method: str, **fields: Any) -> bytes:
    return bytes(message_class(f"{method}Request")(**fields).SerializeToString())


def _seen(server: GrpcServer, method: str = "ModelInfer") -> Any:
    (data,) = server.requests
    return message_class(f"{method}Request").FromString(data)


def _nothing(data: bytes, context: grpc.ServicerContext) -> bytes:
    return b""


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    """A server that takes every method."""
    unary: dict[str, Unary] = dict.fromkeys((*OF_MODEL, *LOADS, "TraceSetting"), _nothing)
    with grpc_server(unary=unary) as running:
        yield running


async def _call(
    server: GrpcServer, method: str, *messages: bytes, route: dict[str, Any], **options: Any
) -> GrpcResponse:
    async with grpc_client_of(server.url, route=route) as client:
        return await client.call(method, *messages, **options)


@pytest.mark.parametrize(("method", "sent", "expected", "route"), REWRITTEN)
async def test_message_names_the_new_model_and_the_version_of_the_route_if_it_has_one(
    server: GrpcServer,
    method: str,
    sent: dict[str, str],
    expected: dict[str, str],
    route: dict[str, Any],
) -> None:
    response = await _call(server, method, _message(method, **sent), route=route)
    assert response.code is grpc.StatusCode.OK, response.text
    assert _seen(server, method) == message_class(f"{method}Request")(**expected)


async def test_route_is_found_by_the_old_model(server: GrpcServer) -> None:
    route = {"match": {"model": "old"}, **REWRITE}
    served = await _call(server, "ModelInfer", infer_request("old"), route=route)
    refused = await _call(server, "ModelInfer", infer_request("new"), route=route)
    assert (served.code, refused.code) == (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND)
    assert _seen(server).model_name == "new"


class _Stream:
    """A server's stream that records its requests."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    def __call__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in requests:
            self.requests.append(message)
            yield b""

    @property
    def models(self) -> list[str]:
        """Return the models that the requests name."""
        read = message_class("ModelInferRequest").FromString
        return [read(message).model_name for message in self.requests]


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_each_message_of_a_stream_is_rewritten(compression: grpc.Compression | None) -> None:
    """Also the first one that names no model, whatever the next one names."""
    stream = _Stream()
    large = np.zeros(CONVERT_CHUNK, "<f4").tobytes()
    messages = [infer_request(name, data) for name in ("", "a", "b") for data in (b"", large)]
    with grpc_server(streams={"ModelStreamInfer": stream}) as server:
        response = await _call(
            server, "ModelStreamInfer", *messages, route=REWRITE, compression=compression
        )
        assert response.code is grpc.StatusCode.OK, response.text
        assert stream.models == ["new"] * 6
        assert [each for each in stream.requests if large in each] == stream.requests[1::2]
        async with grpc_client_of(server.url, route=REWRITE) as client:
            assert await take_turns(client, *[infer_request("old")] * 3) == [b""] * 3


async def test_compressed_message_is_rewritten_within_the_buffer_of_a_body(
    server: GrpcServer,
) -> None:
    message = infer_request("old", np.arange(1_000_000, dtype="<f4").tobytes())
    async with grpc_client_of(server.url, route=REWRITE, max_buffered_body_bytes=2**20) as client:
        response = await client.call("ModelInfer", message, compression=grpc.Compression.Gzip)
    assert response.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limits.max_buffered_body_bytes" in response.text
    assert not server.requests


async def test_mirror_gets_the_new_model(server: GrpcServer) -> None:
    with grpc_server() as copy:
        others = {"copies": {"endpoints": [copy.url], "dialect": "triton"}}
        route = {"mirror": {"upstream": "copies", "percent": 100}, **REWRITE}
        async with grpc_client_of(server.url, others=others, route=route) as client:
            await client.call("ModelInfer", infer_request("old"))
            await until(lambda: copy.requests)
    assert _seen(copy).model_name == "new"


TARGETS: list[tuple[str, dict[str, str], str]] = [
    ("ModelReady", {"name": "old", "version": "1"}, "/v2/models/new/versions/3/ready"),
    ("ModelStatistics", {"name": "old"}, "/v2/models/new/versions/3/stats"),
    ("RepositoryModelLoad", {"repository_name": "old"}, "/v2/repository/models/new/load"),
    ("TraceSetting", {"model_name": "old"}, "/v2/models/new/trace/setting"),
]


async def test_server_over_http_is_asked_for_the_new_model() -> None:
    async with (
        ScriptedServer(infer_floats) as server,
        grpc_client_of(server.url, route=VERSIONED) as client,
    ):
        for method, fields, _ in TARGETS:
            await client.call(method, _message(method, **fields))
        compression = grpc.Compression.Gzip
        response = await client.call("ModelInfer", infer_request("old"), compression=compression)
        assert response.code is grpc.StatusCode.OK, response.text
        expected = [*(target for *_, target in TARGETS), "/v2/models/new/versions/3/infer"]
        assert [each.head.target for each in server.requests] == expected


ASKED = {
    "ModelInfer": infer_json(),
    "ModelReady": request("GET", "/v2/models/old/ready"),
    "ModelConfig": request("GET", "/v2/models/old/versions/1/config"),
    "RepositoryModelLoad": request("POST", "/v2/repository/models/old/load"),
    "TraceSetting": request("GET", "/v2/models/old/trace/setting"),
}


@pytest.mark.parametrize("method", ASKED)
async def test_request_over_http_becomes_a_call_for_the_new_model(
    server: GrpcServer, method: str
) -> None:
    async with gateway_client(server.url, route=VERSIONED) as client:
        await client.ask(ASKED[method])
    seen = _seen(server, method)
    fields = {field.name: value for field, value in seen.ListFields()}
    names = {fields[name] for name in ("name", "model_name") if name in fields}
    versions = {fields[name] for name in ("version", "model_version") if name in fields}
    has_version = method in ("ModelInfer", "ModelReady", "ModelConfig")
    assert (names, versions) == ({"new"}, {"3"} if has_version else set())
