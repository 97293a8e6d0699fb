"""What would kill a Triton does not reach it: classification of strings, triton_grpc_error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.grpc.framing import frame
from gateway.proxy.body_io import stream
from gateway.proxy.grpc.passthrough import StreamError, end_at_first_error
from tests.support.gateway import running_gateway, until
from tests.support.grpc.client import SERVICE, GrpcClient, GrpcResponse, grpc_client
from tests.support.grpc.proto_file import message_class
from tests.support.grpc.wire_bytes import cuts
from tests.support.http2_client import connect_http2
from tests.support.servers.grpc_server import GrpcServer, Unary, fail, grpc_server, model_metadata

LARGE = 200_000
REFUSED = "output 'OUT' of model 'm' is BYTES, which cannot be classified"


def _request(
    size: int = 4, output: str = "OUT", *, outputs_last: bool = False, model: str = "m"
) -> bytes:
    request = message_class("ModelInferRequest")(model_name=model)
    request.inputs.add(name="IN", datatype="UINT8", shape=[size])
    request.raw_input_contents.append(bytes(size))
    wanted = message_class("ModelInferRequest")()
    wanted.outputs.add(name="other")
    wanted.outputs.add(name=output).parameters["classification"].int64_param = 1
    parts = [request.SerializeToString(), wanted.SerializeToString()]
    return b"".join(parts if outputs_last else reversed(parts))


PLAIN = message_class("ModelInferRequest")(model_name="m").SerializeToString()


@asynccontextmanager
async def _client(metadata: Unary, **settings: Any) -> AsyncIterator[tuple[GrpcServer, GrpcClient]]:
    with grpc_server(unary={"ModelMetadata": metadata}) as server:
        async with (
            running_gateway(server.url, **settings) as gateway,
            grpc_client(gateway.url) as client,
        ):
            yield server, client


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
@pytest.mark.parametrize("size", [4, LARGE])
@pytest.mark.parametrize("outputs_last", [False, True])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_classification_of_strings_is_refused(
    method: str, outputs_last: bool, size: int, compression: grpc.Compression | None
) -> None:
    request = _request(size, outputs_last=outputs_last)
    async with _client(model_metadata("BYTES")) as (server, client):
        response = await client.call(method, request, compression=compression)
        assert (response.code, response.text) == (grpc.StatusCode.INVALID_ARGUMENT, REFUSED)
        assert request not in server.requests
        assert (await client.call(method, PLAIN)).code is grpc.StatusCode.OK


async def test_messages_that_come_together_are_all_checked_where_they_are_mirrored() -> None:
    headers = [("content-type", "application/grpc"), ("te", "trailers")]
    with grpc_server(unary={"ModelMetadata": model_metadata("BYTES")}) as server:
        others = {"copies": {"endpoints": [server.url], "dialect": "triton"}}
        route = {"mirror": {"upstream": "copies", "percent": 100}}
        async with (
            running_gateway(server.url, route=route, others=others) as gateway,
            connect_http2(gateway.url) as client,
        ):
            stream = client.send_headers("POST", f"/{SERVICE}/ModelStreamInfer", headers)
            await client.send_data(stream, _framed(PLAIN, PLAIN, _request()))
            reply = await client.response(stream)
    ending = dict(reply.headers + reply.trailers)
    assert unquote(ending["grpc-message"]) == REFUSED


@pytest.mark.parametrize("size", [4, LARGE])
async def test_classification_of_numbers_passes(size: int) -> None:
    async with _client(model_metadata("FP32")) as (server, client):
        for _ in range(2):
            assert (await client.call("ModelInfer", _request(size))).code is grpc.StatusCode.OK
        assert sum("Metadata" in path for path in server.paths) == 1


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        (fail(grpc.StatusCode.NOT_FOUND, "unknown"), grpc.StatusCode.OK),
        (fail(grpc.StatusCode.INTERNAL, "broken"), grpc.StatusCode.UNIMPLEMENTED),
    ],
    ids=["unknown model", "no metadata"],
)
async def test_model_without_metadata(metadata: Unary, code: grpc.StatusCode) -> None:
    """A server that does not know the model says so itself."""
    async with _client(metadata) as (_, client):
        response = await client.call("ModelInfer", _request())
    assert response.code is code


async def test_server_without_the_extension_is_not_asked() -> None:
    openvino = {"dialect": "openvino"}
    async with _client(model_metadata("BYTES"), upstream=openvino) as (server, client):
        assert (await client.call("ModelInfer", _request())).code is grpc.StatusCode.OK
        assert not [path for path in server.paths if "Metadata" in path]


async def test_huge_output_is_refused() -> None:
    request = message_class("ModelInferRequest")(model_name="m")
    request.outputs.add(name="x" * 100_000)
    async with _client(model_metadata("BYTES")) as (_, client):
        response = await client.call("ModelInfer", _request() + request.SerializeToString())
    assert response.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 65536 are allowed" in response.text


@pytest.mark.parametrize("size", [4, LARGE])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_outputs_are_those_of_the_model_that_the_server_gets(method: str, size: int) -> None:
    route = {"rewrite": {"model": "other"}}
    async with _client(model_metadata("BYTES"), route=route) as (_, client):
        response = await client.call(method, _request(size))
    assert response.code is grpc.StatusCode.INVALID_ARGUMENT
    assert response.text == REFUSED.replace("'m'", "'other'")


@pytest.mark.parametrize("size", [4, LARGE])
@pytest.mark.parametrize("first", ["triton", "openvino"])
async def test_call_and_its_mirror_are_checked_each_for_its_own_server(
    first: str, size: int
) -> None:
    with grpc_server(unary={"ModelMetadata": model_metadata("BYTES")}) as copies:
        mirror: dict[str, Any] = {
            "upstream": {"dialect": first},
            "route": {"mirror": {"upstream": "copies", "percent": 100}},
            "others": {"copies": {"endpoints": [copies.url], "dialect": "triton"}},
        }
        async with _client(model_metadata("BYTES"), **mirror) as (_, client):
            response = await client.call("ModelInfer", _request(size))
            assert (response.code is grpc.StatusCode.OK) == (first == "openvino")
            assert (await client.call("ModelInfer", PLAIN)).code is grpc.StatusCode.OK
            await until(lambda: PLAIN in copies.requests)
        assert [each for each in copies.requests if len(each) > len(PLAIN)] == []


# ------------------------------------------------------------------------- errors of streams


def _streamed(error: str = "", **response: Any) -> bytes:
    message = message_class("ModelStreamInferResponse")(error_message=error)
    if response:
        message.infer_response.CopyFrom(message_class("ModelInferResponse")(**response))
    return bytes(message.SerializeToString())


FIRST = _streamed(model_name="m", id="1")
EARLY_ERROR = _streamed("unknown model")
ERROR = _streamed("no response 1", model_name="m", id="1")
LARGE_RESPONSE = _streamed(model_name="m", raw_output_contents=[bytes(100_000)])


async def _until_error(*pieces: bytes) -> tuple[bytes, str]:
    sent = b""
    try:
        async for chunk in end_at_first_error(stream(pieces)):
            sent += chunk
    except StreamError as error:
        return sent, str(error)
    return sent, ""


def _framed(*messages: bytes, is_compressed: bool = False) -> bytes:
    return b"".join(frame(len(each), is_compressed) + each for each in messages)


@given(data=st.data())
async def test_stream_ends_at_the_error_of_a_model_wherever_it_is_cut(data: st.DataObject) -> None:
    before = _framed(FIRST, b"", EARLY_ERROR, LARGE_RESPONSE)
    pieces = data.draw(cuts(before + _framed(ERROR, FIRST)))
    assert await _until_error(*pieces) == (before, "no response 1")


@pytest.mark.parametrize(
    "body",
    [
        _framed(FIRST, EARLY_ERROR),
        _framed(ERROR, is_compressed=True),
        _framed(b"\x0a\x05ab"),
        _framed(_streamed("x" * 70_000, model_name="m")),
    ],
    ids=["early", "compressed", "invalid", "large"],
)
async def test_other_messages_pass(body: bytes) -> None:
    assert await _until_error(body) == (body, "")


async def _stream(*metadata: tuple[str, str]) -> tuple[GrpcResponse, dict[str, Any]]:
    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        next(requests)
        yield from (FIRST, ERROR, FIRST)

    with grpc_server(streams={"ModelStreamInfer": serve}) as server:
        async with running_gateway(server.url) as gateway, grpc_client(gateway.url) as client:
            response = await client.call("ModelStreamInfer", b"\x0a\x01m", metadata=metadata)
            (state,) = gateway.pool.snapshot()
            assert state.last_error is None
    return response, dict(server.metadata[-1])


async def test_metadata_that_kills_a_triton_does_not_reach_it() -> None:
    response, sent = await _stream(("triton_grpc_error", "true"))
    assert (response.code, response.text) == (grpc.StatusCode.INTERNAL, "no response 1")
    assert response.messages == [FIRST]
    assert "triton_grpc_error" not in sent
    assert "grpc-accept-encoding" not in sent


@pytest.mark.parametrize("metadata", [(), (("triton_grpc_error", "false"),)])
async def test_errors_are_messages_for_other_clients(metadata: tuple[Any, ...]) -> None:
    response, sent = await _stream(*metadata)
    assert (response.code, response.messages) == (grpc.StatusCode.OK, [FIRST, ERROR, FIRST])
    assert "triton_grpc_error" not in sent
