"""Compressed requests and responses: the gateway decodes what it has to read, on both sides."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from h2.errors import ErrorCodes

from gateway.observe.families import ERRORS
from tests.support.gateway import gateway_before, served
from tests.support.grpc.client import grpc_client
from tests.support.grpc.proto_file import ModelInferResponse, infer_request
from tests.support.http2_client import connect_http2
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_response_header,
    infer_json,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, Script

CODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
CHUNKED = {"Host": "x", "Transfer-Encoding": "chunked"}
COMPRESS: dict[str, Any] = {"route": {"compression": "gzip"}}
LARGE = json.dumps({"x": ["y"] * 1000}).encode()


async def test_truncated_response_is_aborted() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(LARGE * 40)[:-1])  # more than is waited for

    async with served(script, **COMPRESS) as (_, _, client):
        await client.send(request("GET", "/v2/x", headers={"Accept-Encoding": "gzip"}))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.read_response()


# ------------------------------------------------ servers that compress whatever they are asked for

PREDICT = request("POST", "/v1/models/m:predict", b'{"instances":[1.5]}')


def _unknown(body: bytes) -> bytes:
    return b"\x0b" + body


def _compressing(coding: str, tensor: bytes = bytes(8)) -> Script:
    """Make the script of a server that compresses each of its responses, and infers in chunks."""
    compress = CODINGS.get(coding, _unknown)

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            assert received.head.get("Accept-Encoding") is None
            headers = {"Content-Encoding": coding}
            if received.head.target == INFER:
                text = binary_response_header(len(tensor))
                packed = compress(text + tensor)
                headers |= {HEADER_LENGTH: str(len(text)), "Transfer-Encoding": "chunked"}
                await connection.send(message("HTTP/1.1 200 OK", headers))
                await connection.send(chunk(packed[:7]), chunked(packed[7:]))
            else:
                body = metadata(-1) if received.head.target == "/v2/models/m" else b"{}"
                await connection.send(http_response(compress(body), headers))

    return script


@pytest.mark.parametrize(("coding", "count"), [("deflate", 3), ("gzip", 100_000)])
async def test_tensors_are_converted(
    path: Callable[[bytes], bytes], coding: str, count: int
) -> None:
    """Metadata, which a prediction needs, is decoded, too."""
    tensor = np.arange(count, dtype="<f4")
    async with served(_compressing(coding, tensor.tobytes())) as (_, gateway, client):
        for _ in range(2):
            reply = await client.ask(path(infer_json()))
            assert reply.json["outputs"][0]["data"] == tensor.tolist()
            assert reply.head.get("Content-Encoding") is None
        assert (await client.ask(path(PREDICT))).json == {"predictions": tensor.tolist()}
        async with grpc_client(gateway.url) as grpc:
            response = await grpc.call("ModelInfer", infer_request(typed=True))
        read = ModelInferResponse.FromString(response.message)
        assert list(read.outputs[0].contents.fp32_contents) == tensor.tolist()


@pytest.mark.parametrize("is_http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_tiny_response_that_becomes_huge_is_broken_off(
    is_http2: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has the start of it by then, and must not take it for the whole."""
    async with gateway_before(_compressing("gzip", bytes(16_000_000))) as (server, gateway):
        if is_http2:
            async with connect_http2(gateway.url) as client:
                reply = await client.call("POST", INFER, json_request())
                assert (reply.status, reply.ended) == (200, False)
                assert reply.reset == ErrorCodes.INTERNAL_ERROR
        else:
            async with gateway.client() as plain:
                await plain.send(infer_json())
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await plain.read_response()
        await gateway.until_idle()
        assert gateway.gateway.shared.metric_store.sums(ERRORS) == {
            ("bad_response", "servers"): [1.0]
        }
    assert f"the response of {server.url} is gzip, and grows to more than 100 times" in caplog.text
