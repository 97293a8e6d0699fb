import asyncio

import aiohttp
import pytest

from gateway.upstream.connector import Connector
from tests.servers.faulty_server import Connection, FaultyServer
from tests.servers.http_text import answer, chunk, message
from tests.servers.running_gateway import nothing_left


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url) as response:
        return await response.read()


async def test_a_connection_is_kept() -> None:
    async with nothing_left(), FaultyServer() as server:
        async with aiohttp.ClientSession(connector=Connector(5)) as session:
            for _ in range(3):
                assert await _get(session, server.url) == b""
        assert len(server.connections) == 1


async def test_a_connection_is_not_kept_for_ever() -> None:
    async with nothing_left(), FaultyServer() as server:
        async with aiohttp.ClientSession(connector=Connector(0.01)) as session:
            assert await _get(session, server.url) == b""
            await asyncio.sleep(0.02)
            assert await _get(session, server.url) == b""
        assert len(server.connections) == 2


@pytest.mark.parametrize(
    "unasked", [answer(b"unasked"), answer(b"unasked") * 2, b"\0", b"\r\n\r\nx"]
)
async def test_a_connection_on_which_more_came_is_not_used_again(unasked: bytes) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(answer(b"asked"))
            await asyncio.sleep(0.01)
            await connection.send(unasked)
            sent.set()

    sent = asyncio.Event()
    async with nothing_left(), FaultyServer(script) as server:
        async with aiohttp.ClientSession(connector=Connector(5)) as session:
            for _ in range(3):
                sent.clear()
                assert await _get(session, server.url) == b"asked"
                await sent.wait()
                await asyncio.sleep(0.02)
        assert len(server.connections) == 3


async def test_who_reads_a_body_is_told_that_it_is_broken() -> None:
    head = message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}, chunk(b"good"))

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(head)
        await asyncio.sleep(0.01)
        await connection.send(b"what\r\n")
        await connection.wait_until_left()

    async with (
        nothing_left(),
        FaultyServer(script) as server,
        aiohttp.ClientSession(connector=Connector(5)) as session,
        session.get(server.url) as response,
    ):
        assert await response.content.readany() == b"good"
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.readany()
