"""Calls that end in every way, at servers that do anything: nothing may be left of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from gateway.errors import ErrorKind, GatewayError
from gateway.system.buffers import BufferAccount
from gateway.upstream.http2.endpoint import Http2Endpoint
from tests.support.gateway import until
from tests.support.scale import scaled
from tests.support.servers.http2_server import Http2Peer, Play, ReceivedStream, http2_script
from tests.upstream.calls import make_request
from tests.upstream.http2.conftest import Http2EndpointAt, connected

BODY = bytes(range(256)) * 400


class _LeftError(Exception):
    """A client that left while it sent its body."""


async def _answer(peer: Http2Peer, stream: ReceivedStream, dice: random.Random) -> bool:
    """Do something with a stream; return whether the connection goes on."""
    match dice.randrange(8):
        case 0:
            await peer.reset(stream, dice.choice([ErrorCodes.REFUSED_STREAM, ErrorCodes.CANCEL]))
        case 1:
            await peer.respond(stream, b"part", end=False)
            await peer.reset(stream, ErrorCodes.INTERNAL_ERROR)
        case 2:
            await peer.go_away(max(0, stream.id - dice.choice([0, 2, 4])))
            await peer.respond(stream, BODY)
        case 3 if dice.random() < 0.3:
            return False
        case _:
            await peer.respond(stream, BODY, trailers=[("grpc-status", "0")])
    return True


async def _end_of(peer: Http2Peer, stream: ReceivedStream) -> None:
    await peer.until(lambda: stream.ended or stream.reset is not None)


def _server(dice: random.Random) -> Play:
    async def play(peer: Http2Peer) -> None:
        number = 0
        try:
            while True:
                stream = await peer.stream(number)
                if dice.random() < 0.7:
                    await _end_of(peer, stream)
                number += 1
                if stream.reset is None and not await _answer(peer, stream, dice):
                    return
        except ProtocolError:
            pass  # the client has reset the stream meanwhile

    return play


async def _call(endpoint: Http2Endpoint, dice: random.Random) -> str:
    """Make a call, and end it in one of many ways."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(dice.randrange(4)):
            yield bytes(dice.choice([1, 1000, 100_000]))
            await asyncio.sleep(0)
        if dice.random() < 0.1:
            raise _LeftError

    body = dice.choice([None, [b"x"], [bytes(300_000)], pieces()])
    try:
        async with asyncio.timeout(dice.choice([0.001, 0.01, 2, 2, 2, 2])):
            response = await endpoint.send(make_request(body))
            try:
                while await response.read():
                    if dice.random() < 0.02:
                        return "left"
            finally:
                response.close()
            return "complete"
    except TimeoutError:
        return "cancelled"
    except _LeftError:
        return "client left"
    except GatewayError as error:
        return error.kind.name if endpoint.url in error.message else error.message


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_left_of_calls_that_end_anyhow(
    http2_at: Http2EndpointAt, seed: int
) -> None:
    dice = random.Random(seed)
    buffers = BufferAccount()
    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 5, SettingCodes.INITIAL_WINDOW_SIZE: 20_000}
    async with connected(
        http2_at, http2_script(_server(dice), settings), buffers=buffers, max_connections=4
    ) as (_, endpoint):
        ends = Counter[str]()

        async def load() -> None:
            for _ in range(max(6, scaled(25))):
                ends[await _call(endpoint, dice)] += 1

        async with asyncio.timeout(60):
            await asyncio.gather(*(load() for _ in range(20)))
        assert not endpoint.connections.waiting
        assert not any(session.handlers for session in endpoint.connections.sessions)
        await endpoint.close()
        await until(lambda: not endpoint.connections.sessions)
        await until(lambda: (buffers.buffered, buffers.streams) == (0, 0))
    assert ends["complete"] > 20
    assert set(ends) >= {"cancelled", "NO_RESPONSE", "BAD_RESPONSE"}
    allowed = {kind.name for kind in (ErrorKind.NO_RESPONSE, ErrorKind.BAD_RESPONSE)}
    allowed |= {"REFUSED", "complete", "left", "cancelled", "client left"}
    assert set(ends) <= allowed, ends
