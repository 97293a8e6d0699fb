"""Client and server cannot tell whether a gRPC call takes the fast path or the streaming path.

A small infer call takes the fast path if a connection to its server has a stream free. One with a
long header takes the streaming path.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from h2.errors import ErrorCodes

from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.framing import frame
from tests.support.checks.call_records import call_records as call_records
from tests.support.checks.fast_path import fast_path_streams as fast_path_streams
from tests.support.compiled import needs_source
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import Http2Client, Http2Reply, connect_http2
from tests.support.servers.http2_server import Http2Peer, ReceivedStream, http2_script
from tests.support.servers.scripted_server import ScriptedServer

INFER = f"/{SERVICE}/ModelInfer"
CONFIG = f"/{SERVICE}/ModelConfig"
GRPC = [("content-type", "application/grpc+proto"), ("te", "trailers"), ("user-agent", "test")]
OK = [("grpc-status", "0"), ("grpc-message", "")]
OUTPUT = frame(20) + b"r" * 20
_LONG = [("x-long", "l" * 3000)]
_FAST, _STREAMING = "fast path", "streaming path"
_LABELS = ("route", "operation", "model", "version", "client_form")

Serve = Callable[[Http2Peer, ReceivedStream], Awaitable[None]]


def message(model: bytes = b"m", size: int = 16) -> bytes:
    """Return an infer request with its frame."""
    data = field(1, model) + field(3, b"id") + field(7, b"r" * size)
    return frame(len(data)) + data


def respond(
    body: bytes = OUTPUT,
    trailers: list[tuple[str, str]] | None = None,
    headers: list[tuple[str, str]] | None = None,
) -> Serve:
    """Answer at once."""

    async def serve(peer: Http2Peer, stream: ReceivedStream) -> None:
        head = [("content-type", "application/grpc"), ("x-own", "1"), *(headers or [])]
        await peer.respond(stream, body, head, trailers)

    return serve


async def in_parts(peer: Http2Peer, stream: ReceivedStream) -> None:
    """Send the trailers later than the gateway waits for them."""
    await peer.respond(stream, OUTPUT[:7], [("content-type", "application/grpc")], end=False)
    await asyncio.sleep(0.15)
    await peer.send(stream, OUTPUT[7:])
    peer.h2.send_headers(stream.id, [("grpc-status", "9"), ("grpc-message", "late")], True)
    await peer.flush()


async def spaces_in_trailers(peer: Http2Peer, stream: ReceivedStream) -> None:
    """End a text with a space, as Triton may."""
    await peer.respond(stream, OUTPUT, [("content-type", "application/grpc")], end=False)
    peer.h2.send_headers(stream.id, [("grpc-status", "3"), ("grpc-message", " a b ")], True)
    await peer.flush()


async def http_error(peer: Http2Peer, stream: ReceivedStream) -> None:
    """Answer as a proxy that does not speak gRPC."""
    head = [(":status", "503"), ("content-type", "text/html"), ("content-length", "4")]
    peer.h2.send_headers(stream.id, head)
    peer.h2.send_data(stream.id, b"busy", end_stream=True)
    await peer.flush()


def reset(code: int, after: bytes | None = None) -> Serve:
    """Break off, after a part of a body if there is one."""

    async def serve(peer: Http2Peer, stream: ReceivedStream) -> None:
        if after is not None:
            await peer.respond(stream, after, [("content-type", "application/grpc")], end=False)
        await peer.reset(stream, code)

    return serve


async def close(peer: Http2Peer, stream: ReceivedStream) -> None:
    """Close the connection without a response."""
    await peer.connection.close()


async def hang(peer: Http2Peer, stream: ReceivedStream) -> None:
    """Never respond."""


@dataclass(frozen=True)
class Case:
    """What the server does, and what the client sends beside the usual."""

    serve: Serve
    headers: tuple[tuple[str, str], ...] = ()
    limits: tuple[tuple[str, Any], ...] = ()
    body: bytes = message()


CASES = {
    "ok": Case(respond(trailers=OK)),
    "further trailers": Case(respond(trailers=[*OK, ("x-cost-bin", "AAE"), ("x-cost", "2")])),
    "empty message": Case(respond(frame(0), trailers=OK)),
    "large message": Case(respond(frame(300_000) + bytes(300_000), trailers=OK)),
    "in parts": Case(in_parts),
    "error": Case(respond(b"", [("grpc-status", "5"), ("grpc-message", "no %C3%A9 %% m")])),
    "error after a message": Case(respond(trailers=[("grpc-status", "8")])),
    "unknown status": Case(respond(trailers=[("grpc-status", "77")])),
    "status that is no number": Case(respond(trailers=[("grpc-status", "x")])),
    "length of the body": Case(
        respond(headers=[("content-length", str(len(OUTPUT)))], trailers=OK)
    ),
    "trailers only": Case(respond(b"", headers=[("grpc-status", "3"), ("grpc-message", "bad")])),
    "spaces around the text": Case(spaces_in_trailers),
    "spaces around the text, trailers only": Case(
        respond(b"", headers=[("grpc-status", "3"), ("grpc-message", " a b ")])
    ),
    "no status": Case(respond()),
    "trailers without a status": Case(respond(trailers=[("x-a", "b")])),
    "HTTP error": Case(http_error),
    "reset": Case(reset(ErrorCodes.INTERNAL_ERROR)),
    "closed": Case(close),
    "hangs": Case(hang, limits=(("request_timeout", "200ms"),)),
    "hangs, idle timeout": Case(hang, limits=(("idle_timeout", "200ms"),)),
    "client's deadline": Case(hang, headers=(("grpc-timeout", "150m"),)),
    "deadline is not valid": Case(hang, headers=(("grpc-timeout", "soon"),)),
    "deadline has passed": Case(hang, headers=(("grpc-timeout", "0m"),)),
    "deadline of a server": Case(
        respond(b"", [("grpc-status", "4")]), headers=(("grpc-timeout", "5S"),)
    ),
    "metadata": Case(
        respond(trailers=OK),
        headers=(
            ("x-a", "1"),
            ("x-a", "2"),
            ("x-bin", "AAEC"),
            ("grpc-accept-encoding", "identity, gzip"),
            ("forwarded", "for=1.2.3.4"),
            ("x-request-id", "mine"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ),
    ),
    "no message": Case(respond(trailers=OK), body=b""),
    "cut short": Case(respond(trailers=OK), body=message()[:-1]),
    "two messages": Case(respond(trailers=OK), body=message() * 2),
    "invalid message": Case(respond(trailers=OK), body=frame(3) + b"\xff\xff\xff"),
    "other flag": Case(respond(trailers=OK), body=b"\x07" + message()[1:]),
    "too large": Case(
        respond(trailers=OK), limits=(("max_request_bytes", "1KiB"),), body=message(size=2000)
    ),
}


class _Server:
    """Answers warm-ups, and serves the other calls as a test says; records these."""

    def __init__(self, serve: Serve) -> None:
        self.calls: list[ReceivedStream] = []
        self._serve = serve

    async def __call__(self, peer: Http2Peer) -> None:
        for number in itertools.count():
            stream = await peer.request(number)
            if stream.path == CONFIG:
                await peer.respond(stream, frame(0), [("content-type", "application/grpc")], OK)
            else:
                self.calls.append(stream)
                await self._serve(peer, stream)


def _shown(reply: Http2Reply) -> dict[str, Any]:
    headers = sorted(line for line in reply.headers if line[0] not in ("date", "x-request-id"))
    return {
        "headers": headers,
        "has id": [name for name, _ in reply.headers].count("x-request-id"),
        "body": reply.body,
        "trailers": reply.trailers,
        "reset": reply.reset,
    }


def _sent(stream: ReceivedStream) -> dict[str, Any]:
    varying = ("x-long", "x-request-id", "grpc-timeout", "via", "x-forwarded-host", ":authority")
    headers = sorted(line for line in stream.headers if line[0] not in varying)
    names = {name for name, _ in stream.headers} - {"x-long"}
    return {"headers": headers, "names": names, "body": bytes(stream.body)}


def _recorded(record: CallRecord) -> dict[str, Any]:
    names = (
        "method target status grpc_status error_kind upstream attempts retries"
        " request_bytes response_bytes sent_bytes received_bytes server_form"
    )
    shown = {name: getattr(record, name) for name in names.split()}
    shown["labels"] = [getattr(record.labels, name) for name in _LABELS]
    shown["error"] = record.error.replace(record.endpoint or "-", "URL")
    shown["server_error"] = record.server_error.replace(record.endpoint or "-", "URL")
    return shown


@asynccontextmanager
async def _running(
    serve: Serve, window: int = 65_535, **settings: Any
) -> AsyncIterator[tuple[_Server, RunningGateway, Http2Client]]:
    """Run a gateway in front of a server, to which it has connected, and connect to it."""
    served = _Server(serve)
    async with (
        ScriptedServer(http2_script(served)) as server,
        running_gateway(server.url.replace("http://", "grpc://"), **settings) as gateway,
        connect_http2(gateway.url, initial_window_size=window) as client,
    ):
        assert (await client.call("POST", CONFIG, frame(3) + b"\x0a\x01m", GRPC)).status == 200
        yield served, gateway, client


async def _exchange(
    case: Case, path: str, records: list[CallRecord]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    records.clear()
    async with _running(case.serve, **dict(case.limits)) as (served, gateway, client):
        more = _LONG if path == _STREAMING else []
        start = client.send_headers("POST", INFER, [*GRPC, *case.headers, *more], flush=False)
        await client.send_data(start, case.body)
        reply = await client.response(start)
        await gateway.until_idle()
    return _shown(reply), [_sent(each) for each in served.calls], _recorded(records[-1])


@pytest.mark.parametrize("name", CASES)
async def test_both_paths_give_the_same(name: str, call_records: list[CallRecord]) -> None:
    fast, streamed = [
        await _exchange(CASES[name], path, call_records) for path in (_FAST, _STREAMING)
    ]
    assert fast == streamed
    if name in ("ok", "length of the body"):
        assert (fast[0]["body"], fast[0]["trailers"]) == (OUTPUT, OK)


async def test_response_that_breaks_off_is_an_error_on_both_paths(
    call_records: list[CallRecord],
) -> None:
    """On the fast path the client gets no part of it."""
    case = Case(reset(ErrorCodes.CANCEL, OUTPUT[:9]))
    for path, body in ((_FAST, b""), (_STREAMING, OUTPUT[:9])):
        shown, _, record = await _exchange(case, path, call_records)
        assert shown["body"] == body
        assert ("grpc-status", "14") in [*shown["headers"], *shown["trailers"]]
        assert (record["grpc_status"], record["error_kind"].name) == (14, "BAD_RESPONSE")


@needs_source
@pytest.mark.parametrize("name", ["ok", "in parts", "reset", "metadata", "client's deadline"])
async def test_usual_calls_take_the_fast_path(
    name: str, fast_path_streams: list[str], call_records: list[CallRecord]
) -> None:
    for path, count in ((_FAST, 1), (_STREAMING, 1)):
        await _exchange(CASES[name], path, call_records)
        assert fast_path_streams == [INFER] * count


@needs_source
@pytest.mark.parametrize("first", [0, 3, 40])
async def test_body_that_comes_after_its_headers_takes_the_fast_path(
    first: int, fast_path_streams: list[str]
) -> None:
    body = message()
    async with _running(respond(trailers=OK)) as (served, _, client):
        stream = client.send_headers("POST", INFER, GRPC)
        await client.until_processed()
        await client.send_data(stream, body[:first], end_stream=False)
        await client.until_processed()
        await client.send_data(stream, body[first:])
        assert (await client.response(stream)).body == OUTPUT
    assert [bytes(each.body) for each in served.calls] == [body]
    assert fast_path_streams == [INFER]


async def test_refused_call_is_sent_again(call_records: list[CallRecord]) -> None:
    """RFC 9113, section 8.7: the server has not processed it."""
    seen = 0

    async def refuse_twice(peer: Http2Peer, stream: ReceivedStream) -> None:
        nonlocal seen
        seen += 1
        if seen <= 2:
            await peer.reset(stream, ErrorCodes.REFUSED_STREAM)
        else:
            await respond(trailers=OK)(peer, stream)

    shown, sent, _ = await _exchange(Case(refuse_twice), _FAST, call_records)
    assert shown["trailers"] == OK
    assert [each["body"] for each in sent] == [message()] * 3


async def test_client_that_cancels_ends_the_call_of_the_server() -> None:
    async with _running(hang) as (served, gateway, client):
        stream = await client.start("POST", INFER, message(), GRPC)
        await until(lambda: bool(served.calls))
        client.reset_stream(stream)
        await gateway.until_idle()
        await until(lambda: served.calls[0].reset is not None)
    assert served.calls[0].reset == ErrorCodes.CANCEL


@pytest.mark.parametrize("delay", [0, 0.2])
@pytest.mark.parametrize("path", [_FAST, _STREAMING])
async def test_call_is_not_sent_again_once_its_response_has_begun(
    path: str, delay: float, call_records: list[CallRecord]
) -> None:
    """The client would get parts of two responses."""

    async def respond_and_refuse(peer: Http2Peer, stream: ReceivedStream) -> None:
        await peer.respond(stream, OUTPUT[:7], [("content-type", "application/grpc")], end=False)
        await asyncio.sleep(delay)
        await peer.reset(stream, ErrorCodes.REFUSED_STREAM)

    shown, sent, record = await _exchange(Case(respond_and_refuse), path, call_records)
    assert len(sent) == 1
    assert ("grpc-status", "14") in [*shown["headers"], *shown["trailers"]]
    assert record["error_kind"].name == "BAD_RESPONSE"


async def test_time_for_which_headers_are_held_back_is_not_that_of_the_server(
    call_records: list[CallRecord],
) -> None:
    has_headers = asyncio.Event()

    async def end_late(peer: Http2Peer, stream: ReceivedStream) -> None:
        await peer.respond(stream, OUTPUT, [("content-type", "application/grpc")], end=False)
        await has_headers.wait()
        peer.h2.send_headers(stream.id, OK, end_stream=True)
        await peer.flush()

    async with _running(end_late) as (_, gateway, client):
        stream = await client.start("POST", INFER, message(), GRPC)
        await client.until(lambda: client.replies[stream].headers)
        has_headers.set()
        await client.response(stream)
        await gateway.until_idle()
    record = call_records[-1]
    assert 0 < record.first_byte_seconds < record.server_seconds - 0.09


async def test_late_server_with_two_addresses_is_named_by_that_of_grpc(
    call_records: list[CallRecord],
) -> None:
    served = _Server(hang)
    async with (
        ScriptedServer(http2_script(served)) as http,
        ScriptedServer(http2_script(served)) as server,
        running_gateway(
            upstream={
                "endpoints": [{"http": http.url, "grpc": server.url.replace("http://", "grpc://")}],
            },
            request_timeout="200ms",
        ) as gateway,
        connect_http2(gateway.url) as client,
    ):
        await client.call("POST", INFER, message(), GRPC)  # connects
        for deadline in ([], [("grpc-timeout", "50m")]):
            for more in ([], _LONG):
                await client.call("POST", INFER, message(), [*GRPC, *deadline, *more])
        await gateway.until_idle()
    address = server.url.replace("http://", "grpc://")
    assert len(call_records) == 5
    assert all(record.error.startswith(f"waiting for {address}: ") for record in call_records)


async def test_status_that_a_client_did_not_wait_for_is_not_recorded(
    call_records: list[CallRecord],
) -> None:
    """The rest of a response waits for its client's window."""
    async with _running(respond(trailers=OK), len(OUTPUT) - 1) as (_, gateway, client):
        client.reads = False
        for more in ([], _LONG):
            stream = await client.start("POST", INFER, message(), [*GRPC, *more])
            reply = client.replies[stream]
            await client.until(lambda reply=reply: len(reply.body) == len(OUTPUT) - 1)
            client.reset_stream(stream)
            await gateway.until_idle()
            assert call_records[-1].error == "the client reset the stream: CANCEL"
            assert call_records[-1].grpc_status == -1
        stream = await client.start("POST", INFER, message(), GRPC)
        await client.until(lambda: client.replies[stream].body)
        client.open_window(1, stream)
        assert (await client.response(stream)).trailers == OK
        await gateway.until_idle()
        assert call_records[-1].grpc_status == 0


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
@pytest.mark.parametrize("more", [[], _LONG], ids=[_FAST, _STREAMING])
async def test_key_is_asked_for_and_withheld(
    name: str, more: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret-of-the-team\n")
    served = _Server(respond(trailers=OK))
    shown = {} if name == "authorization" else {"header": name}
    keys = {"team": {"file": str(tmp_path / "keys"), **shown}}
    async with (
        ScriptedServer(http2_script(served)) as server,
        running_gateway(
            server.url.replace("http://", "grpc://"),
            route={"auth": ["team"]},
            general={"api_keys": keys},
        ) as gateway,
        connect_http2(gateway.url) as client,
    ):
        codes = []
        scheme = "Bearer " if name == "authorization" else ""
        for key in ("secret-of-the-team", "another", "secret-of-the-team"):
            headers = [*GRPC, *more, (name, scheme + key)]
            reply = await client.call("POST", INFER, message(), headers)
            codes.append(dict([*reply.headers, *reply.trailers])["grpc-status"])
    assert codes == ["0", "16", "0"]
    assert len(served.calls) == 2
    assert not [line for each in served.calls for line in each.headers if line[0] == name]
