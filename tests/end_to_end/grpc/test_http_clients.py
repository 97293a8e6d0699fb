"""Clients over HTTP are served by servers over gRPC, as by servers over HTTP; also generate."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.protocol.grpc.framing import frame
from tests.support.gateway import RunningGateway, gateway_client, running_gateway, until
from tests.support.grpc.proto_file import ModelInferRequest, message_class
from tests.support.grpc.wire_bytes import encode
from tests.support.http_messages import request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    binary_header,
    infer_binary,
    infer_json,
    infer_raw,
)
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.grpc_server import (
    GrpcServer,
    Streaming,
    fail,
    grpc_server,
    model_metadata,
)
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import ScriptedServer


async def _ask(server: GrpcServer, *requests: bytes) -> list[ReceivedResponse]:
    async with gateway_client(server.url) as client:
        return [await client.ask(data) for data in requests]


ELEMENTS: dict[str, list[Any]] = {
    "BOOL": [True, False, True],
    "UINT64": [0, 2**64 - 1],
    "BF16": [1.5, -2.0],
    "BYTES": ["", "zwölf", "a\nb"],
}


@pytest.mark.parametrize(("datatype", "data"), ELEMENTS.items(), ids=ELEMENTS)
async def test_json_travels_there_and_back(
    server: GrpcServer, datatype: str, data: list[Any]
) -> None:
    entry = {"name": "IN", "datatype": datatype, "shape": [len(data)], "data": data}
    (response,) = await _ask(
        server, infer_json(json.dumps({"id": "7", "inputs": [entry]}).encode())
    )
    assert response.status == 200, response.body
    assert response.json == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [{**entry, "name": "OUT"}],
    }
    (sent,) = map(ModelInferRequest.FromString, server.requests)
    assert sent.raw_input_contents
    assert not sent.inputs[0].contents.ByteSize()


async def test_other_forms_travel_there_and_back(server: GrpcServer) -> None:
    tensor = np.arange(500_000, dtype="<f4").tobytes()
    large = infer_binary(binary_header(len(tensor), binary_output=True), tensor)
    predict = request("POST", "/v1/models/m:predict", b'{"instances": [1.5, -2.0]}')
    binary, raw, predicted = await _ask(server, large, infer_raw(FLOATS.tobytes()), predict)
    size = int(binary.head.get(HEADER_LENGTH) or 0)
    (output,) = json.loads(binary.body[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": len(tensor)}
    assert binary.body[size:] == tensor
    assert FLOATS.tobytes() in raw.body
    assert predicted.json == {"predictions": [1.5, -2.0]}
    # A raw request is read by the metadata; the config says if its first dimension is the batch.
    rpcs = [path.rpartition("/")[2] for path in server.paths]
    assert rpcs[:4] == ["ModelInfer", "ModelMetadata", "ModelConfig", "ModelInfer"]


async def test_fields_of_grpc_in_a_request_over_http_do_not_reach_the_server(
    server: GrpcServer,
) -> None:
    fields = {"grpc-timeout": "soon", "grpc-encoding": "none", "X-Own": "1"}
    get = request("GET", "/v2/models/m", headers=fields)
    assert [each.status for each in await _ask(server, infer_json(headers=fields), get)] == [
        200
    ] * 2
    assert all(dict(metadata)["x-own"] == "1" for metadata in server.metadata)


async def test_response_that_is_compressed_unasked_is_read() -> None:
    """Servers on Go compress if they are set to, whatever the client says that it reads."""
    response = message_class("ModelInferResponse")(model_name="m")
    response.outputs.add(name="OUT", datatype="FP32", shape=FLOATS.shape)
    response.raw_output_contents.append(FLOATS.tobytes())
    tensors = [{"name": "IN", "datatype": "FP32", "shape": [-1]}]
    described = message_class("ModelMetadataResponse")(name="m", inputs=tensors, outputs=tensors)
    in_stream = message_class("ModelStreamInferResponse")(infer_response=response)
    documents = {
        "ModelInfer": response.SerializeToString(),
        "ModelMetadata": described.SerializeToString(),
        "ModelConfig": b"",
        "ModelStreamInfer": in_stream.SerializeToString(),
    }

    async def play(peer: Http2Peer) -> None:
        with suppress(asyncio.IncompleteReadError):
            for number in itertools.count():
                stream = await peer.request(number)
                assert "grpc-accept-encoding" not in dict(stream.headers)
                message = gzip.compress(documents[stream.path.rpartition("/")[2]])
                await peer.respond(
                    stream,
                    b"\1" + len(message).to_bytes(4) + message,
                    [("content-type", "application/grpc"), ("grpc-encoding", "gzip")],
                    [("grpc-status", "0")],
                )

    async with (
        ScriptedServer(http2_script(play)) as server,
        gateway_client(server.url.replace("http:", "grpc:")) as client,
    ):
        inferred = await client.ask(infer_json())
        metadata = await client.ask(request("GET", "/v2/models/m"))
        generated = await client.ask(request("POST", "/v2/models/m/generate", b'{"IN": [1]}'))
    numbers = pytest.approx(FLOATS.tolist())
    assert inferred.json["outputs"][0]["data"] == numbers
    assert metadata.json["name"] == "m"
    assert generated.json["OUT"] == numbers


async def test_operations_beside_inference_are_served_over_grpc(server: GrpcServer) -> None:
    tensor = {"datatype": "FP32", "shape": [-1]}
    expected = {
        "/v2/health/ready": {"ready": True},
        "/v2": {"name": "triton", "version": "2.51.0", "extensions": ["binary_tensor_data"]},
        "/v2/models/m": {
            "name": "m",
            "versions": ["1"],
            "platform": "identity",
            "inputs": [{"name": "IN", **tensor}],
            "outputs": [{"name": "OUT", **tensor}],
        },
    }
    replies = await _ask(server, *(request("GET", path) for path in expected))
    assert [(each.status, each.json) for each in replies] == [
        (200, document) for document in expected.values()
    ]


async def test_operation_that_the_server_or_grpc_lacks_is_named(server: GrpcServer) -> None:
    lacking, unknown = await _ask(
        server, request("GET", "/v2/logging"), request("POST", "/v2/models/m/explain", b"{}")
    )
    assert (lacking.status, unknown.status) == (501, 501)
    assert "upstream 'servers' does not serve LogSettings" in lacking.error
    assert "gRPC" in unknown.error


NAMELESS = [
    infer_json().replace(b"/models/m/", b"/models/a%FFb/"),
    infer_raw(FLOATS.tobytes()).replace(b"/models/m/", b"/models/a%FFb/"),
    infer_json().replace(b"/models/m/", b"/models/m/versions/a%FFb/"),
    request("GET", "/v2/models/a%FFb"),
    request("POST", "/v2/models/a%FFb/generate", b"{}"),
    request("POST", "/v1/models/a%FFb:predict", b'{"instances": [1]}'),
    request("POST", "/v2/repository/models/a%FFb/load", b"{}"),
]


async def test_name_that_protobuf_cannot_have_is_refused(server: GrpcServer) -> None:
    """It must not become that of another model."""
    for response in await _ask(server, *NAMELESS):
        assert response.status == 400, response.body
        assert '"a%FFb", which is not UTF-8 when it is decoded' in response.error
    assert server.requests == []


async def test_message_that_is_buffered_counts_in_the_memory_budget() -> None:
    size = 1_000_000

    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        message = frame(size) + bytes(size - 1)
        await peer.respond(stream, message, [("content-type", "application/grpc")], end=False)
        await peer.serve_to_end()

    async with (
        ScriptedServer(http2_script(play)) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
    ):
        budget = gateway.gateway.active_config.router.memory_budget
        async with gateway.client() as client:
            await client.send(infer_json())
            await until(lambda: budget.buffers.reserved >= size)


TEXT = model_metadata("BYTES", 1)
GENERATE, STREAM = "/v2/models/m/generate", "/v2/models/m/generate_stream"


def reply(text: bytes = b"hi", *, datatype: str = "BYTES", **parameters: Any) -> bytes:
    """Write a ModelInferResponse with one output OUT."""
    response = message_class("ModelInferResponse")(model_name="m", model_version="1")
    response.outputs.add(name="OUT", datatype=datatype, shape=[1])
    data = len(text).to_bytes(4, "little") + text if datatype == "BYTES" else text
    response.raw_output_contents.append(data)
    for name, value in parameters.items():
        response.parameters[name].bool_param = value
    return bytes(response.SerializeToString())


def in_stream(response: bytes = b"", error: str = "") -> bytes:
    """Write a ModelStreamInferResponse."""
    text = b"\x0a" + encode(len(error.encode())) + error.encode() if error else b""
    return text + b"\x12" + encode(len(response)) + response


def messages(*each: bytes) -> Streaming:
    """Make a stream that has the same messages for each call."""
    return lambda _requests, _context: iter(each)


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps(members, separators=(",", ":")).encode() + b"\n\n"


def event_of(text: str = "hi") -> bytes:
    return event(OUT=text, model_name="m", model_version="1")


@asynccontextmanager
async def gateway_for(
    stream: Streaming | None = None, **settings: Any
) -> AsyncIterator[tuple[GrpcServer, RunningGateway, RawClient]]:
    streams = {} if stream is None else {"ModelStreamInfer": stream}
    unary = settings.pop("unary", {"ModelMetadata": TEXT})
    with grpc_server(unary=unary, streams=streams) as server:
        async with (
            running_gateway(server.url, **settings) as gateway,
            gateway.client() as client,
        ):
            yield server, gateway, client


async def served(
    stream: Streaming | None = None, request_: bytes | None = None, **settings: Any
) -> ReceivedResponse:
    """Make one call."""
    async with gateway_for(stream, **settings) as (_, _, client):
        return await client.ask(request_ or ask())


def ask(target: str = STREAM, **members: Any) -> bytes:
    return request("POST", target, json.dumps({"IN": "hi", **members}).encode())


async def test_request_becomes_one_message_and_its_errors_are_told() -> None:
    received: list[bytes] = []

    def stream(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterable[bytes]:
        received.extend(requests)  # ends, as the gateway has closed its side
        yield in_stream(reply())

    async with gateway_for(stream) as (server, _, client):
        response = await client.ask(ask("/v2/models/m/versions/3/generate", id="7", i=5))
        invalid = await client.ask(ask(GENERATE, IN=5))
        other = await client.call("GET", STREAM)
        server.unary["ModelMetadata"] = fail(grpc.StatusCode.NOT_FOUND, "unknown model: 'n'")
        unknown = await client.ask(ask("/v2/models/n/generate"))
    assert response.status == 200, response.body
    (data,) = received
    sent = message_class("ModelInferRequest").FromString(data)
    assert (sent.model_name, sent.model_version, sent.id) == ("m", "3", "7")
    assert list(sent.raw_input_contents) == [b"\x02\0\0\0hi"]
    assert (sent.parameters["i"].int64_param, sent.parameters["id"].string_param) == (5, "7")
    assert (invalid.status, "input 'IN'" in invalid.error) == (400, True)
    assert (other.status, other.error) == (405, "Method Not Allowed")
    assert (unknown.status, unknown.error) == (404, "unknown model: 'n'")


async def test_each_response_becomes_an_event_at_once() -> None:
    next_one = threading.Semaphore(1)

    def stream(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterable[bytes]:
        for number in range(3):
            assert next_one.acquire(timeout=10)
            yield in_stream(reply(b"%d" % number))
        assert next_one.acquire(timeout=10)

    async with gateway_for(stream) as (_, _, client):
        await client.send(ask())
        head = await client.head()
        assert head.status == 200
        assert head.get("Content-Type") == "text/event-stream; charset=utf-8"
        for number in range(3):
            assert await client.chunk() == event_of(str(number))
            next_one.release()
        assert await client.chunk() == b""


# ------------------------------------------------------------------------------------------- errors


def _failing(code: grpc.StatusCode, text: str, *first: bytes) -> Streaming:
    def stream(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        yield from first
        context.abort(code, text)

    return stream


BEGUN = message_class("ModelInferResponse")(model_name="m").SerializeToString()
DOCUMENT = b'{"OUT":"hi","model_name":"m","model_version":"1"'
LONG = "0123456789" * 300_000
NO = b'{"error":"no"}'
CODES = grpc.StatusCode

END = message_class("ModelInferResponse")(model_name="m")
END.parameters["triton_final_response"].bool_param = True
LAST = in_stream(END.SerializeToString())
BROKEN = b"\x12\x05abc"
SERVED: dict[str, tuple[Streaming, str, int, bytes]] = {
    "one response": (
        messages(in_stream(reply(other=True, triton_final_response=True))),
        GENERATE,
        200,
        DOCUMENT + b',"other":true}',
    ),
    "empty last one": (messages(in_stream(reply()), LAST), GENERATE, 200, DOCUMENT + b"}"),
    "no response": (messages(), STREAM, 200, b""),
    "MLServer's": (messages(reply(b"1"), reply(b"2")), STREAM, 200, event_of("1") + event_of("2")),
    "long": (messages(in_stream(reply(LONG.encode()))), STREAM, 200, event_of(LONG)),
    "error before inference": (messages(in_stream(error="no")), STREAM, 400, NO),
    "error of the model first": (
        messages(in_stream(BEGUN, "größer"), in_stream(reply())),
        *(STREAM, 400, 'data: {"error":"größer"}\n\n'.encode() + event_of()),
    ),
    "error of the model later": (
        messages(in_stream(reply()), in_stream(BEGUN, "no"), in_stream(reply())),
        *(STREAM, 200, event_of() + event(error="no") + event_of()),
    ),
    "status": (_failing(CODES.INVALID_ARGUMENT, "no"), STREAM, 400, NO),
    "status, document": (_failing(CODES.UNAVAILABLE, "no"), GENERATE, 503, NO),
    "status after a response": (
        _failing(CODES.INTERNAL, "no", in_stream(reply())),
        *(STREAM, 200, event_of() + event(error="no")),
    ),
}


@pytest.mark.parametrize(("stream", "target", "status", "body"), SERVED.values(), ids=SERVED)
async def test_stream_becomes_events_or_a_document(
    stream: Streaming, target: str, status: int, body: bytes
) -> None:
    response = await served(stream, ask(target))
    assert (response.status, response.body) == (status, body)
    is_stream = body.startswith(b"data: ")
    kind = "text/event-stream; charset=utf-8" if is_stream else "application/json"
    assert response.head.get("Content-Type") == kind or not body


REFUSED: dict[str, tuple[Streaming, str, int, str]] = {
    "no response": (messages(), GENERATE, 400, "exactly 1 response"),
    "two responses": (messages(*[in_stream(reply())] * 2), GENERATE, 400, "exactly 1 response"),
    "no streams": (
        _failing(CODES.UNIMPLEMENTED, "Method not found!"),
        *(STREAM, 501, "upstream 'servers' does not serve ModelStreamInfer"),
    ),
    "invalid message": (messages(BROKEN), STREAM, 502, "upstream 'servers'"),
    "large message": (
        messages(in_stream(reply(bytes(5000)))),
        *(STREAM, 502, "max_buffered_body_bytes"),
    ),
}


@pytest.mark.parametrize(("stream", "target", "status", "text"), REFUSED.values(), ids=REFUSED)
async def test_stream_that_cannot_be_served_is_an_error(
    stream: Streaming, target: str, status: int, text: str
) -> None:
    response = await served(stream, ask(target), max_buffered_body_bytes=4000)
    assert response.status == status
    assert text in response.error


async def test_server_that_breaks_off_is_named_in_the_last_event() -> None:
    breaks_off = asyncio.Event()
    documents = {"ModelMetadata": TEXT(b"", None), "ModelConfig": b""}

    async def play(peer: Http2Peer) -> None:
        head = [("content-type", "application/grpc")]
        for number in itertools.count():
            stream = await peer.request(number)
            method = stream.path.rpartition("/")[2]
            message = documents.get(method, in_stream(reply()))
            ends = [("grpc-status", "0")] if method in documents else None
            await peer.respond(stream, frame(len(message)) + message, head, ends, end=bool(ends))
            if not ends:
                break
        await breaks_off.wait()
        await peer.connection.close()

    async with (
        ScriptedServer(http2_script(play)) as server,
        gateway_client(server.url.replace("http:", "grpc:")) as client,
    ):
        await client.send(ask())
        await client.head()
        assert await client.chunk() == event_of()
        breaks_off.set()
        error = "upstream 'servers' closed the connection before the end of its response"
        assert await client.chunk() == event(error=error)
        assert await client.chunk() == b""


async def test_status_is_retried_before_the_client_has_a_response_only() -> None:
    good = {"ModelStreamInfer": messages(in_stream(reply()))}
    busy = {"ModelStreamInfer": _failing(grpc.StatusCode.UNAVAILABLE, "busy")}
    late = {"ModelStreamInfer": _failing(grpc.StatusCode.UNAVAILABLE, "busy", in_stream(reply()))}
    for failing, expected in ((busy, {event_of()}), (late, {event_of(), _BUSY_EVENTS})):
        with (
            grpc_server(unary={"ModelMetadata": TEXT}, streams=good) as server,
            grpc_server(unary={"ModelMetadata": TEXT}, streams=failing) as other,
        ):
            async with gateway_client(other.url, server.url, route={"retry_on": [503]}) as client:
                # A late status may be there before the response was passed on.
                assert {(await client.ask(ask())).body for _ in range(4)} <= expected
            assert any(path.endswith("ModelStreamInfer") for path in other.paths)


_BUSY_EVENTS = event_of() + event(error="busy")


async def test_call_without_room_in_the_memory_budget_is_refused() -> None:
    text = bytes(3_000_000)
    async with gateway_for(messages(in_stream(reply(text))), max_buffered_bytes="4MiB") as (
        _,
        gateway,
        client,
    ):
        response = await client.ask(ask())
        await gateway.until_idle()
        assert gateway.gateway.listener.buffers.reserved == 0
    assert response.status == 503
    assert "limits.max_buffered_bytes" in response.error


# ------------------------------------------------------------------------------------- flow control


class _Endless:
    """A stream of one message again and again, until it is cancelled."""

    def __init__(self, message: bytes = in_stream(reply())) -> None:
        self.sent = 0
        self.ended = threading.Event()
        self._message = message

    def __call__(
        self, _requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterable[bytes]:
        context.add_callback(self.ended.set)
        while not self.ended.is_set():
            self.sent += 1
            yield self._message


async def test_generate_cancels_a_stream_that_it_cannot_serve() -> None:
    stream = _Endless()
    async with gateway_for(stream) as (_, _, client):
        response = await client.ask(ask(GENERATE))
        assert response.status == 400
        assert await asyncio.to_thread(stream.ended.wait, 5)


async def test_client_that_does_not_read_holds_the_server_back_until_it_leaves() -> None:
    stream = _Endless(in_stream(reply(bytes(100_000))))
    async with gateway_for(stream) as (_, gateway, client):
        await client.send(ask())
        assert (await client.head()).status == 200
        client.stop_reading()
        before = -1
        while stream.sent != before:  # half a second without a message
            before = stream.sent
            await asyncio.sleep(0.5)
        assert 0 < stream.sent < 1000
        assert gateway.gateway.listener.buffers.total < 32 * 2**20
        await client.close()
        assert await asyncio.to_thread(stream.ended.wait, 5)
        await gateway.until_idle()


# ------------------------------------------------------------------------------------------- record


async def test_line_of_the_log_tells_forms_sizes_times_and_why_a_stream_broke_off(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    message = in_stream(reply())
    async with gateway_for(messages(message, BROKEN), general=general) as (server, gateway, client):
        response = await client.ask(ask())
        await gateway.until_idle()
    assert response.body.startswith(event_of() + b'data: {"error":"upstream \'servers\'')
    assert response.body.endswith(b'"}\n\n')
    line = json.loads(log.read_text().splitlines()[-1])
    assert (line["operation"], line["model"], line["server_form"]) == ("generate", "m", "grpc")
    assert (line["status"], line["answered_by"], line["attempts"]) == (200, "server", 1)
    assert (line["endpoint"], line["error_kind"]) == (server.url, "bad_response")
    assert server.url in line["reason"]
    assert line["response_bytes"] == len(response.body)
    assert line["received_bytes"] == 10 + len(message) + len(BROKEN)
    assert line["sent_bytes"] > 5
    assert 0 < line["first_byte_ms"] <= line["server_ms"] <= line["duration_ms"]
