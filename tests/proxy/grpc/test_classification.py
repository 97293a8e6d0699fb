"""Classification of strings reaches no server, in whatever call that passes through."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.support.gateway import running_gateway, until
from tests.support.grpc.client import GrpcClient, grpc_client
from tests.support.grpc.proto_file import message_class
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
    async with _client(model_metadata("BYTES"), upstream={"dialect": "openvino"}) as (
        server,
        client,
    ):
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
