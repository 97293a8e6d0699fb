"""A call with gRPC on one side or both looks the same to client and server on both paths.

A small call takes the fast path if there is a connection to its server with a stream free. One with
a long header takes the streaming path. The client of these tests speaks HTTP/2.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import pytest
from h2.errors import ErrorCodes

from gateway.http1.deferrals import DEFER_TIMEOUT
from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.framing import PREFIX_SIZE, frame
from gateway.system.buffers import MAX_WINDOW
from tests.support.checks.call_records import call_records as call_records
from tests.support.checks.fast_path import fast_path_requests as fast_path_requests
from tests.support.checks.fast_path import fast_path_streams as fast_path_streams
from tests.support.compiled import needs_source
from tests.support.gateway import UPSTREAM, RunningGateway, running_gateway
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field as message_field
from tests.support.http2_client import Http2Client, connect_http2
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

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

MODEL_INFER = f"/{SERVICE}/ModelInfer"
GRPC = [("content-type", "application/grpc+proto"), ("te", "trailers"), ("user-agent", "test")]
OK = [("grpc-status", "0")]
LONG = [("x-long", "l" * 3000)]
TYPE = ("content-type", "application/grpc")

Fields = list[tuple[str, str]]
Serve = Callable[[Http2Peer, ReceivedStream], Awaitable[None]]


def framed(*fields: bytes) -> bytes:
    message = b"".join(fields)
    return frame(len(message)) + message


DATA = FLOATS.tobytes()
_TENSOR = message_field(2, b"FP32") + message_field(3, b"\x03")
_INPUT = message_field(5, message_field(1, b"IN") + _TENSOR)
_TYPED_INPUT = message_field(
    5, message_field(1, b"IN") + _TENSOR + message_field(5, message_field(6, DATA))
)
_OUTPUT = message_field(5, message_field(1, b"OUT") + _TENSOR)
_TYPED_OUTPUT = message_field(
    5, message_field(1, b"OUT") + _TENSOR + message_field(5, message_field(6, DATA))
)
_MODEL = message_field(1, b"m")
RAW = framed(_MODEL, _INPUT, message_field(3, b"id"), message_field(7, DATA))
LARGE_DATA = (b"classification tensorgate-" + bytes(38)) * 4096
_LARGE_TENSOR = message_field(2, b"FP32") + message_field(3, b"\x80\x80\x04")
_LARGE_INPUT = message_field(5, message_field(1, b"IN") + _LARGE_TENSOR)
_LARGE_TYPED_INPUT = message_field(
    5,
    message_field(1, b"IN") + _LARGE_TENSOR + message_field(5, message_field(6, LARGE_DATA)),
)
RAW_OUTPUT = framed(_MODEL, message_field(3, b"id"), _OUTPUT, message_field(6, DATA))
LARGE_OUTPUT = framed(
    _MODEL,
    message_field(5, message_field(1, b"OUT") + _LARGE_TENSOR),
    message_field(6, bytes(4 * 65536)),
)

# ------------------------------------------------------------------------------------------ clients


@dataclass(frozen=True)
class Asked:
    """What a client sends."""

    target: str = MODEL_INFER
    body: bytes = RAW
    headers: tuple[tuple[str, str], ...] = ()
    is_fast: bool = True
    """It takes the fast path between HTTP and gRPC."""


_LISTED = json.dumps({**json.loads(json_request()), "outputs": [{"name": "OUT"}]}).encode()
_LENGTH = HEADER_LENGTH.lower()
PREDICT = Asked("/v1/models/m:predict", b'{"instances": [1, 2, 3]}')
HTTP_CLIENTS = {
    "JSON": Asked(INFER, json_request()),
    "JSON with outputs": Asked(INFER, _LISTED),
    "JSON that is not valid": Asked(INFER, json_request()[:-1], is_fast=False),
    "binary": Asked(INFER, binary_header(12) + DATA, ((_LENGTH, str(len(binary_header(12)))),)),
    "raw binary": Asked(INFER, DATA, ((_LENGTH, "0"),)),
    "V1": PREDICT,
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
    "raw": Asked(),
    "typed": Asked(body=framed(_MODEL, _TYPED_INPUT)),
    "raw and large": Asked(body=framed(_MODEL, _LARGE_INPUT, message_field(7, LARGE_DATA))),
    "typed and large": Asked(body=framed(_MODEL, _LARGE_TYPED_INPUT), is_fast=False),
    "metadata": Asked(
        headers=(("x-a", "1"), ("grpc-accept-encoding", "identity, gzip"), ("grpc-timeout", "9S"))
    ),
    "a header of Triton": Asked(headers=(("triton_grpc_error", "true"),)),
    "data that do not fit": Asked(
        body=framed(_MODEL, _INPUT, message_field(7, DATA[:-1])), is_fast=False
    ),
    "a broken message": Asked(body=framed(b"\x0a\x01m\xff"), is_fast=False),
    "no message": Asked(body=b"", is_fast=False),
}

# ------------------------------------------------------------------------------------------ servers


def answer(
    body: bytes = RAW_OUTPUT,
    trailers: Fields | None = OK,
    headers: Fields | None = None,
    *,
    is_late: bool = False,
) -> Serve:
    """Respond; with ``is_late`` the trailers come later than the gateway waits for them."""

    async def serve(peer: Http2Peer, stream: ReceivedStream) -> None:
        head = [TYPE, ("x-own", "1"), *(headers or [])]
        if not is_late:
            await peer.respond(stream, body, head, trailers)
            return
        await peer.respond(stream, body[:7], head, end=False)
        await asyncio.sleep(2 * DEFER_TIMEOUT)
        if body[7:]:
            await peer.send(stream, body[7:])
        peer.h2.send_headers(stream.id, trailers or [], end_stream=True)
        await peer.flush()

    return serve


def alone(*status: tuple[str, str]) -> Serve:
    """Respond with a head that ends the response, and has the status."""
    return answer(b"", None, [*status])


async def http_error(peer: Http2Peer, stream: ReceivedStream) -> None:
    """Respond as a proxy that does not speak gRPC."""
    head = [(":status", "503"), ("content-type", "text/html"), ("content-length", "4")]
    peer.h2.send_headers(stream.id, head)
    peer.h2.send_data(stream.id, b"busy", end_stream=True)
    await peer.flush()


async def close(peer: Http2Peer, stream: ReceivedStream) -> None:
    """Close the connection without a response."""
    await peer.connection.close()


async def hang(peer: Http2Peer, stream: ReceivedStream) -> None:
    """Never respond."""


def reset(code: int, after: bytes = b"", delay: float = 0) -> Serve:
    """Break off, after a part of a body if there is one."""

    async def serve(peer: Http2Peer, stream: ReceivedStream) -> None:
        if after:
            await peer.respond(stream, after, [TYPE], end=False)
        await asyncio.sleep(delay)
        await peer.reset(stream, code)

    return serve


class RefusesTwice:
    """Responds to the third attempt of each call alone."""

    def __init__(self) -> None:
        self._attempts = 0

    async def __call__(self, peer: Http2Peer, stream: ReceivedStream) -> None:
        """Serve an attempt."""
        self._attempts += 1
        serve = reset(ErrorCodes.REFUSED_STREAM) if self._attempts % 3 else answer()
        await serve(peer, stream)


@dataclass
class Server:
    """A server, and what it was asked by the calls to ``watched``; before, it responds well."""

    url: str = ""
    asked: list[tuple[Fields, bytes]] = field(default_factory=list)
    watched: str = ""


def _metadata() -> bytes:
    tensor = message_field(2, b"FP32") + message_field(3, b"\xff" * 9 + b"\x01")
    described = ((4, b"IN"), (5, b"OUT"))
    return framed(
        _MODEL, *(message_field(at, message_field(1, name) + tensor) for at, name in described)
    )


@asynccontextmanager
async def grpc_server(serve: Serve) -> AsyncIterator[Server]:
    """Serve calls over gRPC."""
    server = Server()

    async def play(peer: Http2Peer) -> None:
        for number in itertools.count():
            stream = await peer.request(number)
            if server.watched and stream.path in (MODEL_INFER, server.watched):
                server.asked.append((list(stream.headers), bytes(stream.body)))
                await serve(peer, stream)
            elif stream.path.endswith("/ModelMetadata"):
                await peer.respond(stream, _metadata(), [TYPE], OK)
            else:
                message = RAW_OUTPUT if stream.path == MODEL_INFER else frame(0)
                await peer.respond(stream, message, [TYPE], OK)

    async with ScriptedServer(http2_script(play)) as running:
        server.url = running.url.replace("http://", "grpc://")
        yield server


@asynccontextmanager
async def http_server(response: bytes) -> AsyncIterator[Server]:
    """Serve calls over HTTP."""
    server = Server()

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.target.endswith("/infer"):
                head = [("", received.head.first), *received.head.headers]
                server.asked.append((head, received.body))
                await connection.send(response)
            else:
                await connection.send(http_response())

    async with ScriptedServer(script) as running:
        server.url = running.url
        yield server


# --------------------------------------------------------------------------------------- comparison

_VARYING = ("x-long", "x-request-id", "via", "x-forwarded-host", ":authority", "host", "date")
_ID = re.compile(rb"[0-9a-f]{32}")
"""The id of a V1 request is that of the call."""
_RECORDED = (
    "method target status grpc_status error_kind upstream attempts retries server_form"
    " request_bytes response_bytes request_elements response_elements"
)
_LABELS = ("route", "operation", "model", "version", "client_form")


@dataclass(frozen=True)
class Seen:
    """What client, server and operators saw of a call."""

    headers: Fields
    body: bytes
    trailers: Fields
    has_id: bool
    reset: int | None
    sent: list[tuple[Fields, bytes]]
    record: dict[str, Any]
    failures: int

    @property
    def status(self) -> tuple[str, str]:
        """The status and its text, which must be there once."""
        found = [
            line
            for line in (*self.headers, *self.trailers)
            if line[0] in ("grpc-status", "grpc-message")
        ]
        fields = dict(found)
        assert len(fields) == len(found)
        return fields.get("grpc-status", "-1"), unquote(fields.get("grpc-message", ""))


def _lines(headers: Fields) -> Fields:
    lines = [(name.lower(), value) for name, value in headers if name.lower() not in _VARYING]
    # What is left of a deadline is another for each call.
    return sorted((name, "" if name == "grpc-timeout" else value) for name, value in lines)


def _recorded(record: CallRecord) -> dict[str, Any]:
    shown = {name: getattr(record, name) for name in _RECORDED.split()}
    shown["labels"] = [getattr(record.labels, name) for name in _LABELS]
    for name in ("error", "server_error"):
        shown[name] = getattr(record, name).replace(record.endpoint or "-", "URL")
    return shown


@asynccontextmanager
async def connected(
    server: Server, watched: str = MODEL_INFER, window: int = 65_535, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, Http2Client]]:
    """Run a gateway that has connected to the server and knows its model, and connect to it."""
    server.watched = ""
    async with (
        running_gateway(server.url, **settings) as gateway,
        connect_http2(gateway.url, initial_window_size=window) as client,
    ):
        await client.call("POST", "/v2/x" if server.url[0] == "h" else PREDICT.target, PREDICT.body)
        await gateway.until_idle()
        gateway.gateway.listener.deferrals._large._timeout = 60.0  # the machine may be busy
        server.watched = watched
        server.asked.clear()
        yield gateway, client


async def exchange(
    server: Server,
    asked: Asked,
    records: list[CallRecord],
    *,
    streams: bool,
    **settings: Any,
) -> Seen:
    """Make a call on one of the paths."""
    more = [*(GRPC if asked.target.startswith(f"/{SERVICE}") else []), *(LONG if streams else [])]
    async with connected(server, asked.target, **settings) as (gateway, client):
        start = client.send_headers("POST", asked.target, [*asked.headers, *more], flush=False)
        await client.send_data(start, asked.body)
        reply = await client.response(start)
        await gateway.until_idle()
        failures = gateway.pool.snapshot()[0].consecutive_failures
    return Seen(
        _lines(reply.headers),
        reply.body,
        reply.trailers,
        reply.get("x-request-id") is not None,
        reply.reset,
        [(_lines(headers), _ID.sub(b"ID", body)) for headers, body in server.asked],
        _recorded(records[-1]),
        failures,
    )


async def compare(server: Server, asked: Asked, records: list[CallRecord], **settings: Any) -> Seen:
    """Check that both paths give the same, and return that."""
    fast = await exchange(server, asked, records, streams=False, **settings)
    streamed = await exchange(server, asked, records, streams=True, **settings)
    if fast.record["grpc_status"] == 13:  # a head that was not sent yet gives way to the error
        assert fast.status == streamed.status
        streamed = replace(streamed, headers=fast.headers, trailers=fast.trailers)
    assert fast == streamed
    return fast


# ------------------------------------------------------------------------------------- gRPC to gRPC


@dataclass(frozen=True)
class Case:
    """What server and client do; the client's status, the start of its text, and who has failed."""

    serve: Serve
    status: int = 0
    text: str = ""
    is_failure: bool = False
    asked: Asked = Asked()
    settings: dict[str, Any] = field(default_factory=dict)


_NO_LUCK = ("grpc-message", "no%20luck")


def _invalid(value: str = "ok", quoted: str = '"ok"', place: str = "trailers") -> Case:
    """Make a case of a status that is none: it becomes UNKNOWN, with what the server has sent."""
    # Several statuses are none.
    status = [*(("grpc-status", each) for each in value.split(", ")), _NO_LUCK, ("x-more", "1")]
    serve = {
        "trailers": answer(trailers=status),
        "trailers without a message": answer(b"", status),
        "trailers only": alone(*status),
        "later": answer(trailers=status, is_late=True),
    }[place]
    return Case(serve, 2, f"{UPSTREAM} sent an invalid grpc-status: {quoted}", is_failure=True)


def _not_one_message(serve: Serve, rpc: str = "ModelInfer") -> Case:
    """Make a case of a status OK for a unary call without its one message."""
    text = f"{UPSTREAM} did not respond with one gRPC message"
    return Case(serve, 13, text, is_failure=True, asked=Asked(f"/{SERVICE}/{rpc}"))


_PARTS = {
    "empty data": b"",
    "2 of 9 bytes": frame(9) + b"ab",
    "two": frame(0) * 2,
    "unknown flag": b"\2" + RAW_OUTPUT[1:],
}
_SENT = (
    *(("x-a", "1"), ("x-a", "2"), ("x-bin", "AAEC"), ("grpc-accept-encoding", "identity, gzip")),
    *(("forwarded", "for=1.2.3.4"), ("x-request-id", "mine")),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
)
CASES = {
    "ok": Case(answer()),
    "further trailers": Case(answer(trailers=[*OK, ("x-cost-bin", "AAE"), ("x-cost", "2")])),
    "empty message": Case(answer(frame(0))),
    "large message": Case(answer(frame(300_000) + bytes(300_000))),
    "length of the body": Case(answer(headers=[("content-length", str(len(RAW_OUTPUT)))])),
    "late status": Case(answer(trailers=[("grpc-status", "9"), _NO_LUCK], is_late=True), 9),
    "error": Case(
        answer(b"", [("grpc-status", "5"), ("grpc-message", "no %C3%A9 %% m")]), 5, "no é"
    ),
    "error after a message": Case(answer(trailers=[("grpc-status", "8")]), 8),
    "error after a part": Case(answer(frame(9) + b"ab", [("grpc-status", "5")]), 5),
    "error alone": Case(alone(("grpc-status", "3"), ("grpc-message", "bad")), 3, "bad"),
    # Triton ends texts with a space.
    "spaces": Case(answer(trailers=[("grpc-status", "3"), ("grpc-message", " a b ")]), 3, " a b "),
    "spaces, alone": Case(alone(("grpc-status", "3"), ("grpc-message", " a b ")), 3, " a b "),
    # Clients in Java take a status of three digits for unknown; one of no list passes.
    "three digits": Case(answer(trailers=[("grpc-status", "007")]), 7),
    "three digits, alone": Case(alone(("grpc-status", "007")), 7),
    "unknown status": Case(answer(trailers=[("grpc-status", "77")]), 77, is_failure=True),
    "two zeros": Case(answer(trailers=[("grpc-status", "00")])),
    "two zeros, late": Case(answer(trailers=[("grpc-status", "00")], is_late=True)),
    **{
        f"invalid status, {place}": _invalid(place=place)
        for place in ("trailers", "trailers without a message", "trailers only", "later")
    },
    "two statuses": _invalid("0, 13", '"0, 13"'),
    "status that is not ASCII": _invalid("\xb2", '"\xc2\xb2"'),
    "long status": _invalid("5" * 5000, f'"{"5" * 59}'),
    "no data": _not_one_message(answer(b"")),
    "OK alone": _not_one_message(alone(*OK)),
    **{name: _not_one_message(answer(body)) for name, body in _PARTS.items()},
    **{
        f"{name}, late": _not_one_message(answer(body, is_late=True))
        for name, body in _PARTS.items()
    },
    "two of another method": _not_one_message(answer(frame(0) * 2), "ModelMetadata"),
    "stream without a message": Case(answer(b""), asked=Asked(f"/{SERVICE}/ModelStreamInfer")),
    "no status": Case(answer(trailers=None), 14, is_failure=True),
    "trailers without a status": Case(answer(trailers=[("x-a", "b")]), 14, is_failure=True),
    "HTTP error": Case(http_error, -1, is_failure=True),
    "reset": Case(reset(ErrorCodes.INTERNAL_ERROR), 14, is_failure=True),
    "closed": Case(close, 14, is_failure=True),
    # RFC 9113, section 8.7: the server has not processed it.
    "refused twice": Case(RefusesTwice()),
    "hangs": Case(hang, 4, is_failure=True, settings={"request_timeout": "200ms"}),
    "hangs, idle timeout": Case(hang, 4, is_failure=True, settings={"idle_timeout": "200ms"}),
    "client's deadline": Case(hang, 4, asked=Asked(headers=(("grpc-timeout", "150m"),))),
    "invalid deadline": Case(hang, 3, asked=Asked(headers=(("grpc-timeout", "soon"),))),
    "deadline has passed": Case(hang, 4, asked=Asked(headers=(("grpc-timeout", "0m"),))),
    "server's deadline": Case(
        answer(b"", [("grpc-status", "4")]), 4, asked=Asked(headers=(("grpc-timeout", "5S"),))
    ),
    "metadata": Case(answer(), asked=Asked(headers=_SENT)),
    "no message": Case(answer(), asked=Asked(body=b"")),
    "cut short": Case(answer(), 3, asked=Asked(body=RAW[:-1])),
    "two messages": Case(answer(), 3, asked=Asked(body=RAW * 2)),
    "invalid message": Case(answer(), 3, asked=Asked(body=framed(b"\xff\xff\xff"))),
    "other flag": Case(answer(), 3, asked=Asked(body=b"\x07" + RAW[1:])),
    "too large": Case(
        answer(),
        8,
        asked=Asked(body=framed(_MODEL, message_field(7, bytes(2000)))),
        settings={"max_request_bytes": "1KiB"},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_call_is_the_same_on_both_paths(case: Case, call_records: list[CallRecord]) -> None:
    async with grpc_server(case.serve) as server:
        seen = await compare(server, case.asked, call_records, **case.settings)
    status, text = seen.status
    assert (status, text[: len(case.text)]) == (str(case.status), case.text)
    assert seen.failures == case.is_failure
    assert seen.record["grpc_status"] == case.status


async def test_part_of_a_response_is_an_error_on_both_paths_and_no_call_is_sent_again(
    call_records: list[CallRecord],
) -> None:
    """On the fast path the client gets no part of it."""
    part = RAW_OUTPUT[:9]
    for serve, begun in (
        (reset(ErrorCodes.CANCEL, part), False),
        (reset(ErrorCodes.REFUSED_STREAM, part), False),
        (reset(ErrorCodes.REFUSED_STREAM, part, 2 * DEFER_TIMEOUT), True),
    ):
        for streams in (False, True):
            async with grpc_server(serve) as server:
                seen = await exchange(server, Asked(), call_records, streams=streams)
            assert seen.body == (part if begun or streams else b"")
            assert (seen.status[0], len(seen.sent)) == ("14", 1)
            assert seen.record["error_kind"].name == "BAD_RESPONSE"


# --------------------------------------------------------------------------------- HTTP on one side

OVER_GRPC: dict[str, Serve] = {
    "raw": answer(),
    "typed": answer(framed(_MODEL, _TYPED_OUTPUT)),
    "of a large size": answer(LARGE_OUTPUT),
    "an error": answer(b"", [("grpc-status", "3"), ("grpc-message", "no %C3%A9")]),
    "no status": answer(b"", [("x-none", "1")]),
    "no message": answer(b""),
    "a broken message": answer(framed(b"\xff\xff")),
    "data that do not fit": answer(framed(_OUTPUT, message_field(6, DATA[:-1]))),
    "further trailers": answer(framed(_OUTPUT, message_field(6, DATA)), [*OK, ("x-cost", "2")]),
}
_ONE = b'[{"name": "O", "datatype": "FP32", "shape": [1], "data": [1.5]}]'
OVER_HTTP = {
    "binary": binary_response(DATA),
    "JSON": http_response(b'{"outputs": %b}' % _ONE),
    "of a large size": binary_response(bytes(4 * 65536)),
    "JSON that gRPC cannot hold": http_response(b'{"parameters": {"p": []}, "outputs": %b}' % _ONE),
    "an error": http_response(b'{"error": "no model"}', status="404 Not Found"),
    "no tensors": http_response(b""),
    "cut short": binary_response(DATA).replace(b'"binary_data_size":12', b'"binary_data_size":16'),
}
TO_GRPC = [
    *((asked, "raw", "triton") for asked in HTTP_CLIENTS.values()),
    *((HTTP_CLIENTS[name], "raw", "torchserve") for name in ("JSON", "binary", "raw binary", "V1")),
    *((HTTP_CLIENTS[name], "raw", "kserve") for name in ("JSON", "a header of Triton")),
    *((HTTP_CLIENTS["JSON"], response, "triton") for response in OVER_GRPC),
    *((PREDICT, response, "triton") for response in ("of a large size", "an error", "no message")),
    *((HTTP_CLIENTS["binary"], response, "triton") for response in ("typed", "no status")),
    # A server of other messages.
    *((GRPC_CLIENTS["raw"], response, "torchserve") for response in OVER_GRPC),
    *((GRPC_CLIENTS["typed"], response, "torchserve") for response in ("raw", "typed")),
]
TO_HTTP = [
    *((asked, "binary", "triton") for asked in GRPC_CLIENTS.values()),
    *((GRPC_CLIENTS["raw"], response, "triton") for response in OVER_HTTP),
    *((GRPC_CLIENTS["typed"], response, "json") for response in OVER_HTTP),
    (GRPC_CLIENTS["raw"], "binary", "json"),
]


@pytest.mark.parametrize(("asked", "response", "dialect"), TO_GRPC)
async def test_call_to_a_server_over_grpc_is_the_same_on_both_paths(
    asked: Asked, response: str, dialect: str, call_records: list[CallRecord]
) -> None:
    async with grpc_server(OVER_GRPC[response]) as server:
        await compare(server, asked, call_records, upstream={"dialect": dialect})


@pytest.mark.parametrize(("asked", "response", "dialect"), TO_HTTP)
async def test_grpc_call_to_a_server_over_http_is_the_same_on_both_paths(
    asked: Asked, response: str, dialect: str, call_records: list[CallRecord]
) -> None:
    async with http_server(OVER_HTTP[response]) as server:
        await compare(server, asked, call_records, upstream={"dialect": dialect})


@pytest.mark.parametrize("size", [1024, 1028])
async def test_cap_of_buffered_responses_over_grpc_is_the_same_on_both_paths(
    size: int, call_records: list[CallRecord]
) -> None:
    shape = message_field(2, b"FP32") + message_field(3, b"\xfa\x01")
    output = message_field(5, message_field(1, b"OUT") + shape) + message_field(6, bytes(1000))
    message = message_field(3, b"i" * (size - len(output) - 2)) + output
    assert len(message) == size
    async with grpc_server(answer(framed(message))) as server:
        for name in ("JSON", "binary", "V1"):
            asked = HTTP_CLIENTS[name]
            seen = await compare(server, asked, call_records, max_buffered_body_bytes=1024)
            assert seen.record["status"] == (200 if size == 1024 else 502)
        # The message becomes larger for this client: the cap is that of both forms.
        await compare(
            server,
            Asked(),
            call_records,
            max_buffered_body_bytes=1024,
            upstream={"dialect": "torchserve"},
        )


@pytest.mark.parametrize(("size", "status"), [(800, 0), (1200, 14)])
async def test_cap_of_buffered_responses_over_http_is_the_same_on_both_paths(
    size: int, status: int, call_records: list[CallRecord]
) -> None:
    async with http_server(binary_response(bytes(size))) as server:
        for name in ("raw", "typed"):
            asked = GRPC_CLIENTS[name]
            seen = await compare(server, asked, call_records, max_buffered_body_bytes=1024)
            assert seen.record["grpc_status"] == status


# ------------------------------------------------------------------------- which calls are compared


@needs_source
@pytest.mark.parametrize(
    "name", ["ok", "late status", "reset", "metadata", "client's deadline", *HTTP_CLIENTS]
)
async def test_usual_calls_to_servers_over_grpc_take_the_fast_path(
    name: str, fast_path_streams: list[str], call_records: list[CallRecord]
) -> None:
    case = CASES[name] if name in CASES else Case(answer(), asked=HTTP_CLIENTS[name])
    for streams in (False, True):
        fast_path_streams.clear()
        async with grpc_server(case.serve) as server:
            await exchange(server, case.asked, call_records, streams=streams)
        assert fast_path_streams == [MODEL_INFER] * (case.asked.is_fast and not streams)


@needs_source
@pytest.mark.parametrize("asked", GRPC_CLIENTS.values(), ids=GRPC_CLIENTS)
async def test_usual_grpc_calls_to_servers_over_http_take_the_fast_path(
    asked: Asked, fast_path_requests: list[str], call_records: list[CallRecord]
) -> None:
    async with http_server(OVER_HTTP["binary"]) as server:
        await exchange(server, asked, call_records, streams=False)
    assert [each for each in fast_path_requests if each == INFER] == [INFER] * asked.is_fast


@needs_source
async def test_body_that_comes_after_its_headers_takes_the_fast_path(
    fast_path_streams: list[str],
) -> None:
    async with grpc_server(answer()) as server, connected(server) as (_, client):
        fast_path_streams.clear()
        stream = client.send_headers("POST", MODEL_INFER, GRPC)
        for data, is_last in ((b"", False), (RAW[:3], False), (RAW[3:], True)):
            await client.until_processed()
            await client.send_data(stream, data, end_stream=is_last)
        assert (await client.response(stream)).body == RAW_OUTPUT
    assert [body for _, body in server.asked] == [RAW]
    assert fast_path_streams == [MODEL_INFER]


@pytest.mark.parametrize("beyond", [0, 1])
async def test_message_is_waited_for_if_it_fits_into_a_window(beyond: int) -> None:
    size = MAX_WINDOW - PREFIX_SIZE + beyond
    head = _MODEL + message_field(7, bytes(size))[: 1 + 3]
    body = framed(head, bytes(size - len(head)))
    async with grpc_server(answer()) as server, connected(server) as (gateway, client):
        deferrals = gateway.gateway.listener.deferrals
        stream = client.send_headers("POST", MODEL_INFER, GRPC)
        await client.send_data(stream, body[:100], end_stream=False)
        await client.until_processed()
        assert deferrals.size == (not beyond)
        await client.send_data(stream, body[100:-1], end_stream=False)
        await client.until_processed()
        assert deferrals.size == (not beyond)
        # More than the message: it is no unary call.
        await client.send_data(stream, body[-1:] + b"more", end_stream=False)
        await client.until_processed()
        assert not deferrals.size
        client.reset_stream(stream)
        await gateway.until_idle()


# ----------------------------------------------------------------------- what is recorded, and keys


async def test_time_for_which_headers_are_held_back_is_not_that_of_the_server(
    call_records: list[CallRecord],
) -> None:
    has_headers = asyncio.Event()

    async def end_late(peer: Http2Peer, stream: ReceivedStream) -> None:
        await peer.respond(stream, RAW_OUTPUT, [TYPE], end=False)
        await has_headers.wait()
        peer.h2.send_headers(stream.id, OK, end_stream=True)
        await peer.flush()

    async with grpc_server(end_late) as server, connected(server) as (gateway, client):
        stream = await client.start("POST", MODEL_INFER, RAW, GRPC)
        await client.until(lambda: client.replies[stream].headers)
        has_headers.set()
        await client.response(stream)
        await gateway.until_idle()
    record = call_records[-1]
    assert 0 < record.first_byte_seconds < record.server_seconds - 0.09


async def test_status_that_a_client_did_not_wait_for_is_not_recorded(
    call_records: list[CallRecord],
) -> None:
    """The rest of a response waits for its client's window."""
    window = len(RAW_OUTPUT) - 1
    async with (
        grpc_server(answer()) as server,
        connected(server, window=window) as (gateway, client),
    ):
        client.reads = False
        for more in ([], LONG):
            stream = await client.start("POST", MODEL_INFER, RAW, [*GRPC, *more])
            reply = client.replies[stream]
            await client.until(lambda reply=reply: len(reply.body) == window)
            client.reset_stream(stream)
            await gateway.until_idle()
            assert call_records[-1].error == "the client reset the stream: CANCEL"
            assert call_records[-1].grpc_status == -1
        stream = await client.start("POST", MODEL_INFER, RAW, GRPC)
        await client.until(lambda: client.replies[stream].body)
        client.open_window(1, stream)
        assert (await client.response(stream)).trailers == OK
        await gateway.until_idle()
        assert call_records[-1].grpc_status == 0


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
@pytest.mark.parametrize("streams", [False, True], ids=["fast path", "streaming path"])
async def test_key_is_asked_for_and_withheld(
    name: str,
    streams: bool,
    call_records: list[CallRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEYS_OF_TEAM", "secret-of-the-team")
    keys = {"environment": "KEYS_OF_TEAM", **({"header": name} if name[0] == "x" else {})}
    routes: list[dict[str, Any]] = [
        {"upstream": "servers", "match": {"headers": {name: "*"}}, "auth": ["team"]},
        {"upstream": "servers"},  # for the call that connects
    ]
    general = {"api_keys": {"team": keys}, "routes": routes}
    scheme = "Bearer " if name == "authorization" else ""
    async with grpc_server(answer()) as server:
        for key, status in (("secret-of-the-team", "0"), ("another", "16")):
            asked = Asked(headers=((name, scheme + key),))
            seen = await exchange(server, asked, call_records, streams=streams, general=general)
            assert seen.status[0] == status
            assert len(seen.sent) == (status == "0")
            assert not [line for headers, _ in seen.sent for line in headers if line[0] == name]
