"""A route that rewrites the model does so for clients and servers over gRPC, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.sizes import CONVERT_CHUNK
from tests.support.gateway import gateway_client, running_gateway, until
from tests.support.grpc.client import GrpcResponse, grpc_client, grpc_client_of, take_turns
from tests.support.grpc.infer_messages import infer_request
from tests.support.grpc.proto_file import message_class
from tests.support.grpc.wire_bytes import field
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import FLOATS, binary_response, infer_json, metadata
from tests.support.servers.grpc_server import GrpcServer, Unary, grpc_server
from tests.support.servers.scripted_server import Connection, ScriptedServer

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
    ("ModelReady", {"name": "old"}, {"name": "new"}, REWRITE),
    *(
        (name, {"model_name": "old"}, {"model_name": "new"}, VERSIONED)
        for name in (*LOADS, "TraceSetting")
    ),
    # KServe has the model's name where Triton has that of a repository.
    *((name, {"repository_name": "old"}, {"model_name": "new"}, VERSIONED) for name in LOADS),
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


async def test_tensors_pass_as_they_came(server: GrpcServer) -> None:
    await _call(server, "ModelInfer", infer_request("old"), route=REWRITE)
    expected = message_class("ModelInferRequest").FromString(infer_request("new"))
    assert _seen(server) == expected


async def test_name_at_the_end_of_a_message_is_rewritten(server: GrpcServer) -> None:
    message = infer_request("first") + field(1, b"old")
    await _call(server, "ModelInfer", message, route={"match": {"model": "old"}, **REWRITE})
    assert _seen(server).model_name == "new"


async def test_name_that_is_no_ascii_arrives(server: GrpcServer) -> None:
    route = {"rewrite": {"model": "gr%C3%B6%C3%9Fer+5%25"}}  # as it is in a path
    await _call(server, "ModelInfer", infer_request("old"), route=route)
    assert _seen(server).model_name == "größer+5%"


async def test_large_message_is_rewritten_while_it_streams(server: GrpcServer) -> None:
    values = np.arange(1_000_000, dtype="<f4").tobytes()
    async with grpc_client_of(server.url, route=VERSIONED, max_buffered_bytes=2**21) as client:
        response = await client.call("ModelInfer", infer_request("old", values))
    assert response.code is grpc.StatusCode.OK, response.text
    seen = _seen(server)
    assert (seen.model_name, seen.model_version) == ("new", "3")
    assert seen.raw_input_contents == [values]


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
    stream = _Stream()
    large = np.zeros(CONVERT_CHUNK, "<f4").tobytes()
    messages = [infer_request(name, data) for name in ("a", "", "b") for data in (b"", large)]
    with grpc_server(streams={"ModelStreamInfer": stream}) as server:
        response = await _call(
            server, "ModelStreamInfer", *messages, route=REWRITE, compression=compression
        )
    assert response.code is grpc.StatusCode.OK, response.text
    assert stream.models == ["new"] * 6
    assert [message for message in stream.requests if large in message] == stream.requests[1::2]


async def test_message_of_a_stream_is_sent_before_the_next_one_comes() -> None:
    stream = _Stream()
    with grpc_server(streams={"ModelStreamInfer": stream}) as server:
        async with grpc_client_of(server.url, route=REWRITE) as client:
            assert await take_turns(client, *[infer_request("old")] * 3) == [b""] * 3


async def test_stream_that_begins_without_a_model_cannot_name_another_later() -> None:
    stream = _Stream()
    messages = infer_request(""), infer_request("secret")
    with grpc_server(streams={"ModelStreamInfer": stream}) as server:
        await _call(server, "ModelStreamInfer", *messages, route=REWRITE)
    assert stream.models == ["new", "new"]


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_message_is_rewritten(
    server: GrpcServer, compression: grpc.Compression
) -> None:
    values = np.arange(100_000, dtype="<f4").tobytes()
    message = infer_request("old", values)
    async with (
        running_gateway(server.url, route=VERSIONED) as gateway,
        grpc_client(gateway.url) as client,
    ):
        await client.call("ModelInfer", message, compression=compression)
        await gateway.until_idle()
        assert gateway.gateway.active_config.router.memory_budget.total == 0
    seen = _seen(server)
    assert (seen.model_name, seen.model_version) == ("new", "3")
    assert seen.raw_input_contents == [values]


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


async def test_load_at_several_servers_is_for_the_new_model(server: GrpcServer) -> None:
    with grpc_server(unary={"RepositoryModelLoad": _nothing}) as second:
        async with grpc_client_of(server.url, second.url, route=REWRITE) as client:
            message = _message("RepositoryModelLoad", model_name="old")
            response = await client.call("RepositoryModelLoad", message)
    assert response.code is grpc.StatusCode.OK, response.text
    for each in (server, second):
        assert _seen(each, "RepositoryModelLoad").model_name == "new"


# ---------------------------------------------------------------- servers over HTTP


@pytest.mark.parametrize(
    ("method", "fields", "target"),
    [
        ("ModelReady", {"name": "old", "version": "1"}, "/v2/models/new/versions/3/ready"),
        ("ModelMetadata", {"name": "old"}, "/v2/models/new/versions/3"),
        ("ModelConfig", {"name": "old"}, "/v2/models/new/versions/3/config"),
        ("ModelStatistics", {"name": "old"}, "/v2/models/new/versions/3/stats"),
        ("RepositoryModelLoad", {"model_name": "old"}, "/v2/repository/models/new/load"),
        ("RepositoryModelLoad", {"repository_name": "old"}, "/v2/repository/models/new/load"),
        ("RepositoryModelUnload", {"model_name": "old"}, "/v2/repository/models/new/unload"),
        ("TraceSetting", {"model_name": "old"}, "/v2/models/new/trace/setting"),
        ("ModelInfer", {"model_name": "old"}, "/v2/models/new/versions/3/infer"),
    ],
)
async def test_server_over_http_is_asked_for_the_new_model(
    method: str, fields: dict[str, str], target: str
) -> None:
    message = _message(method, **fields) if method != "ModelInfer" else infer_request("old")
    compression = grpc.Compression.Gzip if method in ("ModelReady", "ModelInfer") else None
    targets = []

    async def script(connection: Connection) -> None:
        while True:
            targets.append((await connection.request()).head.target)
            is_infer = method == "ModelInfer"
            response = binary_response(FLOATS.tobytes()) if is_infer else http_response(b"{}")
            await connection.send(response)

    async with (
        ScriptedServer(script) as server,
        grpc_client_of(server.url, route=VERSIONED) as client,
    ):
        response = await client.call(method, message, compression=compression)
    assert response.code is grpc.StatusCode.OK, response.text
    assert targets == [target]


async def test_config_that_is_made_is_that_of_the_new_model() -> None:
    targets = []

    async def script(connection: Connection) -> None:
        while True:
            targets.append((await connection.request()).head.target)
            await connection.send(http_response(metadata(-1)))

    async with (
        ScriptedServer(script) as server,
        grpc_client_of(server.url, route=REWRITE, upstream={"dialect": "json"}) as client,
    ):
        await client.call("ModelConfig", _message("ModelConfig", name="old"))
    assert targets == ["/v2/models/new"]


# ---------------------------------------------------------------- clients over HTTP


async def _request(server: GrpcServer, text: bytes, route: dict[str, Any]) -> int:
    async with gateway_client(server.url, route=route) as client:
        return (await client.ask(text)).status


async def test_infer_request_over_http_names_the_new_model(server: GrpcServer) -> None:
    assert await _request(server, infer_json(), VERSIONED) == 200
    seen = _seen(server)
    assert (seen.model_name, seen.model_version) == ("new", "3")


@pytest.mark.parametrize(
    ("method", "verb", "target", "name"),
    [
        ("ModelReady", "GET", "/v2/models/old/ready", "name"),
        ("ModelMetadata", "GET", "/v2/models/old", "name"),
        ("ModelConfig", "GET", "/v2/models/old/versions/1/config", "name"),
        ("ModelStatistics", "GET", "/v2/models/old/stats", "name"),
        ("RepositoryModelLoad", "POST", "/v2/repository/models/old/load", "model_name"),
        ("TraceSetting", "GET", "/v2/models/old/trace/setting", "model_name"),
    ],
)
async def test_request_over_http_becomes_a_call_for_the_new_model(
    server: GrpcServer, method: str, verb: str, target: str, name: str
) -> None:
    await _request(server, request(verb, target), VERSIONED)
    seen = _seen(server, method)
    assert getattr(seen, name) == "new"
    assert getattr(seen, "version", "3") == "3"
