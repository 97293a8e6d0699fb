"""Which connections of a client with most of all make room where file descriptors run out."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from gateway.observe.call_record import CallRecord
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.listener.running_listener import read_body, respond, running_listener
from tests.listener.running_listener import scheme as scheme
from tests.support.gateway import until
from tests.support.http2_client import Http2Client, connect_http2
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect

LIMIT = 256
"""Open files of the test process: a client with more than an eighth may have to make room."""
WAITING = 40
CROWD, OTHER = "127.0.0.9", "127.0.0.2"

UNFINISHED = request("POST", "/read", None, {"Content-Length": "9"})
GRPC = (("content-type", "application/grpc"), ("te", "trailers"))


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def _handle(client: ClientRequest, response: ClientResponse) -> None:
    """Respond at the end of the body; never if the target says so."""
    if client.target == "/wait":
        await asyncio.Event().wait()
    await respond(response, await read_body(client))


async def test_clients_that_go_on_keep_their_connections() -> None:
    records: list[CallRecord] = []
    async with running_listener(_handle, records.append) as running, AsyncExitStack() as stack:
        listener, url = running.listener, running.url

        async def connect_1(data: bytes, own_host: str | None = None) -> RawClient:
            client = await stack.enter_async_context(connect(url, own_host=own_host))
            client.send_nowait(data)
            return client

        async def connect_2() -> Http2Client:
            return await stack.enter_async_context(connect_http2(url))

        kept = [await connect_1(request("GET", "/wait")) for _ in range(WAITING)]
        kept.append(await connect_1(UNFINISHED, OTHER))  # it has no other connection
        quiet, partial, busy, stalled = [await connect_2() for _ in range(4)]
        for client, message in ((quiet, b"\0\0\0\0\2ab"), (partial, b"\0\0\0\0\2a")):
            stream = client.send_headers("POST", "/read", GRPC)
            await client.send_data(stream, message, end_stream=False)
        busy.send_headers("GET", "/wait", end_stream=True)
        busy.send_headers("POST", "/read")
        stalled.send_headers("POST", "/read")
        gone = [await connect_1(UNFINISHED) for _ in range(2)]
        await until(lambda: listener.requests == WAITING + 8)

        while listener.connections > WAITING + 3:
            await until(listener.make_room)
            assert listener.requests >= WAITING + 4
            await asyncio.sleep(0)
        assert not listener.make_room()
        for each in gone:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await each.read_response()
        assert {record.error for record in records} == {
            "the request did not go on, and others needed the file descriptor"
        }
        assert (await kept[-1].ask(b"123456789")).body == b"123456789"


async def test_only_a_client_with_more_than_half_of_all_connections_makes_room() -> None:
    async with running_listener(_handle) as running, AsyncExitStack() as stack:
        listener = running.listener

        async def connect_from(own_host: str, data: bytes) -> None:
            client = await stack.enter_async_context(connect(running.url, own_host=own_host))
            client.send_nowait(data)

        for own_host in (OTHER, CROWD):
            for _ in range(WAITING):
                await connect_from(own_host, UNFINISHED)
        await connect_from(CROWD, request("GET", "/wait"))
        await until(lambda: listener.requests == 2 * WAITING + 1)
        await until(listener.make_room)  # the first one of the crowd has stalled: so have others
        await until(lambda: listener.connections <= 2 * WAITING)
        while listener.connections < 2 * WAITING:
            await connect_from(CROWD, request("GET", "/wait"))
            await until(lambda: listener.requests == listener.connections)
        assert not listener.make_room()  # both have half
