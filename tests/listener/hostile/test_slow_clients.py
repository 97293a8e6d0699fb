"""Clients whose calls go on a little at a time, or not at all, keep no other client out.

They trickle bodies, begin a few large ones that are buffered as a whole, or read responses slowly.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.system.buffers import (
    MANY_STREAMS,
    MIN_STREAM_BYTES,
    PROGRESS,
    STALLED,
    BodyProgress,
    BufferAccount,
    BufferShare,
    ReservedBytes,
)
from gateway.system.sockets.connection import UnsentOutput
from tests.listener.running_listener import echo, running_listener
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.proto_file import message_class
from tests.support.http2_client import Headers, Http2Client, Http2Reply, connect_http2
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import INFER, binary_response, json_request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import Connection, ScriptedServer

GREEDY, USUAL, INNOCENT = "127.0.0.2", "127.0.0.3", "127.0.0.4"

SMALL = bytes(20_000)
"""A request's body for which there is no room."""

GRPC = (("content-type", "application/grpc"), ("te", "trailers"))

ROOM = 64
"""Trickling bodies for which there is room."""
FEW = 6
"""Large bodies of one client: fewer than are usual."""
LARGE = bytes(200_000)
"""A body that is not buffered as a whole."""
HELD = 2**20
"""Bytes of each large body that come at once."""
HUGE = 16 * 2**20
"""Bytes of a response that does not fit into the buffers of two sockets."""

NUMBERS = b"1.5," * (HELD // 4)
JSON = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[' + NUMBERS


def infer_message(*raw: bytes) -> bytes:
    content = message_class("ModelInferRequest")(model_name="m", raw_input_contents=raw)
    if raw:
        content.inputs.add(name="IN", datatype="FP32", shape=[len(raw[0]) // 4])
    return bytes(content.SerializeToString())


def framed(content: bytes, more: int = 0) -> bytes:
    return b"\0" + (len(content) + more).to_bytes(4) + content


# ----------------------------------------------------------------------- clients and gateways


class SlowClient(ABC):
    """Calls of one client, which go on a little at a time, or not at all."""

    step = b"x"
    """What is sent of each at a time, or as many bytes are read."""

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        self.url = url
        self.own_host = own_host
        self.clients = clients

    @abstractmethod
    async def begin(self, count: int) -> None:
        """Begin so many calls."""

    @abstractmethod
    async def go_on(self) -> None:
        """Send or read a little of each call that goes on."""

    def statuses(self) -> list[int]:
        """Return the statuses of those that have ended, 0 without a response."""
        return []


Kind = type[SlowClient]


class Http1Uploads(SlowClient):
    """Bodies over HTTP/1.1, each on a connection of its own."""

    target, length, start = "/v2/x", 200_000, bytes(1000)

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        super().__init__(url, own_host, clients)
        self._responses: dict[RawClient, asyncio.Task[int]] = {}

    async def begin(self, count: int) -> None:
        head = message(
            f"POST {self.target} HTTP/1.1", {"Host": "x", "Content-Length": str(self.length)}
        )
        for _ in range(count):
            client = await self.clients.enter_async_context(connect(self.url, None, self.own_host))
            await client.send(head, self.start)
            reading = self._responses[client] = asyncio.create_task(_status(client))
            self.clients.callback(reading.cancel)

    async def go_on(self) -> None:
        for client, response in self._responses.items():
            if not response.done():
                with suppress(ConnectionError):
                    await client.send(self.step)

    def statuses(self) -> list[int]:
        return [each.result() for each in self._responses.values() if each.done()]


async def _status(client: RawClient) -> int:
    try:
        line = await client.reader.readline()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0


class Http1Readers(SlowClient):
    """Responses over HTTP/1.1: a third as many, as each is large."""

    async def begin(self, count: int) -> None:
        self._connections: list[RawClient] = []
        for _ in range(count // 3):
            client = await self.clients.enter_async_context(connect(self.url, None, self.own_host))
            await client.send(request("GET", "/v2/large"))
            assert (await client.head()).status == 200
            self._connections.append(client)

    async def go_on(self) -> None:
        for client in self._connections:
            with suppress(ConnectionError):
                await client.reader.read(1)


class Http2Calls(SlowClient):
    """Calls over HTTP/2, with many on each connection."""

    per_connection = 40
    target = "/v2/x"
    headers: Headers = ()
    window: int | None = None

    def __init__(self, url: str, own_host: str, clients: AsyncExitStack) -> None:
        super().__init__(url, own_host, clients)
        self.connections: list[Http2Client] = []

    async def begin(self, count: int) -> None:
        while count > 0:
            settings = {} if self.window is None else {"initial_window_size": self.window}
            connecting = connect_http2(self.url, self.own_host, **settings)
            client = await self.clients.enter_async_context(connecting)
            self.connections.append(client)
            for _ in range(min(count, self.per_connection)):
                await self.begin_call(client)
            count -= self.per_connection

    @abstractmethod
    async def begin_call(self, client: Http2Client) -> None:
        """Begin one call."""

    @property
    def streams(self) -> Iterator[tuple[Http2Client, int, Http2Reply]]:
        """Give each stream with its connection and its response."""
        for client in self.connections:
            for stream, reply in client.replies.items():
                yield client, stream, reply

    @property
    def open_streams(self) -> list[tuple[Http2Client, int]]:
        """Give those that go on."""
        return [(client, stream) for client, stream, reply in self.streams if not _has_ended(reply)]

    def statuses(self) -> list[int]:
        return [reply.status or 0 for _, _, reply in self.streams if _has_ended(reply)]


def _has_ended(reply: Http2Reply) -> bool:
    return reply.ended or reply.reset is not None


class Http2Uploads(Http2Calls):
    """Bodies that begin, and go on."""

    headers: Headers = (("content-length", "200000"),)
    start = b"x"

    async def begin_call(self, client: Http2Client) -> None:
        stream = client.send_headers("POST", self.target, self.headers)
        await client.send_data(stream, self.start, end_stream=False)

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            await client.send_data(stream, self.step, end_stream=False)


class Http2Readers(Http2Calls):
    """Responses whose windows are closed, or almost."""

    per_connection = 20
    window: int | None = 0
    target = "/v2/medium"
    body: bytes | None = None

    async def begin(self, count: int) -> None:
        await super().begin(count)
        for client in self.connections:
            replies = client.replies.values()
            await client.until(lambda replies=replies: all(each.headers for each in replies))

    async def begin_call(self, client: Http2Client) -> None:
        client.reads = False
        method = "GET" if self.body is None else "POST"
        await client.start(method, self.target, self.body, self.headers)

    async def go_on(self) -> None:
        for client, stream in self.open_streams:
            client.open_window(len(self.step), stream)


@asynccontextmanager
async def gateway_with_little_room(
    response: bytes = binary_response(bytes(4)), **others: tuple[bytes, ...]
) -> AsyncIterator[RunningGateway]:
    """Run a gateway whose server gives this response to each infer request.

    ``others`` are the parts of the responses at /v2/NAME.
    """

    async def read(connection: Connection) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                target = (await connection.request()).head.target
                ok = (response if target == INFER else http_response(b"ok"),)
                await connection.send(*others.get(target.removeprefix("/v2/"), ok))

    async with ScriptedServer(read) as server, running_gateway(server.url) as gateway:
        yield gateway


def leave_no_room(gateway: RunningGateway) -> None:
    """Leave none for a call beside what there is."""
    buffers = gateway.gateway.listener.buffers
    buffers.set_limit(buffers.limit - buffers.free + MIN_STREAM_BYTES // 4)


async def until_settled(gateway: RunningGateway) -> None:
    """Wait until nothing moves any more."""
    buffers = gateway.gateway.listener.buffers
    seen = [0] * 20

    def is_settled() -> bool:
        seen.append(buffers.total)
        return buffers.total > 0 and len(set(seen[-20:])) == 1

    await until(is_settled)


# ---------------------------------------------------------------------------- what is slow


class GrpcBodies(Http2Uploads):
    """Streams of gRPC, with few on each connection; they may be silent for long."""

    per_connection = MANY_STREAMS
    target = f"/{SERVICE}/ModelStreamInfer"
    headers: Headers = GRPC
    start = b"\0\0\0\0\x10"
    step = b""


class Http1LargeBodies(Http1Uploads):
    """JSON bodies, which the gateway converts as a whole; a step is enough to stream through."""

    target, length, start = INFER, 8_000_000, JSON
    step = NUMBERS[:600]


class Http2LargeBodies(Http2Uploads):
    """The same over one HTTP/2 connection."""

    target = INFER
    headers: Headers = (("content-length", "8000000"),)
    start = JSON
    step = NUMBERS[:600]


class GrpcLargeBodies(Http2LargeBodies):
    """Messages over gRPC, each with raw_input_contents of 4,000,000 bytes."""

    target = f"/{SERVICE}/ModelInfer"
    headers: Headers = GRPC
    start = framed(infer_message() + b"\x3a\x80\x92\xf4\x01", 4_000_000) + bytes(HELD)


class UnreadCalls(Http2Readers):
    """Calls that hold what is buffered of either side."""

    target = INFER
    step = NUMBERS[:600]
    body = json.dumps(
        {
            "inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.5]}],
            "outputs": [{"name": "OUT0", "parameters": {"binary_data": True}}, {"name": "OUT1"}],
        }
    ).encode()


class BufferedReaders(Http2Readers):
    """Responses that are there as a whole."""

    window = 100  # else it is streamed
    target = INFER
    headers: Headers = (("content-type", "application/json"),)
    body = json_request(1.5)


class GrpcReaders(Http2Readers):
    """Responses over gRPC."""

    target = f"/{SERVICE}/ModelInfer"
    headers: Headers = GRPC
    body = framed(infer_message())


TRICKLING: list[Kind] = [Http1Uploads, Http2Uploads, GrpcBodies]
RESERVED: list[Kind] = [Http1LargeBodies, Http2LargeBodies, GrpcLargeBodies]
READERS: list[Kind] = [Http1Readers, Http2Readers, BufferedReaders, GrpcReaders]

MEDIUM = http_response(LARGE)
RESPONSES = {
    "medium": (MEDIUM,),
    "large": (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % HUGE,
        *[bytes(2**16)] * (HUGE // 2**16),
    ),
}
OF_READERS = binary_response(LARGE)
OF_OTHERS = binary_response(bytes(HELD), bytes(4))


async def fill(gateway: RunningGateway, slow: SlowClient, others: int = 0) -> None:
    """Begin the calls, and leave no room for a call beside what they hold."""
    buffers = gateway.gateway.listener.buffers
    if type(slow) in TRICKLING:
        await slow.begin(ROOM - others)
        await until(lambda: buffers.streams == ROOM and not buffers.buffered)
    elif type(slow) in READERS:
        await slow.begin(60)
        await until_settled(gateway)
    else:
        await slow.begin(FEW)
        await until(lambda: buffers.reserved >= 0.9 * FEW * HELD)
        await until_settled(gateway)
    leave_no_room(gateway)


# ---------------------------------------------------------------------------- what others get


@pytest.mark.parametrize("kind", TRICKLING)
async def test_client_of_many_trickling_bodies_keeps_nobody_out(kind: Kind) -> None:
    async with gateway_with_little_room() as gateway, AsyncExitStack() as clients:
        usual = [
            await clients.enter_async_context(connect(gateway.url, None, USUAL)) for _ in range(4)
        ]
        upload = request("POST", "/v2/upload", LARGE)
        for client in usual:
            await client.send(upload[:-100])
        greedy = kind(gateway.url, GREEDY, clients)
        await fill(gateway, greedy, len(usual))
        async with connect(gateway.url, None, INNOCENT) as innocent:
            for _ in range(10):
                await greedy.go_on()
                reply = await innocent.call("POST", "/v2/innocent", SMALL)
                assert reply.status == 200
                leave_no_room(gateway)
        await until(lambda: len(greedy.statuses()) == 10)
        assert set(greedy.statuses()) == {200 if kind is GrpcBodies else 408}
        if isinstance(greedy, Http2Uploads) and kind is not GrpcBodies:
            ended = [reply for _, _, reply in greedy.streams if reply.ended]
            assert all("stalled" in reply.json["error"] for reply in ended)
        for client in usual:
            assert (await client.ask(upload[-100:])).status == 200


GO_ON = [
    *((kind, True) for kind in (*RESERVED, UnreadCalls, *READERS)),
    *((k, False) for k in READERS),
]


@pytest.mark.parametrize(("kind", "goes_on"), GO_ON)
async def test_slow_client_of_large_bodies_or_responses_keeps_nobody_out(
    kind: Kind, goes_on: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    is_reader = kind in READERS
    response = OF_READERS if is_reader else OF_OTHERS
    async with (
        gateway_with_little_room(response, **RESPONSES) as gateway,
        AsyncExitStack() as clients,
    ):
        usual = await clients.enter_async_context(connect(gateway.url, None, USUAL))
        upload = request("POST", INFER, json_request(*[1.5] * 100_000))
        await usual.send(upload[:-100])
        greedy = kind(gateway.url, GREEDY, clients)
        await fill(gateway, greedy)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            for _ in range(4):
                async with asyncio.timeout(5):
                    # Whoever has just sent or read something is not slow yet.
                    while (await innocent.call("POST", "/v2/innocent", SMALL)).status != 200:
                        await asyncio.sleep(0.05)
                        if goes_on:
                            await greedy.go_on()
                leave_no_room(gateway)
        if not is_reader:
            await until(lambda: len(greedy.statuses()) == 4)
        gateway.gateway.listener.buffers.set_limit(2**30)  # its response takes room as well
        assert (await usual.ask(upload[-100:])).status == 200
    assert ("the client did not read its response" in capfd.readouterr().err) is (
        is_reader or kind is UnreadCalls
    )


@pytest.mark.parametrize("kind", [*TRICKLING, *RESERVED, Http2Readers, GrpcReaders])
async def test_all_clients_behind_one_address_lose_no_call_that_goes_on(kind: Kind) -> None:
    """Such as behind a proxy: whoever comes next is refused, as nobody else holds more."""
    response = OF_READERS if kind in READERS else OF_OTHERS
    async with (
        gateway_with_little_room(response, **RESPONSES) as gateway,
        AsyncExitStack() as clients,
    ):
        slow = kind(gateway.url, GREEDY, clients)
        await fill(gateway, slow)
        slow.step = slow.step[:1]  # so little that none needs more room
        async with connect(gateway.url, None, GREEDY) as newcomer:
            for _ in range(30 if kind in RESERVED else 10):
                await slow.go_on()
                assert (await newcomer.call("POST", "/v2/x", SMALL)).status == 503
                leave_no_room(gateway)
                await asyncio.sleep(0.05)
        assert not slow.statuses()


async def test_call_that_is_buffered_gets_the_room_of_trickling_bodies() -> None:
    """It takes more than a body in transit counts."""
    async with gateway_with_little_room() as gateway, AsyncExitStack() as clients:
        greedy = Http2Uploads(gateway.url, GREEDY, clients)
        await fill(gateway, greedy)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            await innocent.send(request("POST", INFER, json_request(*[1.5] * 100_000)))
            assert (await innocent.read_response()).status == 200
        async with connect_http2(gateway.url, INNOCENT) as innocent_of_grpc:
            leave_no_room(gateway)
            data = framed(infer_message(bytes(400_000)))
            reply = await innocent_of_grpc.call("POST", f"/{SERVICE}/ModelInfer", data, GRPC)
            assert reply.status == 200
            assert ("grpc-status", "0") in reply.trailers


def block_event_loop(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("newcomer", [GREEDY, INNOCENT])
async def test_body_whose_bytes_the_gateway_has_not_read_goes_on(newcomer: str) -> None:
    """The bytes wait in the socket while something blocks the event loop."""
    budget = MemoryBudget(ROOM * MIN_STREAM_BYTES)
    uploads: list[Http2Client] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/newcomer":
            for upload in uploads:
                for stream in upload.replies:
                    upload.h2.send_data(stream, bytes(PROGRESS))
                upload.flush()
            block_event_loop(1.1 * STALLED)
            budget.check_admission(response.record.reserved.client)
        await echo(client, response)

    async with running_listener(handle) as running, AsyncExitStack() as clients:
        budget.buffers = running.listener.buffers
        for _ in range(4):
            upload = await clients.enter_async_context(connect_http2(running.url, GREEDY))
            for _ in range(ROOM // 4):
                await upload.send_data(
                    upload.send_headers("POST", "/"), bytes(PROGRESS), end_stream=False
                )
            uploads.append(upload)
        await until(lambda: running.listener.requests == ROOM)
        await until(lambda: not budget.buffers.buffered)
        budget.set_limit(ROOM * MIN_STREAM_BYTES)
        async with connect(running.url, None, newcomer) as other:
            assert (await other.call("GET", "/newcomer")).status == 200
        for upload in uploads:
            for stream in upload.replies:
                await upload.send_data(stream, b"")
                reply = await upload.response(stream)
                assert reply.status == 200
                assert reply.body.endswith(bytes(2 * PROGRESS))


@pytest.mark.needs_source  # compiled code takes no double of a connection
def test_what_a_client_reads_counts_for_all_responses_of_its_connection() -> None:
    """Over HTTP/2 it would hold 100 of them by reading as fast as for one."""
    connection = WaitingConnection()
    output = UnsentOutput(connection, BodyProgress())  # type: ignore[arg-type]
    connection.unread -= 10 * PROGRESS - 1
    assert output.progress.slowness(time.monotonic()) >= STALLED
    connection.unread -= 1
    assert output.progress.slowness(time.monotonic()) < STALLED


class WaitingConnection:
    """A connection whose client has yet to read ten responses."""

    def __init__(self) -> None:
        self.unread = HUGE
        self.reserved = ReservedBytes()
        self.buffers = BufferShare(BufferAccount())
        for _ in range(10):
            self.buffers.open_stream(UnsentOutput(self, BodyProgress()))  # type: ignore[arg-type]

    def unread_bytes(self) -> int:
        return self.unread


async def test_response_of_a_slow_server_goes_on() -> None:
    go_on = asyncio.Event()

    async def respond(connection: Connection) -> None:
        await connection.request()
        await connection.send(MEDIUM[:-100_000])
        await go_on.wait()
        await connection.send(MEDIUM[-100_000:])
        await connection.wait_for_close()

    async with (
        ScriptedServer(respond) as server,
        running_gateway(server.url) as gateway,
        AsyncExitStack() as clients,
    ):
        client = await clients.enter_async_context(connect_http2(gateway.url, GREEDY))
        streams = [await client.start("GET", "/v2/x") for _ in range(20)]
        readers = [
            await clients.enter_async_context(connect(gateway.url, own_host=GREEDY))
            for _ in range(20)
        ]
        for reader in readers:
            await reader.send(request("GET", "/v2/x"))
        await client.until(lambda: all(client.replies[each].body for each in streams))
        # All has been sent, and only bodies of servers are in transit.
        buffers = gateway.gateway.listener.buffers
        await until(lambda: buffers.streams == 40 and not buffers.buffered)
        leave_no_room(gateway)
        async with connect(gateway.url, None, INNOCENT) as innocent:
            for _ in range(10):
                assert (await innocent.call("POST", "/v2/x", SMALL)).status == 503
        go_on.set()
        for stream in streams:
            assert len((await client.response(stream)).body) == len(LARGE)
        for reader in readers:
            assert len((await reader.read_response()).body) == len(LARGE)
