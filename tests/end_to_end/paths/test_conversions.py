"""A call between HTTP and gRPC looks the same to client and server on both paths.

A small call takes the fast path if there is a connection to its server. One with a long header
takes the streaming path.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.framing import frame
from tests.support.checks.call_records import call_records as call_records
from tests.support.checks.fast_path import fast_path_requests as fast_path_requests
from tests.support.checks.fast_path import fast_path_streams as fast_path_streams
from tests.support.compiled import needs_source
from tests.support.gateway import running_gateway
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    json_request,
)
from tests.support.servers.http2_server import Http2Peer, ReceivedStream, http2_script
from tests.support.servers.scripted_server import Connection, ScriptedServer

PREDICT = "/v1/models/m:predict"
MODEL_INFER = f"/{SERVICE}/ModelInfer"
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
OK = [("grpc-status", "0")]
DATA = FLOATS.tobytes()
SHAPE = field(2, b"FP32") + field(3, b"\x03")
LONG = [("x-long", "l" * 3000)]
VARYING = ("x-long", "x-request-id", "via", "x-forwarded-host", ":authority", "host", "date")
ID = re.compile(rb"[0-9a-f]{32}")
"""The id of a V1 request is that of the call."""
RECORDED = (
    "method target status grpc_status error_kind upstream attempts retries server_form"
    " request_bytes response_bytes request_elements response_elements"
)


def framed(message: bytes) -> bytes:
    return frame(len(message)) + message


def one_input(*more: bytes) -> bytes:
    """Write an infer request; ``more`` are its fields beside the model and the input."""
    return framed(field(1, b"m") + field(5, field(1, b"IN") + SHAPE) + b"".join(more))


RAW = one_input(field(3, b"id"), field(7, DATA))
TYPED = framed(field(1, b"m") + field(5, field(1, b"IN") + SHAPE + field(5, field(6, DATA))))


@dataclass(frozen=True)
class Asked:
    """What a client sends."""

    target: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    is_fast: bool = True


CLIENTS = {
    "JSON": Asked(INFER, json_request()),
    "JSON with outputs": Asked(
        INFER, json.dumps({**json.loads(json_request()), "outputs": [{"name": "OUT"}]}).encode()
    ),
    "JSON that is not valid": Asked(INFER, json_request()[:-1], is_fast=False),
    "binary": Asked(
        INFER,
        binary_header(len(DATA)) + DATA,
        ((HEADER_LENGTH.lower(), str(len(binary_header(12)))),),
    ),
    "raw binary": Asked(INFER, DATA, ((HEADER_LENGTH.lower(), "0"),)),
    "V1": Asked(PREDICT, b'{"instances": [1, 2, 3]}'),
    "headers": Asked(
        INFER,
        json_request(),
        (("x-a", "1"), ("x-a", "2"), ("accept-encoding", "gzip"), ("x-request-id", "mine")),
    ),
    "a header of Triton": Asked(INFER, json_request(), (("triton_grpc_error", "true"),)),
    "headers of gRPC": Asked(INFER, json_request(), (("grpc-timeout", "1H"),), is_fast=False),
    "an extension of gRPC": Asked(INFER, json_request(), (("grpc-x", "1"),), is_fast=False),
}
GRPC_CLIENTS = {
    "raw": Asked(MODEL_INFER, RAW),
    "typed": Asked(MODEL_INFER, TYPED),
    "metadata": Asked(
        MODEL_INFER,
        RAW,
        (("x-a", "1"), ("grpc-accept-encoding", "identity, gzip"), ("grpc-timeout", "9S")),
    ),
    "a header of Triton": Asked(MODEL_INFER, RAW, (("triton_grpc_error", "true"),)),
    "data that do not fit": Asked(MODEL_INFER, one_input(field(7, DATA[:-1])), is_fast=False),
    "a broken message": Asked(MODEL_INFER, framed(b"\x0a\x01m\xff"), is_fast=False),
    "no message": Asked(MODEL_INFER, b"", is_fast=False),
}

OUTPUT = field(5, field(1, b"OUT") + SHAPE)
OVER_GRPC = {
    "raw": (framed(field(1, b"m") + field(3, b"id") + OUTPUT + field(6, DATA)), OK),
    "typed": (
        framed(field(1, b"m") + field(5, field(1, b"OUT") + SHAPE + field(5, field(6, DATA)))),
        OK,
    ),
    "of a large size": (
        framed(
            field(1, b"m")
            + field(5, field(1, b"OUT") + field(2, b"FP32") + field(3, b"\x80\x80\x04"))
            + field(6, bytes(4 * 65536))
        ),
        OK,
    ),
    "an error": (b"", [("grpc-status", "3"), ("grpc-message", "no %C3%A9")]),
    "no status": (b"", []),
    "no message": (b"", OK),
    "a broken message": (framed(b"\xff\xff"), OK),
    "data that do not fit": (framed(OUTPUT + field(6, DATA[:-1])), OK),
    "further trailers": (framed(OUTPUT + field(6, DATA)), [*OK, ("x-cost", "2")]),
}
OVER_HTTP = {
    "binary": binary_response(DATA),
    "JSON": http_response(
        b'{"outputs": [{"name": "O", "datatype": "FP32", "shape": [1], "data": [1.5]}]}'
    ),
    "of a large size": binary_response(bytes(4 * 65536)),
    "JSON that gRPC cannot hold": http_response(
        b'{"parameters": {"p": []}, "outputs":'
        b' [{"name": "O", "datatype": "FP32", "shape": [1], "data": [1.5]}]}'
    ),
    "an error": http_response(b'{"error": "no model"}', status="404 Not Found"),
    "no tensors": http_response(b""),
    "cut short": binary_response(DATA).replace(b'"binary_data_size":12', b'"binary_data_size":16'),
}


def metadata() -> bytes:
    tensor = field(2, b"FP32") + field(3, b"\xff" * 9 + b"\x01")
    return field(1, b"m") + field(4, field(1, b"IN") + tensor) + field(5, field(1, b"OUT") + tensor)


@dataclass
class Server:
    """A scripted server, and what it was asked to infer."""

    url: str
    asked: list[tuple[list[tuple[str, str]], bytes]]


@asynccontextmanager
async def grpc_server(body: bytes, trailers: list[tuple[str, str]]) -> AsyncIterator[Server]:
    """Answer each infer call alike."""
    asked: list[tuple[list[tuple[str, str]], bytes]] = []

    async def respond(peer: Http2Peer, stream: ReceivedStream) -> None:
        head = [("content-type", "application/grpc")]
        rpc = stream.path.rpartition("/")[2]
        if rpc != "ModelInfer":
            message = metadata() if rpc == "ModelMetadata" else b""
            await peer.respond(stream, framed(message), head, OK)
            return
        asked.append((list(stream.headers), bytes(stream.body)))
        await peer.respond(stream, body, head, trailers or [("x-none", "1")])

    async def serve(peer: Http2Peer) -> None:
        number = 0
        while True:
            await respond(peer, await peer.request(number))
            number += 1

    async with ScriptedServer(http2_script(serve)) as server:
        yield Server(server.url.replace("http://", "grpc://"), asked)


@asynccontextmanager
async def http_server(response: bytes) -> AsyncIterator[Server]:
    """Answer each infer call alike."""
    asked: list[tuple[list[tuple[str, str]], bytes]] = []

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.target.endswith("/infer"):
                asked.append(([("", received.head.first), *received.head.headers], received.body))
                await connection.send(response)
            else:
                await connection.send(http_response())

    async with ScriptedServer(script) as server:
        yield Server(server.url, asked)


def recorded(record: CallRecord) -> dict[str, Any]:
    shown = {name: getattr(record, name) for name in RECORDED.split()}
    for name in ("error", "server_error"):
        shown[name] = getattr(record, name).replace(record.endpoint or "-", "URL")
    return shown


async def exchange(
    server: Server,
    asked: Asked,
    dialect: str,
    records: list[CallRecord],
    *,
    streams: bool,
    **limits: Any,
) -> tuple[Any, ...]:
    """Return what the client got, what the server got, and what was recorded."""
    is_grpc = asked.target == MODEL_INFER
    server.asked.clear()
    async with (
        running_gateway(server.url, upstream={"dialect": dialect}, **limits) as gateway,
        connect_http2(gateway.url) as client,
    ):
        # They connect to the server, and fetch the metadata.
        warm_up = CLIENTS["V1"] if server.url.startswith("grpc") else Asked("/v2/x", b"x")
        await client.call("POST", warm_up.target, warm_up.body)
        server.asked.clear()
        headers = [*(GRPC if is_grpc else []), *asked.headers, *(LONG if streams else [])]
        start = client.send_headers("POST", asked.target, headers, flush=False)
        await client.send_data(start, asked.body)
        reply = await client.response(start)
        await gateway.until_idle()
    got = sorted(line for line in reply.headers if line[0] not in VARYING)
    sent = [
        (sorted((n.lower(), v) for n, v in lines if n.lower() not in VARYING), ID.sub(b"ID", body))
        for lines, body in server.asked
    ]
    return got, reply.body, reply.trailers, reply.reset, sent, recorded(records[-1])


async def compare(
    server: Server, asked: Asked, dialect: str, records: list[CallRecord], **limits: Any
) -> tuple[Any, ...]:
    """Check that both paths give the same, and return that."""
    fast = await exchange(server, asked, dialect, records, streams=False, **limits)
    streamed = await exchange(server, asked, dialect, records, streams=True, **limits)
    assert fast == streamed
    return fast


TO_GRPC = [
    *(("HTTP", name, "raw", "triton") for name in CLIENTS),
    *(("HTTP", name, "raw", "torchserve") for name in ("JSON", "binary", "raw binary", "V1")),
    *(("HTTP", name, "raw", "kserve") for name in ("JSON", "a header of Triton")),
    *(("HTTP", "JSON", response, "triton") for response in OVER_GRPC),
    *(
        ("HTTP", "V1", response, "triton")
        for response in ("of a large size", "an error", "no message")
    ),
    *(
        ("HTTP", "binary", response, "triton")
        for response in ("typed", "of a large size", "no status")
    ),
    # A server of other messages.
    *(("gRPC", "raw", response, "torchserve") for response in OVER_GRPC),
    *(("gRPC", "typed", response, "torchserve") for response in ("raw", "typed")),
    # A server that may see the deadline would see what is left of it.
    *(("gRPC", name, "raw", "kserve" if name == "metadata" else "triton") for name in GRPC_CLIENTS),
]
TO_HTTP = [
    *(("gRPC", name, "binary", "triton") for name in GRPC_CLIENTS),
    *(("gRPC", "raw", response, "triton") for response in OVER_HTTP),
    *(("gRPC", "typed", response, "json") for response in OVER_HTTP),
    ("gRPC", "raw", "binary", "json"),
]


def _asked(client: str, name: str) -> Asked:
    return (GRPC_CLIENTS if client == "gRPC" else CLIENTS)[name]


@pytest.mark.parametrize(("client", "name", "response", "dialect"), dict.fromkeys(TO_GRPC))
async def test_call_to_a_server_over_grpc_is_the_same_on_both_paths(
    client: str, name: str, response: str, dialect: str, call_records: list[CallRecord]
) -> None:
    async with grpc_server(*OVER_GRPC[response]) as server:
        await compare(server, _asked(client, name), dialect, call_records)


@pytest.mark.parametrize(("client", "name", "response", "dialect"), dict.fromkeys(TO_HTTP))
async def test_grpc_call_to_a_server_over_http_is_the_same_on_both_paths(
    client: str, name: str, response: str, dialect: str, call_records: list[CallRecord]
) -> None:
    async with http_server(OVER_HTTP[response]) as server:
        await compare(server, _asked(client, name), dialect, call_records)


@pytest.mark.parametrize("size", [1024, 1028])
async def test_cap_of_buffered_responses_over_grpc_is_the_same_on_both_paths(
    size: int, call_records: list[CallRecord]
) -> None:
    cap = 1024
    output = field(5, field(1, b"OUT") + field(2, b"FP32") + field(3, b"\xfa\x01"))
    message = output + field(6, bytes(1000))
    message = field(3, b"i" * (size - len(message) - 2)) + message
    assert len(message) == size
    async with grpc_server(framed(message), OK) as server:
        for name in ("JSON", "binary", "V1"):
            got = await compare(
                server, CLIENTS[name], "triton", call_records, max_buffered_body_bytes=cap
            )
            assert got[-1]["status"] == (200 if size <= cap else 502)
        # The message becomes larger for this client: the cap is that of both forms.
        asked = GRPC_CLIENTS["raw"]
        await compare(server, asked, "torchserve", call_records, max_buffered_body_bytes=cap)


@pytest.mark.parametrize("size", [800, 1200])
async def test_cap_of_buffered_responses_over_http_is_the_same_on_both_paths(
    size: int, call_records: list[CallRecord]
) -> None:
    async with http_server(binary_response(bytes(size))) as server:
        for name in ("raw", "typed"):
            got = await compare(
                server, GRPC_CLIENTS[name], "triton", call_records, max_buffered_body_bytes=1024
            )
            assert got[-1]["grpc_status"] == (0 if size <= 1024 else 14)


@needs_source
@pytest.mark.parametrize("name", CLIENTS)
async def test_usual_calls_to_servers_over_grpc_take_the_fast_path(
    name: str, fast_path_streams: list[str], call_records: list[CallRecord]
) -> None:
    async with grpc_server(*OVER_GRPC["raw"]) as server:
        asked = CLIENTS[name]
        await exchange(server, asked, "triton", call_records, streams=False)
    assert fast_path_streams == [MODEL_INFER] * asked.is_fast


@needs_source
@pytest.mark.parametrize("name", GRPC_CLIENTS)
async def test_usual_grpc_calls_to_servers_over_http_take_the_fast_path(
    name: str, fast_path_requests: list[str], call_records: list[CallRecord]
) -> None:
    async with http_server(OVER_HTTP["binary"]) as server:
        asked = GRPC_CLIENTS[name]
        await exchange(server, asked, "triton", call_records, streams=False)
    assert [each for each in fast_path_requests if each == INFER] == [INFER] * asked.is_fast
