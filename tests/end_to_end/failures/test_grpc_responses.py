"""A server's gRPC response that is no success, whatever its status: what clients get of it.

A grpc-status that is none becomes UNKNOWN, with what the server has sent. A response of status OK
to a unary call is one message, or the call fails.
"""

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

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
_MESSAGE = field(1, b"m")
_REQUEST = frame(len(_MESSAGE)) + _MESSAGE
_RESPONSE = frame(3) + b"\x0a\x01m"
Fields = list[tuple[str, str]]
OK = [("grpc-status", "0")]

PATHS = {"fast path": (), "streaming path": (("x-long", "l" * 3000),)}
on_both_paths = pytest.mark.parametrize("path", PATHS)

PLACES = ("trailers", "trailers without a message", "trailers only", "later", "head and trailers")


def _server(place: str, status: Fields, body: bytes = _RESPONSE) -> Script:
    """Respond with the status in one of the PLACES; "later" than the gateway waits for it."""
    has_body = place != "trailers only"
    head = [(":status", "200"), ("content-type", "application/grpc"), ("x-own", "1")]
    trailers = [*(OK if place == "head and trailers" else status), ("x-cost", "2")]
    if place in ("trailers only", "head and trailers"):
        head += status

    async def respond(peer: Http2Peer, stream: ReceivedStream) -> None:
        peer.h2.send_headers(stream.id, head, end_stream=not has_body)
        if has_body and place != "trailers without a message":
            peer.h2.send_data(stream.id, body)
        await peer.flush()
        if place == "later":
            await asyncio.sleep(2 * DEFER_TIMEOUT)  # for so long it is waited for
        if has_body:
            peer.h2.send_headers(stream.id, trailers, end_stream=True)
        await peer.flush()

    async def play(peer: Http2Peer) -> None:
        for number in itertools.count():
            await respond(peer, await peer.request(number))

    return http2_script(play)


async def _call(
    script: Script, path: str, rpc: str = "ModelInfer"
) -> tuple[bytes, Fields, Fields, int]:
    """Return the body, headers and trailers of the second call, which needs no connect.

    Also return how many of the calls failed for the endpoint.
    """
    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
        connect_http2(gateway.url) as client,
    ):
        for _ in range(2):
            reply = await client.call("POST", f"/{SERVICE}/{rpc}", _REQUEST, [*GRPC, *PATHS[path]])
        await gateway.until_idle()
        failures = gateway.pool.snapshot()[0].consecutive_failures
    assert reply.reset is None
    return reply.body, reply.headers, reply.trailers, failures


def _of_grpc(fields: Fields) -> Fields:
    return [field for field in fields if field[0] in ("grpc-status", "grpc-message")]


INVALID = {"ok": '"ok"', "0, 13": '"0, 13"', "\xb2": '"\xc2\xb2"', "5" * 5000: f'"{"5" * 59}'}
"""Each with how it is quoted; a long one is shortened."""

INVALID_SOMEWHERE = [
    *(("ok", place, path) for place in PLACES for path in PATHS),
    *((value, "trailers", "fast path") for value in INVALID),
]


@pytest.mark.parametrize(
    ("value", "place", "path"), INVALID_SOMEWHERE, ids=lambda value: value[:20]
)
async def test_invalid_status_becomes_unknown_and_is_quoted(
    value: str, place: str, path: str, call_records: list[CallRecord]
) -> None:
    # Several statuses are none.
    sent = [("grpc-status", each) for each in value.split(", ")]
    sent += [("grpc-message", "no%20luck"), ("x-more", "1")]
    body, headers, trailers, _ = await _call(_server(place, sent), path)
    where = headers if place in ("trailers only", "head and trailers") else trailers
    (_, status), (_, text) = _of_grpc(where)
    assert status == "2"
    text = decode_message(text)
    assert text.startswith(f"{UPSTREAM} sent an invalid grpc-status: {INVALID[value]}")
    assert text.endswith(": no luck")
    assert len(text) < 300
    assert ("x-more", "1") in where
    assert ("x-own", "1") in headers
    if place in ("trailers", "later"):
        assert body == _RESPONSE
        assert ("x-cost", "2") in trailers
    if place != "head and trailers":
        record = call_records[-1]
        assert (record.grpc_status, record.status) == (2, 500)
        assert f"sent an invalid grpc-status: {INVALID[value]}" in record.server_error


@on_both_paths
@pytest.mark.parametrize(
    ("value", "status", "place"),
    [
        *(("007", "7", place) for place in ("trailers", "trailers only")),
        ("77", "77", "trailers"),
        *(("00", "0", place) for place in ("trailers", "later")),  # OK takes a message
    ],
)
async def test_status_is_written_as_all_clients_read_it(
    value: str, status: str, place: str, path: str
) -> None:
    """Clients in Java take a status of three digits for unknown; one of no list passes."""
    script = _server(place, [("grpc-status", value), ("grpc-message", "no%20luck")])
    _, headers, trailers, _ = await _call(script, path)
    (_, got), (_, text) = _of_grpc([*headers, *trailers])
    assert (got, decode_message(text)) == (status, "no luck")


NOT_ONE_MESSAGE = {
    "no data": _server("trailers without a message", OK),
    "status alone": _server("trailers only", OK),
    **{
        f"{what} {place}": _server(place, OK, body)
        for place in ("trailers", "later")
        for what, body in (
            ("empty data", b""),
            ("2 of 9 bytes", frame(9) + b"ab"),
            ("two", frame(0) * 2),
            ("unknown flag", b"\2" + _RESPONSE[1:]),
        )
    },
}


@on_both_paths
@pytest.mark.parametrize("script", NOT_ONE_MESSAGE.values(), ids=NOT_ONE_MESSAGE)
async def test_unary_call_without_one_message_fails(
    script: Script, path: str, call_records: list[CallRecord]
) -> None:
    rpc = "ModelMetadata" if script is NOT_ONE_MESSAGE["two trailers"] else "ModelInfer"
    _, headers, trailers, failures = await _call(script, path, rpc)
    (_, status), (_, text) = _of_grpc([*headers, *trailers])
    assert status == "13"
    assert decode_message(text) == f"{UPSTREAM} did not respond with one gRPC message"
    assert call_records[-1].grpc_status == 13
    assert failures == 2


@on_both_paths
@pytest.mark.parametrize(
    ("place", "body"),
    [("trailers only", b""), ("trailers", frame(9) + b"ab")],
    ids=["head", "part"],
)
async def test_error_of_a_unary_call_needs_no_message(place: str, body: bytes, path: str) -> None:
    script = _server(place, [("grpc-status", "5")], body)
    _, headers, trailers, _ = await _call(script, path)
    assert _of_grpc([*headers, *trailers]) == [("grpc-status", "5")]


@on_both_paths
async def test_stream_without_a_message_is_ok(path: str) -> None:
    script = _server("trailers without a message", OK)
    _, headers, trailers, failures = await _call(script, path, "ModelStreamInfer")
    assert _of_grpc([*headers, *trailers]) == OK
    assert not failures
