"""A grpc-status that is none becomes UNKNOWN for clients, with what the server has sent."""

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
from tests.support.inference_messages import infer_json
from tests.support.servers.http2_server import Http2Peer, ReceivedStream, http2_script
from tests.support.servers.scripted_server import Script, ScriptedServer

INFER = f"/{SERVICE}/ModelInfer"
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
_MESSAGE = field(1, b"m")
_BODY = frame(len(_MESSAGE)) + _MESSAGE
_RESPONSE = frame(3) + b"\x0a\x01m"
Fields = list[tuple[str, str]]

INVALID = {
    "ok": '"ok"',
    "": '""',
    "-1": '"-1"',
    "+5": '"+5"',
    "1.0": '"1.0"',
    "0x5": '"0x5"',
    "0, 13": '"0, 13"',
    "\xb2": '"\xc2\xb2"',
    "5" * 5000: f'"{"5" * 5000}"',
}
"""Each with how it is quoted, before that is shortened."""

PLACES = ("trailers", "trailers without a message", "trailers only", "later", "head and trailers")


def _server(place: str, status: Fields) -> Script:
    async def respond(peer: Http2Peer, stream: ReceivedStream) -> None:
        head = [(":status", "200"), ("content-type", "application/grpc"), ("x-own", "1")]
        has_body = place != "trailers only"
        if place in ("trailers only", "head and trailers"):
            head += status
        peer.h2.send_headers(stream.id, head, end_stream=not has_body)
        if place in ("trailers", "later", "head and trailers"):
            peer.h2.send_data(stream.id, _RESPONSE)
        await peer.flush()
        if place == "later":
            await asyncio.sleep(2 * DEFER_TIMEOUT)  # for so long it is waited for
        if has_body:
            trailers = [("grpc-status", "0")] if place == "head and trailers" else status
            peer.h2.send_headers(stream.id, [*trailers, ("x-cost", "2")], end_stream=True)
        await peer.flush()

    async def play(peer: Http2Peer) -> None:
        for number in itertools.count():
            await respond(peer, await peer.request(number))

    return http2_script(play)


async def _ask(place: str, status: Fields, *more: tuple[str, str]) -> tuple[bytes, Fields, Fields]:
    """Return the body, the headers and the trailers of the second call, which needs no connect."""
    async with (
        ScriptedServer(_server(place, status)) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
        connect_http2(gateway.url) as client,
    ):
        for _ in range(2):
            reply = await client.call("POST", INFER, _BODY, [*GRPC, *more])
        await gateway.until_idle()
    assert reply.reset is None
    return reply.body, reply.headers, reply.trailers


def _of_grpc(fields: Fields) -> Fields:
    return [field for field in fields if field[0] in ("grpc-status", "grpc-message")]


@pytest.mark.parametrize("more", [(), (("x-long", "l" * 3000),)], ids=["fast path", "streaming"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", INVALID, ids=[value[:5] for value in INVALID])
async def test_invalid_status_becomes_unknown_and_is_quoted(
    value: str, place: str, more: tuple[tuple[str, str], ...], call_records: list[CallRecord]
) -> None:
    sent = [("grpc-status", value), ("grpc-message", "no%20luck"), ("x-more", "1")]
    body, headers, trailers = await _ask(place, sent, *more)
    where = trailers if place in ("trailers", "trailers without a message", "later") else headers
    (_, status), (_, text) = _of_grpc(where)
    assert status == "2"
    quoted = INVALID[value]
    quoted = quoted if len(quoted) < 60 else f"{quoted[:60]}"
    text = decode_message(text)
    assert text.startswith(f"{UPSTREAM} sent an invalid grpc-status: {quoted}")
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
        assert f"sent an invalid grpc-status: {quoted}" in record.server_error


@pytest.mark.parametrize("more", [(), (("x-long", "l" * 3000),)], ids=["fast path", "streaming"])
@pytest.mark.parametrize("place", PLACES[:4])
async def test_several_statuses_are_none(place: str, more: tuple[tuple[str, str], ...]) -> None:
    _, headers, trailers = await _ask(place, [("grpc-status", "0"), ("grpc-status", "13")], *more)
    (_, status), (_, text) = _of_grpc([*headers, *trailers])
    assert (status, decode_message(text).partition(": ")[2]) == ("2", '"0, 13"')


@pytest.mark.parametrize("more", [(), (("x-long", "l" * 3000),)], ids=["fast path", "streaming"])
@pytest.mark.parametrize(
    ("value", "status", "place"),
    [
        *((value, value.lstrip("0"), place) for value in ("007", "77") for place in PLACES[:4]),
        *(("00", "0", place) for place in ("trailers", "later")),  # OK takes a message
    ],
)
async def test_status_is_written_as_all_clients_read_it(
    value: str, status: str, place: str, more: tuple[tuple[str, str], ...]
) -> None:
    """Clients in Java take a status of three digits for unknown; one of no list passes."""
    sent = [("grpc-status", value), ("grpc-message", "no%20luck")]
    _, headers, trailers = await _ask(place, sent, *more)
    (_, got), (_, text) = _of_grpc([*headers, *trailers])
    assert (got, decode_message(text)) == (status, "no luck")


@pytest.mark.parametrize("place", PLACES[:4])
@pytest.mark.parametrize("value", ["ok", "-1", ""])
async def test_http_client_learns_of_an_invalid_status(value: str, place: str) -> None:
    async with (
        ScriptedServer(_server(place, [("grpc-status", value)])) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
        gateway.client() as client,
    ):
        reply = await client.ask(infer_json())
    assert reply.status == 500
    assert reply.error == f'{UPSTREAM} sent an invalid grpc-status: "{value}"'
