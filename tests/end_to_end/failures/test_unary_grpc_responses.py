"""A response of status OK to a unary gRPC call is one message, or the call fails."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gateway.http1.deferrals import DEFER_TIMEOUT
from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.framing import frame
from gateway.protocol.grpc.status import decode_message
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, running_gateway
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import connect_http2
from tests.support.servers.http2_server import Http2Peer, ReceivedStream, http2_script
from tests.support.servers.scripted_server import Script, ScriptedServer

GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
_MESSAGE = field(1, b"m")
Fields = list[tuple[str, str]]
_BODY = frame(len(_MESSAGE)) + _MESSAGE
_WHOLE = frame(3) + b"\x0a\x01m"

NOT_ONE_MESSAGE = {
    "none": b"",
    "part of the prefix": b"\0\0\0",
    "2 of 9 bytes": frame(9) + b"ab",
    "two": frame(0) * 2,
    "more": _WHOLE + b"\0",
    "unknown flag": b"\2" + _WHOLE[1:],
}
PATHS = {"fast path": (), "streaming path": (("x-long", "l" * 3000),)}


def _server(body: bytes | None, is_late: bool = False, status: str = "0") -> Script:
    """Respond with a body and the status in trailers, or with the head alone for None."""

    async def respond(peer: Http2Peer, stream: ReceivedStream) -> None:
        head = [(":status", "200"), ("content-type", "application/grpc")]
        if body is None:
            peer.h2.send_headers(stream.id, [*head, ("grpc-status", status)], end_stream=True)
        else:
            peer.h2.send_headers(stream.id, head)
            peer.h2.send_data(stream.id, body)
            if is_late:
                await peer.flush()
                await asyncio.sleep(2 * DEFER_TIMEOUT)  # for so long it is waited for
            peer.h2.send_headers(stream.id, [("grpc-status", status)], end_stream=True)
        await peer.flush()

    async def play(peer: Http2Peer) -> None:
        for number in itertools.count():
            await respond(peer, await peer.request(number))

    return http2_script(play)


async def _call(script: Script, rpc: str, path: str) -> tuple[Fields, int]:
    """Return the headers and trailers of the second call, which needs no connect.

    Also return how many of the calls failed for the endpoint.
    """
    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
        connect_http2(gateway.url) as client,
    ):
        for _ in range(2):
            reply = await client.call("POST", f"/{SERVICE}/{rpc}", _BODY, [*GRPC, *PATHS[path]])
        await gateway.until_idle()
        failures = gateway.pool.snapshot()[0].consecutive_failures
    assert reply.reset is None
    return [*reply.headers, *reply.trailers], failures


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelMetadata"])
@pytest.mark.parametrize("is_late", [False, True], ids=["complete", "in parts"])
@pytest.mark.parametrize("body", NOT_ONE_MESSAGE.values(), ids=NOT_ONE_MESSAGE)
async def test_unary_call_without_one_message_fails(
    body: bytes, is_late: bool, rpc: str, path: str, call_records: list[CallRecord]
) -> None:
    _check_internal(*await _call(_server(body, is_late), rpc, path), call_records[-1])


@pytest.mark.parametrize("path", PATHS)
async def test_unary_call_with_status_ok_alone_fails(
    path: str, call_records: list[CallRecord]
) -> None:
    _check_internal(*await _call(_server(None), "ModelInfer", path), call_records[-1])


def _check_internal(fields: Fields, failures: int, record: CallRecord) -> None:
    (_, status), (_, text) = [each for each in fields if each[0].startswith("grpc-")]
    assert status == "13"
    assert decode_message(text) == f"{UPSTREAM} did not respond with one gRPC message"
    assert record.grpc_status == 13
    assert failures == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [None, b"", frame(9) + b"ab"], ids=["head", "none", "part"])
async def test_error_of_a_unary_call_needs_no_message(body: bytes | None, path: str) -> None:
    fields, _ = await _call(_server(body, status="5"), "ModelInfer", path)
    assert [each for each in fields if each[0].startswith("grpc-")] == [("grpc-status", "5")]


@pytest.mark.parametrize("path", PATHS)
async def test_stream_without_a_message_is_ok(path: str) -> None:
    fields, failures = await _call(_server(b""), "ModelStreamInfer", path)
    assert ("grpc-status", "0") in fields
    assert not failures
