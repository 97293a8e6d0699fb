"""Requests to generate are served from servers over gRPC, as Triton serves them over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.protocol.grpc.framing import frame
from gateway.upstream import metadata_cache
from tests.support.gateway import RunningGateway, gateway_client, running_gateway
from tests.support.grpc.proto_file import message_class
from tests.support.grpc.wire_bytes import encode
from tests.support.http_messages import request
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


# ------------------------------------------------------------------------------- requests


async def test_members_become_inputs_and_parameters_of_one_message() -> None:
    received: list[bytes] = []

    def stream(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterable[bytes]:
        received.extend(requests)  # ends, as the gateway has closed its side
        yield in_stream(reply())

    async with gateway_for(stream) as (server, _, client):
        members = {"id": "7", "parameters": {"b": True, "s": "x"}, "i": 5, "d": 0.5}
        response = await client.ask(ask("/v2/models/m/versions/3/generate", **members))
    assert response.status == 200, response.body
    (data,) = received
    sent = message_class("ModelInferRequest").FromString(data)
    assert (sent.model_name, sent.model_version, sent.id) == ("m", "3", "7")
    assert [(each.name, each.datatype, list(each.shape)) for each in sent.inputs] == [
        ("IN", "BYTES", [1])
    ]
    assert list(sent.raw_input_contents) == [b"\x02\0\0\0hi"]
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in sent.parameters.items()
    }
    assert parameters == {"id": "7", "b": True, "s": "x", "i": 5, "d": 0.5}
    assert [path.rpartition("/")[2] for path in server.paths] == [
        "ModelMetadata",
        "ModelConfig",
        "ModelStreamInfer",
    ]


async def test_large_text_is_sent() -> None:
    def stream(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterable[bytes]:
        (data,) = requests
        raw = message_class("ModelInferRequest").FromString(data).raw_input_contents[0]
        yield in_stream(reply(raw[4:]))

    text = "zwölf\n" * 200_000
    response = await served(stream, request_=ask(GENERATE, IN=text))
    assert response.json["OUT"] == text


async def test_header_that_crashes_a_triton_is_not_sent() -> None:
    async with gateway_for(messages(in_stream(reply()))) as (server, _, client):
        headers = {"triton_grpc_error": "true", "x-other": "1"}
        response = await client.call("POST", STREAM, b'{"IN": "hi"}', headers)
    assert response.status == 200
    sent = dict(server.metadata[-1])
    assert "triton_grpc_error" not in sent
    assert sent["x-other"] == "1"


REFUSED = [
    (b"", 400, "no body"),
    (b'{"IN": 5}', 400, "input 'IN'"),
    (b'{"IN": "a", "p": "\\ud83d"}', 400, "surrogate"),
    (b'{"IN": [' + b"1," * 200_000 + b"1]}", 413, "not within strings"),
    (b'{"IN": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "nested deeper"),
]


@pytest.mark.parametrize(("body", "status", "text"), REFUSED)
async def test_invalid_request_never_reaches_the_server(
    body: bytes, status: int, text: str
) -> None:
    async with gateway_for() as (server, _, client):
        response = await client.call("POST", GENERATE, body)
    assert response.status == status
    assert text in response.error
    assert "ModelStreamInfer" not in {path.rpartition("/")[2] for path in server.paths}


async def test_request_above_the_cap_is_refused() -> None:
    response = await served(max_buffered_body_bytes=1024, request_=ask(IN="a" * 2000))
    assert response.status == 413
    assert "1024 bytes" in response.error


async def test_other_methods_are_not_allowed() -> None:
    async with gateway_for() as (_, _, client):
        response = await client.call("GET", STREAM)
    assert (response.status, response.error) == (405, "Method Not Allowed")


async def test_unknown_model_is_told_by_the_server() -> None:
    unknown = fail(grpc.StatusCode.NOT_FOUND, "unknown model: 'm'")
    response = await served(unary={"ModelMetadata": unknown})
    assert (response.status, response.error) == (404, "unknown model: 'm'")


@pytest.mark.parametrize(
    ("body", "metadata"),
    [
        (ask(IN=[1, 2, 3]), model_metadata("INT32", -1)),
        (ask(IN=1), model_metadata("INT32", 1)),
    ],
    ids=["shape", "datatype"],
)
async def test_metadata_that_is_outdated_is_fetched_again_once_in_an_interval(
    body: bytes, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_for(messages(in_stream(reply()))) as (server, _, client):
        assert (await client.ask(ask())).status == 200
        assert (await client.ask(body)).status == 400
        server.unary["ModelMetadata"] = metadata
        for _ in range(10):
            assert (await client.ask(body)).status == 400
        assert [path.rpartition("/")[2] for path in server.paths].count("ModelMetadata") == 2
        monkeypatch.setattr(metadata_cache, "RECHECK_INTERVAL", 0.0)
        assert (await client.call("POST", STREAM, b"{")).status == 400
        assert (await client.ask(body)).status == 200


# ------------------------------------------------------------------------------ responses


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


@pytest.mark.parametrize("count", [0, 2])
async def test_generate_wants_one_response(count: int) -> None:
    response = await served(messages(*[in_stream(reply())] * count), request_=ask(GENERATE))
    assert response.status == 400
    assert "exactly 1 response" in response.error


async def test_generate_cancels_a_stream_that_it_cannot_serve() -> None:
    ended = threading.Event()
    async with gateway_for(_endless(ended)) as (_, _, client):
        response = await client.ask(ask(GENERATE))
        assert response.status == 400
        assert await asyncio.to_thread(ended.wait, 5)


@pytest.mark.parametrize("target", [GENERATE, STREAM])
async def test_empty_last_response_does_not_count(target: str) -> None:
    end = message_class("ModelInferResponse")(model_name="m")
    end.parameters["triton_final_response"].bool_param = True
    stream = messages(in_stream(reply()), in_stream(end.SerializeToString()))
    response = await served(stream, request_=ask(target))
    assert event_of().removeprefix(b"data: ").strip() in response.body
    assert response.body.count(b"model_name") == 1


# --------------------------------------------------------------------------------- errors


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

SERVED: dict[str, tuple[Streaming, str, int, bytes]] = {
    "one response": (
        messages(in_stream(reply(other=True))),
        GENERATE,
        200,
        DOCUMENT + b',"other":true}',
    ),
    "note of the last one": (
        messages(in_stream(reply(triton_final_response=True))),
        GENERATE,
        200,
        DOCUMENT + b"}",
    ),
    "no response": (messages(), STREAM, 200, b""),
    "MLServer's": (messages(reply(b"1"), reply(b"2")), STREAM, 200, event_of("1") + event_of("2")),
    "long": (messages(in_stream(reply(LONG.encode()))), STREAM, 200, event_of(LONG)),
    "error before inference": (messages(in_stream(error="no")), STREAM, 400, NO),
    "error before inference, document": (messages(in_stream(error="no")), GENERATE, 400, NO),
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
    "status after a response, document": (
        *(_failing(CODES.INTERNAL, "no", in_stream(reply())), GENERATE, 500, NO),
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


async def test_server_without_streams_is_named() -> None:
    failing = _failing(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    response = await served(failing)
    assert response.status == 501
    assert "upstream 'servers' does not serve ModelStreamInfer" in response.error


async def test_invalid_message_names_the_upstream() -> None:
    response = await served(messages(b"\x12\x05abc"))
    assert response.status == 502
    assert "upstream 'servers'" in response.error


async def test_invalid_message_after_a_response_is_the_last_event() -> None:
    async with gateway_for(messages(in_stream(reply()), b"\x12\x05abc")) as (_, gateway, client):
        response = await client.ask(ask())
        await gateway.until_idle()
    assert response.body.startswith(event_of() + b'data: {"error":"upstream \'servers\'')
    assert response.body.endswith(b'"}\n\n')


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
        breaks_off.clear()
        await peer.connection.close()

    async with (
        ScriptedServer(http2_script(play)) as server,
        gateway_client(server.url.replace("http:", "grpc:")) as client,
    ):
        for _ in range(2):  # the connection serves on
            await client.send(ask())
            await client.head()
            assert await client.chunk() == event_of()
            breaks_off.set()
            last = await client.chunk()
            assert await client.chunk() == b""
            error = "upstream 'servers' closed the connection before the end of its response"
            assert last == event(error=error)


async def test_bytes_that_are_no_text_are_an_error_by_policy() -> None:
    stream = messages(in_stream(reply(b"\xff")))
    async with gateway_for(stream) as (_, _, client):
        assert (await client.ask(ask())).status == 406
    async with gateway_for(stream, route={"bytes": "base64"}) as (_, _, client):
        assert (await client.ask(ask())).body == event_of("/w==")


async def test_message_above_the_cap_is_refused() -> None:
    async with gateway_for(
        messages(in_stream(reply(bytes(5000)))), max_buffered_body_bytes=4000
    ) as (_, _, client):
        response = await client.ask(ask())
    assert response.status == 502
    assert "max_buffered_body_bytes" in response.error


async def test_server_that_does_not_respond_is_late() -> None:
    ended = threading.Event()

    def stream(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        context.add_callback(ended.set)
        ended.wait(10)
        yield from ()

    async with gateway_for(stream, request_timeout=0.5) as (_, _, client):
        response = await client.ask(ask())
        assert await asyncio.to_thread(ended.wait, 5)
    assert response.status == 504
    assert "upstream 'servers'" in response.error


async def test_server_that_is_gone_is_named(gone: str) -> None:
    async with gateway_client(gone) as client:
        response = await client.ask(ask())
    assert response.status == 503
    assert "upstream 'servers'" in response.error


async def test_another_endpoint_is_asked_if_one_is_gone(gone: str) -> None:
    with grpc_server(
        unary={"ModelMetadata": TEXT}, streams={"ModelStreamInfer": messages(in_stream(reply()))}
    ) as server:
        async with gateway_client(gone, server.url) as client:
            for _ in range(4):
                assert (await client.ask(ask())).body == event_of()


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


# ---------------------------------------------------------------------------- flow control


def _endless(ended: threading.Event, text: bytes = b"hi") -> Streaming:
    def stream(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        context.add_callback(ended.set)
        while not ended.is_set():
            yield in_stream(reply(text))

    return stream


async def test_client_that_leaves_cancels_the_stream() -> None:
    ended = threading.Event()

    def stream(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        context.add_callback(ended.set)
        yield in_stream(reply())
        ended.wait(10)

    async with gateway_for(stream) as (_, gateway, client):
        await client.send(ask())
        await client.head()
        assert await client.chunk() == event_of()
        await client.close()
        assert await asyncio.to_thread(ended.wait, 5)
        await gateway.until_idle()


async def test_client_that_does_not_read_holds_the_server_back() -> None:
    ended = threading.Event()
    sent = 0

    def stream(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        nonlocal sent
        context.add_callback(ended.set)
        while not ended.is_set():
            sent += 1
            yield in_stream(reply(bytes(100_000)))

    async with gateway_for(stream) as (_, gateway, client):
        await client.send(ask())
        assert (await client.head()).status == 200
        client.stop_reading()
        before = -1
        while sent != before:  # half a second without a message
            before = sent
            await asyncio.sleep(0.5)
        assert 0 < sent < 1000
        assert gateway.gateway.listener.buffers.total < 32 * 2**20
        await client.close()
        assert await asyncio.to_thread(ended.wait, 5)


# ----------------------------------------------------------------------------------- record


async def test_line_of_the_log_tells_forms_sizes_and_times(tmp_path: Path) -> None:
    log = tmp_path / "log"
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    message = in_stream(reply())
    async with gateway_for(messages(message, message), general=general) as (
        server,
        gateway,
        client,
    ):
        response = await client.ask(ask())
        await gateway.until_idle()
    line = json.loads(log.read_text().splitlines()[-1])
    assert (line["operation"], line["model"], line["server_form"]) == ("generate", "m", "grpc")
    assert (line["status"], line["answered_by"], line["attempts"]) == (200, "server", 1)
    assert line["endpoint"] == server.url
    assert line["response_bytes"] == len(response.body)
    assert line["received_bytes"] == 2 * (5 + len(message))
    assert line["sent_bytes"] > 5
    assert 0 < line["first_byte_ms"] <= line["server_ms"] <= line["duration_ms"]
    assert "reason" not in line


async def test_line_of_the_log_tells_why_a_stream_broke_off(tmp_path: Path) -> None:
    log = tmp_path / "log"
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    stream = messages(in_stream(reply()), b"\x12\x05abc")
    async with gateway_for(stream, general=general) as (server, gateway, client):
        await client.ask(ask())
        await gateway.until_idle()
    line = json.loads(log.read_text().splitlines()[-1])
    assert (line["status"], line["error_kind"]) == (200, "bad_response")
    assert server.url in line["reason"]
