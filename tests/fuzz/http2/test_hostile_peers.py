"""Whatever HTTP/2 peers send, nothing is left of them in the gateway, and others are served."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest
from h2.exceptions import ProtocolError

from gateway.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    encode_goaway,
    encode_ping,
    encode_settings,
)
from gateway.protocol.grpc.framing import frame as grpc_frame
from tests.fuzz.broken_bytes import pieces, rounds
from tests.fuzz.http2.hostile_clients import (
    NEWEST,
    ODD_NAMES,
    HostileClient,
    hostile_client,
    literal,
)
from tests.fuzz.http2.streams import any_broken, frames_of, server_bytes
from tests.http2.frame_bytes import frame
from tests.support.certificates import certificate_files, client_context, server_certificate
from tests.support.gateway import RunningGateway, gateway_before, running_gateway
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response
from tests.support.inference_messages import infer_json
from tests.support.raw_client import connect
from tests.support.servers.http2_server import answering
from tests.support.servers.scripted_server import Connection, ScriptedServer

pytestmark = pytest.mark.usefixtures("clean")

_CLIENTS = 8
"""Clients at a time."""

# ------------------------------------------------------------------------------- clients

_READING = 0.02
"""Seconds for which a client reads what comes."""
_INNOCENT = "/v2/innocent"
_NO_RESPONSE, _LARGE_RESPONSE = "/v2/models/m/infer", "/v2/x"


async def _serve(connection: Connection) -> None:
    """Respond to the innocent; let others wait, or give them more than they may read."""
    while True:
        target = (await connection.request()).head.target
        connection.requests.clear()
        if target == _NO_RESPONSE:
            await connection.wait_for_close()
            return
        await connection.send(http_response(b"x" * (300_000 if target == _LARGE_RESPONSE else 10)))


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_nothing_is_left_of_hostile_clients(scheme: str, tmp_path: Path) -> None:
    tls = None
    if scheme == "https":
        certificate, key = certificate_files(tmp_path, server_certificate())
        tls = {"certificate": certificate, "key": key}
    async with gateway_before(_serve, tls=tls, max_buffered_bytes="2MiB") as (_, gateway):
        for chance in rounds(6):
            clients = [hostile_client(chance) for _ in range(_CLIENTS)]
            await asyncio.gather(*(_run(gateway, each) for each in clients))
            await gateway.remains.until_nothing()
            if not chance.randrange(8):
                await _call_as_innocent(gateway)
        await _call_as_innocent(gateway)


async def _run(gateway: RunningGateway, hostile: HostileClient) -> None:
    """Connect, send all, perhaps read, and leave."""
    tls = client_context()
    tls.set_alpn_protocols(["h2"])
    async with connect(gateway.url, tls) as client:
        with suppress(ConnectionError):  # the gateway may have had enough
            for piece in hostile.pieces:
                await client.send(piece)
            if hostile.reads:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_READING):
                        while await client.reader.read(2**16):
                            pass
        if hostile.resets:
            client.reset()


async def _call_as_innocent(gateway: RunningGateway) -> None:
    async with connect(gateway.url) as client:
        assert (await client.call("GET", _INNOCENT)).status == 200
    async with connect_http2(gateway.url) as http2_client:
        assert (await http2_client.call("GET", _INNOCENT)).status == 200


# ------------------------------------------------------------------------------- servers

_WAITING = 0.05
"""Seconds for which a client waits for its response before it leaves."""
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
_MESSAGE = grpc_frame(3) + field(1, b"m")
_OK = [("grpc-status", "0")]


class _Server:
    """Sends anything in response to requests, until it is to be a good server."""

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.is_good = False
        self.connections: set[Connection] = set()

    async def script(self, connection: Connection) -> None:
        """Serve a connection."""
        if self.is_good:
            await answering(_MESSAGE, _OK)(connection)
            return
        self.connections.add(connection)
        try:
            await self._serve(connection)
        finally:
            self.connections.discard(connection)

    def reset_connections(self) -> None:
        """Drop what is left open, which the gateway would use for the next calls."""
        for connection in tuple(self.connections):
            connection.reset()

    async def _serve(self, connection: Connection) -> None:
        chance = self.chance
        await connection.send(encode_settings([]))  # before which no request comes
        received = b""
        while not (stream_ids := _requests(received)):
            piece = await connection.reader.read(2**16)
            if not piece:
                return
            received += piece
        data = _response(chance, received, stream_ids)
        for piece in pieces(chance, data) if chance.randrange(2) else [data]:
            await connection.send(piece)
        ending = chance.randrange(4)
        if ending == 0:
            connection.reset()
        elif ending == 1:
            await connection.wait_for_close()


def _response(chance: random.Random, received: bytes, stream_ids: list[int]) -> bytes:
    """Return what a server sends: with broken frames, or valid ones that cost."""
    if chance.randrange(3):
        try:
            data = server_bytes(chance, received, stream_ids, is_odd=True)
        except ProtocolError:
            return b""  # the gateway has cancelled a request already
        return any_broken(chance, data) if chance.randrange(5) else data
    large = literal(chance.choice(ODD_NAMES), b"v" * 3900, indexed=True)
    block = literal(b":status", b"200") + large + bytes([NEWEST]) * chance.choice([0, 17, 500])
    flags = chance.choice([0, END_HEADERS, END_HEADERS | END_STREAM])
    out = [frame(HEADERS, flags, stream_id, block) for stream_id in stream_ids]
    if chance.randrange(2):
        out += [encode_goaway(chance.choice([0, 1]), 0), encode_ping(bytes(8))]
    return b"".join(out)


def _requests(received: bytes) -> list[int]:
    """Return the streams whose headers have come."""
    if len(received) < len(PREFACE):
        return []
    frames = frames_of(received[len(PREFACE) :])
    return [int.from_bytes(each[5:9], "big") for each in frames if each[3:4] == bytes([HEADERS])]


async def test_nothing_is_left_of_hostile_servers() -> None:
    server = _Server()
    async with (
        ScriptedServer(server.script) as running,
        running_gateway(
            running.url.replace("http:", "grpc:"), max_buffered_bytes="2MiB"
        ) as gateway,
    ):
        for chance in rounds(6):
            server.chance = chance
            await asyncio.gather(*(_call(gateway, chance.random()) for _ in range(_CLIENTS)))
            server.reset_connections()  # one may hold a frame that has not come completely
            await gateway.remains.until_nothing()
        server.is_good = True
        async with connect_http2(gateway.url) as innocent:
            reply = await innocent.call("POST", _INFER, _MESSAGE, _GRPC)
            assert (reply.body, reply.trailers) == (_MESSAGE, _OK)


async def _call(gateway: RunningGateway, chance: float) -> None:
    """Make a call, and leave if it takes long."""
    with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        if chance < 0.6:
            async with asyncio.timeout(_WAITING), connect_http2(gateway.url) as http2_client:
                reply = await http2_client.call("POST", _INFER, _MESSAGE, _GRPC)
            fields = [*reply.headers, *reply.trailers]
            statuses = [value for name, value in fields if name == "grpc-status"]
            # All clients read them alike.
            assert all(str(int(status)) == status for status in statuses), reply
        else:
            async with asyncio.timeout(_WAITING), gateway.client() as client:
                await client.ask(infer_json())
