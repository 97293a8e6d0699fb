"""Bodies that nobody reads, that are broken, or that come in tiny pieces."""

import asyncio

import pytest

from gateway.errors import GatewayError, bad_request
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.listener.running_listener import echo, listening, send, whole_body
from tests.listener.running_listener import spoken as spoken
from tests.support.gateway import until
from tests.support.http_messages import message, request
from tests.support.raw_client import connect


async def test_a_body_left_unread_does_not_end_the_connection() -> None:
    async def exchange(_: ClientRequest, __: ClientResponse) -> None:
        raise bad_request("not looked at")

    async with listening(exchange) as here, connect(here.url) as client:
        for _ in range(3):
            data = request("POST", "/", bytes(100_000))
            await client.send(data[:1000])
            assert (await client.read_response()).status == 400
            await client.send(data[1000:])


async def test_a_large_body_left_unread_does_not_stop_the_connection() -> None:
    async def exchange(_: ClientRequest, answer: ClientResponse) -> None:
        await asyncio.sleep(0.05)  # in which as much arrives as is taken
        await send(answer, b"not looked at")

    async with listening(exchange) as here, connect(here.url) as client:
        for size in range(500_000, 800_000, 60_000):
            client.send_nowait(request("POST", "/", bytes(size)))
            assert (await client.read_response()).status == 200


async def test_a_broken_body_is_told_to_who_reads_it() -> None:
    async def exchange(client: ClientRequest, _: ClientResponse) -> None:
        with pytest.raises(GatewayError, match=r"^the request's body is broken: ") as caught:
            await whole_body(client)
        raise caught.value

    head = message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(head + b"2\r\nab\r\n")
        await asyncio.sleep(0.01)
        await client.send(b"what?\r\n")
        reply = await client.read_response()
        assert reply.status == 400
        assert "\n" not in reply.error
        assert reply.head.get("Connection") == "close"
        assert await client.rest() == b""


async def test_a_broken_body_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    async def exchange(_: ClientRequest, answer: ClientResponse) -> None:
        await broken.wait()
        await send(answer, b"done")

    broken = asyncio.Event()
    head = message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(head + b"2\r\nab\r\n")
        await asyncio.sleep(0.01)
        await client.send(b"what?\r\n")
        await asyncio.sleep(0.01)
        broken.set()
        assert (await client.read_response()).body == b"done"
        assert await client.rest() == b""
    assert not caplog.records


async def test_a_broken_body_in_the_pipeline() -> None:
    async def exchange(client: ClientRequest, answer: ClientResponse) -> None:
        await broken.wait()
        await echo(client, answer)

    broken = asyncio.Event()
    head = message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(request("GET", "/first") + head + b"2\r\nab\r\n")
        await asyncio.sleep(0.01)
        await client.send(b"what?\r\n")
        await asyncio.sleep(0.01)
        broken.set()
        assert (await client.read_response()).body.startswith(b"GET /first")
        assert (await client.read_response()).status == 400


async def test_requests_are_read_only_a_little_ahead() -> None:
    """However fast a client sends the next ones."""
    count, most = 1000, 64 * 1024 + 1000 * 1024
    ahead: list[int] = []

    async def exchange(client: ClientRequest, answer: ClientResponse) -> None:
        if len(ahead) < 30:
            await asyncio.sleep(0.005)  # in which more could come
        (connection,) = here.listener._connections
        ahead.append(len(connection._read_ahead))
        await echo(client, answer)

    async with listening(exchange) as here, connect(here.url) as client:
        client.send_nowait(request("POST", "/", bytes(8000)) * count)
        for _ in range(count):
            assert len((await client.read_response()).body) > 8000
        assert (await client.call("GET", "/last")).status == 200
    assert max(ahead) <= most


TINY = b"1\r\nx\r\n"
CHUNKS = 100_000
CHUNKED_HEAD = message("POST / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})


async def test_tiny_chunks_let_others_in() -> None:
    pieces: list[int] = []

    async def exchange(client: ClientRequest, answer: ClientResponse) -> None:
        while piece := await client.read():
            pieces.append(len(piece))
        await send(answer, b"")

    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: here.listener._active_calls)
        (connection,) = here.listener._connections
        # As large as reads may be.
        connection.data_received(memoryview(TINY * CHUNKS))
        assert not connection.transport.is_reading()
        connection.data_received(TINY + b"0\r\n\r\n" + request("GET", "/next"))  # on its way then
        for _ in range(2):
            assert (await client.read_response()).status == 200
        assert (await client.call("GET", "/last")).status == 200
    assert sum(pieces) == CHUNKS + 1
    # Each is from a turn of its own.
    assert max(pieces) < 5000


async def test_tiny_chunks_that_nobody_reads() -> None:
    async def exchange(_: ClientRequest, __: ClientResponse) -> None:
        await sent.wait()
        raise bad_request("not looked at")

    sent = asyncio.Event()
    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: here.listener._active_calls)
        (connection,) = here.listener._connections
        connection.data_received(memoryview(TINY * CHUNKS + b"0\r\n\r\n"))
        sent.set()
        assert (await client.read_response()).status == 400
        assert (await client.call("GET", "/next")).status == 400


async def test_a_client_that_leaves_behind_tiny_chunks() -> None:
    async def exchange(client: ClientRequest, _: ClientResponse) -> None:
        await whole_body(client)

    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: here.listener._active_calls)
        (connection,) = here.listener._connections
        connection.data_received(memoryview(TINY * CHUNKS))
        client.reset()
        connection.transport.abort()
        await until(lambda: not here.listener._active_calls)
        assert not connection._read_ahead
