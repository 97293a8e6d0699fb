"""Calls over gRPC pass to servers over gRPC, and a route may rewrite their model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import numpy as np
import pytest

from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.framing import frame
from gateway.sizes import CONVERT_CHUNK
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import gateway_client, running_gateway, until
from tests.support.grpc.client import SERVICE, GrpcResponse, grpc_client, grpc_client_of, take_turns
from tests.support.grpc.proto_file import infer_request, message_class
from tests.support.http2_client import connect_http2
from tests.support.http_messages import request
from tests.support.inference_messages import infer_json
from tests.support.servers.grpc_server import GrpcServer, Unary, grpc_server
from tests.support.servers.http2_server import answering
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import ScriptedServer, never_respond

GRPC = [("content-type", "application/grpc"), ("te", "trailers")]


async def test_message_metadata_and_deadline_pass() -> None:
    left: list[float] = []

    def echo(data: bytes, context: grpc.ServicerContext) -> bytes:
        sent = dict(context.invocation_metadata())
        left.append(context.time_remaining())
        context.send_initial_metadata((("x-head", "1"), ("x-head-bin", b"\x00\xff")))
        context.set_trailing_metadata(
            (("x-tail", sent["x-own"]), ("x-tail-bin", sent["x-own-bin"]))
        )
        return b""

    with grpc_server(unary={"ModelInfer": echo}) as server:
        async with grpc_client_of(server.url) as client:
            response = await client.call(
                "ModelInfer",
                infer_request(),
                metadata=[("x-own", "a b"), ("x-own-bin", b"\x01\xfe")],
                timeout=7,
            )
    assert (server.requests, response.messages) == ([infer_request()], [b""])
    assert 0 < left[0] <= 7
    (seen,) = map(dict, server.metadata)
    assert response.headers["x-head"] == "1"
    assert response.headers["x-head-bin"] == b"\x00\xff"
    assert (response.trailers["x-tail"], response.trailers["x-tail-bin"]) == ("a b", b"\x01\xfe")
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert response.headers["x-request-id"] == seen["x-request-id"]


def _with_keys(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings of a route, and general ones, which ask for a key."""
    keys = folder / "keys"
    keys.write_text("secret-of-the-team\n")
    return {"auth": ["team"]}, {"api_keys": {"team": {"file": str(keys)}}}


async def test_client_gets_the_status_that_comes_before_its_messages_end(
    server: GrpcServer, tmp_path: Path
) -> None:
    route, general = _with_keys(tmp_path)
    request = infer_request(values=bytes(3_000_000))
    async with grpc_client_of(server.url, route=route, general=general) as client:
        for _ in range(30):
            refused = await client.call("ModelStreamInfer", request, request, request)
            assert refused.code is grpc.StatusCode.UNAUTHENTICATED
            assert "key" in refused.text
    assert not server.metadata


async def test_stream_is_not_reset_while_its_messages_go_on(
    server: GrpcServer, tmp_path: Path
) -> None:
    route, general = _with_keys(tmp_path)
    async with (
        running_gateway(server.url, route=route, general=general) as gateway,
        connect_http2(gateway.url) as client,
    ):
        stream = client.send_headers("POST", f"/{SERVICE}/ModelStreamInfer", GRPC)
        message = infer_request()
        first = b"\0" + len(message).to_bytes(4, "big") + message
        await client.send_data(stream, first, end_stream=False)
        reply = await client.response(stream)
        assert reply.headers_ended_it
        assert reply.get("grpc-status") == "16"
        await client.send_data(stream, bytes(3_000_000))
        assert (await client.call("GET", "/v2/health/live")).status == 401
        assert reply.reset is None


async def test_operation_may_be_denied(server: GrpcServer) -> None:
    async with grpc_client_of(server.url, route={"deny_operations": ["infer"]}) as client:
        unary = await client.call("ModelInfer", infer_request())
        stream = await client.call("ModelStreamInfer", infer_request())
        other = await client.call("ModelReady", b"\x0a\x01m")
    assert (unary.code, stream.code) == (grpc.StatusCode.PERMISSION_DENIED,) * 2
    assert other.code is grpc.StatusCode.OK
    assert server.paths == [f"/{SERVICE}/ModelReady"]


async def test_unknown_method_passes_and_is_the_fault_of_its_client(
    server: GrpcServer, call_records: list[CallRecord]
) -> None:
    server.unary["/my.Service/Do"] = lambda data, _: data + data
    unknown = {"ModelInferr": 404, "/my.Service/Else": 404, "ModelStatistics": 501}
    async with grpc_client_of(server.url) as client:
        assert (await client.call("/my.Service/Do", b"abc")).message == b"abcabc"
        for method in unknown:
            assert (await client.call(method, b"")).code is grpc.StatusCode.UNIMPLEMENTED
    async with ScriptedServer(never_respond) as http, grpc_client_of(http.url) as client:
        response = await client.call("ModelInferr", b"")
        assert response.code is grpc.StatusCode.UNIMPLEMENTED
        assert not http.requests
    assert call_records[-1].error == "ModelInferr has no counterpart over HTTP"
    recorded = [(record.grpc_status, record.status) for record in call_records[1:]]
    assert recorded == [(12, status) for status in (*unknown.values(), 404)]


async def test_stream_passes_message_by_message(server: GrpcServer) -> None:
    """Also if it is silent for longer than a body may be."""
    tensors = [np.full(3, number, "<f4").tobytes() for number in range(3)]
    async with grpc_client_of(
        server.url, min_body_rate="1MiB", min_body_rate_grace="10ms"
    ) as client:
        requests = [infer_request("m", tensor) for tensor in tensors]
        received = await take_turns(client, *requests, pause=0.1)
    for tensor, message in zip(tensors, received, strict=True):
        assert tensor in message


TWO_ROUTES = {
    "routes": [
        {"match": {"model": "one"}, "upstream": "servers", "compression": "gzip"},
        {"match": {"model": "two"}, "upstream": "others"},
    ]
}


async def test_first_message_of_a_stream_tells_its_route_also_if_others_come_with_it() -> None:
    """Else it would be served where the last one may go."""
    messages = [infer_request("one"), infer_request("two")]
    with grpc_server() as server, grpc_server() as other:
        others = {"others": {"endpoints": [other.url], "dialect": "triton"}}
        async with (
            running_gateway(server.url, others=others, general=TWO_ROUTES) as gateway,
            connect_http2(gateway.url) as client,
        ):
            path = f"/{SERVICE}/ModelStreamInfer"
            stream = client.send_headers("POST", path, GRPC, flush=False)
            await client.send_data(stream, b"".join(frame(len(each)) + each for each in messages))
            reply = await client.response(stream)
        ending = dict(reply.headers + reply.trailers)
        assert ending["grpc-status"] == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert "has another route than the stream" in unquote(ending["grpc-message"])
        assert ending["vary"] == "Accept-Encoding", "the route of the first message changes headers"
        assert not other.paths


async def test_deadline_of_a_client_ends_the_call_at_the_server_and_is_no_failure_of_it() -> None:
    cancelled = [threading.Event() for _ in range(3)]
    calls = iter(cancelled)

    def hang(data: bytes, context: grpc.ServicerContext) -> bytes:
        ended = next(calls)
        context.add_callback(ended.set)
        ended.wait(5)
        return b""

    with grpc_server(unary={"ModelInfer": hang}) as server:
        async with running_gateway(server.url) as gateway, grpc_client(gateway.url) as client:
            for each in cancelled:
                late = await client.call("ModelInfer", infer_request(), timeout=0.3)
                assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
                assert await asyncio.to_thread(each.wait, 5)
            await gateway.until_idle()
            (state,) = gateway.pool.snapshot()
    assert (state.consecutive_failures, state.last_error) == (0, None)


# -------------------------------------------------------------------- requests that look like calls

UNLOAD = f"/{SERVICE}/RepositoryModelUnload"
DENIED = {"deny_operations": ["repository"]}


async def test_request_that_looks_like_a_call_reaches_no_server() -> None:
    """A server that takes every request for a call, as grpc-go does without ``te``."""
    async with (
        ScriptedServer(answering(frame(0), [("grpc-status", "0")])) as server,
        running_gateway(server.url.replace("http://", "grpc://"), route=DENIED) as gateway,
        gateway.client() as client,
        connect_http2(gateway.url) as http2_client,
    ):
        for content_type in ("application/grpc", "application/grpc+proto"):
            over_http1 = {"Content-Type": content_type}
            assert (await client.call("POST", UNLOAD, b"\0", over_http1)).status == 501
        for method in ("PUT", "GET"):
            response = await http2_client.call(method, UNLOAD, frame(0), GRPC)
            assert response.status == 501
    assert server.connections == []


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
def capable() -> Iterator[GrpcServer]:
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
    capable: GrpcServer,
    method: str,
    sent: dict[str, str],
    expected: dict[str, str],
    route: dict[str, Any],
) -> None:
    response = await _call(capable, method, _message(method, **sent), route=route)
    assert response.code is grpc.StatusCode.OK, response.text
    assert _seen(capable, method) == message_class(f"{method}Request")(**expected)


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
    capable: GrpcServer, method: str
) -> None:
    async with gateway_client(capable.url, route=VERSIONED) as client:
        await client.ask(ASKED[method])
    seen = _seen(capable, method)
    fields = {field.name: value for field, value in seen.ListFields()}
    names = {fields[name] for name in ("name", "model_name") if name in fields}
    versions = {fields[name] for name in ("version", "model_version") if name in fields}
    has_version = method in ("ModelInfer", "ModelReady", "ModelConfig")
    assert (names, versions) == ({"new"}, {"3"} if has_version else set())
