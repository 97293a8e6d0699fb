"""Servers that compress whatever they are asked: what the gateway has to read, it decodes."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from h2.errors import ErrorCodes

from gateway.observe.call_metrics import ERRORS
from tests.support.gateway import gateway_client, running_gateway
from tests.support.grpc.client import grpc_client
from tests.support.grpc.infer_messages import infer_request
from tests.support.grpc.proto_file import message_class
from tests.support.http2_client import connect_http2
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_response_header,
    infer_json,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond
from tests.support.servers.served import served

CODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
PREDICT = request(
    "POST", "/v1/models/m:predict", json.dumps({"instances": FLOATS.tolist()}).encode()
)
JSON = {"outputs": [{"name": "OUT", "shape": [3], "datatype": "FP32", "data": FLOATS.tolist()}]}


def _unknown(body: bytes) -> bytes:
    return b"\x0b" + body


def _compressing(coding: str, tensors: np.ndarray = FLOATS, *, is_chunked: bool = False) -> Script:
    """Make the script of a server that compresses each of its responses."""
    compress = CODINGS.get(coding, _unknown)

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            assert received.head.get("Accept-Encoding") is None
            headers = {"Content-Encoding": coding}
            if received.head.target != INFER:
                body = metadata(-1) if received.head.target == "/v2/models/m" else b"{}"
            else:
                text = binary_response_header(tensors.nbytes)
                body = text + tensors.tobytes()
                headers[HEADER_LENGTH] = str(len(text))
            packed = compress(body)
            if is_chunked:
                headers["Transfer-Encoding"] = "chunked"
                sent = message("HTTP/1.1 200 OK", headers)
                await connection.send(sent, chunk(packed[:7]), chunk(packed[7:]) + chunk(b""))
            else:
                await connection.send(http_response(packed, headers))

    return script


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize(("coding", "count"), [("gzip", 3), ("deflate", 3), ("gzip", 100_000)])
async def test_tensors_are_converted(
    path: Callable[[bytes], bytes], coding: str, is_chunked: bool, count: int
) -> None:
    """Metadata, which a prediction needs, is decoded, too."""
    tensors = np.arange(count, dtype="<f4")
    async with served(_compressing(coding, tensors, is_chunked=is_chunked)) as (_, _, client):
        for _ in range(2):
            reply = await client.ask(path(infer_json()))
            assert reply.status == 200, reply.body
            assert reply.head.get("Content-Encoding") is None
            assert reply.json["outputs"][0]["data"] == tensors.tolist()
        assert (await client.ask(path(PREDICT))).json == {"predictions": tensors.tolist()}


async def test_grpc_client_gets_tensors_of_a_server_over_http() -> None:
    async with (
        ScriptedServer(_compressing("gzip")) as server,
        running_gateway(server.url) as gateway,
        grpc_client(gateway.url) as client,
    ):
        response = await client.call("ModelInfer", infer_request(typed=True))
        assert response.code is grpc.StatusCode.OK, response
        read = message_class("ModelInferResponse").FromString(response.message)
        assert list(read.outputs[0].contents.fp32_contents) == FLOATS.tolist()


@pytest.mark.parametrize(
    ("coding", "data"), [("br", infer_json()), ("zstd", PREDICT)], ids=["JSON", "V1"]
)
async def test_other_coding_is_named(
    path: Callable[[bytes], bytes], coding: str, data: bytes
) -> None:
    async with ScriptedServer(_compressing(coding)) as server, gateway_client(server.url) as client:
        reply = await client.ask(path(data))
    assert reply.status == 502
    assert f'Content-Encoding "{coding}"' in reply.error
    assert "reads gzip and deflate" in reply.error
    assert "upstream 'servers'" in reply.error


@pytest.mark.parametrize("is_http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_tiny_response_that_becomes_huge_is_broken_off(
    is_http2: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has the start of it by then, and must not take it for the whole."""
    tensors = np.zeros(4_000_000, "<f4")
    async with (
        ScriptedServer(_compressing("gzip", tensors)) as server,
        running_gateway(server.url) as gateway,
    ):
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
        assert gateway.gateway.metric_store.sums(ERRORS) == {("bad_response", "servers"): [1.0]}
    assert f"the response of {server.url} is gzip, and grows to more than 100 times" in caplog.text


@pytest.mark.parametrize(
    ("method", "target", "coding"),
    [("GET", "/other", "gzip"), ("POST", "/v2/models/m/generate", "br")],
)
async def test_what_passes_untouched_keeps_the_coding_of_the_server(
    path: Callable[[bytes], bytes], method: str, target: str, coding: str
) -> None:
    """The server knows what its client accepts: RFC 9110, section 12.5.3, leaves it the choice."""
    packed = CODINGS.get(coding, _unknown)(b'{"text_output":"x"}')
    response = http_response(packed, {"Content-Encoding": coding})
    async with served(always_respond(response)) as (server, _, client):
        body = None if method == "GET" else b"{}"
        data = request(method, target, body, {"Accept-Encoding": "identity"})
        reply = await client.ask(path(data))
    assert (reply.status, reply.body) == (200, packed)
    assert reply.head.get("Content-Encoding") == coding
    assert server.requests[0].head.get("Accept-Encoding") == "identity"
