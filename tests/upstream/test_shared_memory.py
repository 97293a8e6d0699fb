from __future__ import annotations

import asyncio
import json
import mmap
import os
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.system import shared_memory as region
from gateway.system.buffers import BufferAccount
from gateway.system.shared_memory import Owner, Slice, is_dead, owner_of
from gateway.upstream.address import TcpAddress, TlsTarget, parse_server_url
from gateway.upstream.control_client import send_control_request
from gateway.upstream.exchange import EndpointOptions, ResponseFuture
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.shared_memory import (
    MAX_ABANDONED,
    NOT_SHARED,
    SharedMemoryLane,
    SharedMemoryLanes,
    SharedMemoryPolicy,
)
from gateway.upstream.transport import (
    RequestTemplate,
    ReservedConnection,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)
from tests.support.doubles.iterations import iterations
from tests.support.doubles.shared_memory_folder import folder as folder
from tests.support.doubles.streaming import SERVER, URL
from tests.support.gateway import no_leaks, until
from tests.support.servers.scripted_server import ScriptedServer
from tests.support.servers.shared_memory_server import SharedMemoryModel

PAGE = mmap.PAGESIZE
SIZE = 16 * PAGE
REGIONS = "/v2/systemsharedmemory"
CALL = UpstreamRequest("POST", "/v2/models/m/infer", CIMultiDict(), [b"{}"])

Piece = bytes | GatewayError


class Response(UpstreamResponse):
    """A response whose pieces come when a test sends them; after an empty one it has ended."""

    reason = ""

    def __init__(
        self,
        *pieces: Piece,
        status: int = 200,
        length: int | None = None,
        content_type: str = "text/plain",
    ) -> None:
        self.status = status
        headers = {"Content-Type": content_type}
        if length is not None:
            headers["Content-Length"] = str(length)
        self.headers = CIMultiDictProxy(CIMultiDict(headers))
        self.closed = asyncio.Event()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self.arrive(*pieces)

    def arrive(self, *pieces: Piece) -> None:
        for piece in pieces:
            self._pieces.put_nowait(piece)

    async def read(self) -> bytes:
        assert not self.closed.is_set()
        piece = await self._pieces.get()
        if isinstance(piece, bytes):
            return piece
        self.arrive(piece)  # and so it does whenever it is read again
        raise piece

    def close(self) -> None:
        self.closed.set()


class Server(UpstreamEndpoint):
    """A server that maps regions as Triton does; a test decides what becomes of its calls.

    ``refusal`` is what it says to a region, or the error that it causes; it responds once
    ``responds`` is set.
    """

    def __init__(self) -> None:
        self.url = URL
        self.name = SERVER
        self.refusal: str | GatewayError | None = None
        self.responds = asyncio.Event()
        self.responds.set()
        self.regions: dict[str, mmap.mmap | None] = {}
        self.requests: list[str] = []
        self.status: bytes | None = None
        self.calls: asyncio.Queue[asyncio.Future[UpstreamResponse]] = asyncio.Queue()

    @property
    def own(self) -> str:
        """The name of the only region."""
        (name,) = self.regions
        return name

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        if not request.target.startswith(REGIONS):
            response: asyncio.Future[UpstreamResponse] = asyncio.Future()
            self.calls.put_nowait(response)
            return await response
        assert isinstance(request.body, Sequence | None)
        self.requests.append(f"{request.method} {request.target}")
        name, _, action = request.target.removeprefix(f"{REGIONS}/region/").rpartition("/")
        if action == "register":
            self._register(name, json.loads(b"".join(request.body or ())))
        await self.responds.wait()
        if isinstance(self.refusal, GatewayError):
            raise self.refusal
        if action == "status":
            regions = [{"name": name, "key": f"/{name}", "offset": 0} for name in self.regions]
            return Response(self.status or json.dumps(regions).encode(), b"")
        if self.refusal is not None:
            text = self.refusal.replace("NAME", name)
            return Response(json.dumps({"error": text}).encode(), b"", status=501)
        if action == "unregister":
            assert request.body == (b"",)
            del self.regions[name]
        return Response(b"")

    def _register(self, name: str, fields: dict[str, object]) -> None:
        size = fields.pop("byte_size")
        assert fields == {"key": f"/{name}", "offset": 0}
        assert isinstance(size, int)
        descriptor = os.open(region.FOLDER / name, os.O_RDWR)
        if not isinstance(self.refusal, str):
            self.regions[name] = mmap.mmap(descriptor, size)
        os.close(descriptor)

    def count(self, action: str) -> int:
        return sum(each.endswith(f"/{action}") for each in self.requests)

    async def close(self) -> None:
        raise AssertionError("not the lane's to close")


@pytest.fixture
async def server() -> Server:
    return Server()


@asynccontextmanager
async def lane_to(
    server: Server,
    size: int = SIZE,
    why_not: str = "",
    patience: float = 60,
    close_timeout: float = 5,
    retry_interval: float = 60,
    shrink_interval: float = 60,
    is_supported: bool = True,
    account: BufferAccount | None = None,
) -> AsyncIterator[SharedMemoryLane]:
    """Start a lane; at the end it must leave no task."""
    async with no_leaks():
        times = (0, patience, close_timeout, retry_interval, shrink_interval)
        policy = SharedMemoryPolicy(size, 1, *times)
        lanes = SharedMemoryLanes(policy, (account or BufferAccount()).count_shared)
        lane = SharedMemoryLane(server, lanes, why_not, is_supported)
        lane.start()
        try:
            yield lane
        finally:
            await lane.close()


@asynccontextmanager
async def registered(
    server: Server, patience: float = 60, close_timeout: float = 5, retry_interval: float = 60
) -> AsyncIterator[SharedMemoryLane]:
    async with lane_to(
        server, patience=patience, close_timeout=close_timeout, retry_interval=retry_interval
    ) as lane:
        await until(lambda: lane.size)
        yield lane


def taken(lane: SharedMemoryLane, size: int = PAGE) -> Slice:
    part = lane.take(size)
    assert part is not None
    return part


@asynccontextmanager
async def call(
    lane: SharedMemoryLane, server: Server, part: Slice
) -> AsyncIterator[tuple[asyncio.Task[UpstreamResponse], asyncio.Future[UpstreamResponse]]]:
    """Start a call that uses a slice; give it, and the server's response to be set."""
    sending = asyncio.create_task(lane.send(CALL, [part]))
    response = await server.calls.get()
    try:
        yield sending, response
    finally:
        sending.cancel()


async def respond(lane: SharedMemoryLane, server: Server, response: Response) -> UpstreamResponse:
    """Make a call, whose own hold of its slice ends, up to the head of its response."""
    part = taken(lane)
    async with call(lane, server, part) as (sending, future):
        part.release()
        future.set_result(response)
        return await sending


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mark_of(name: str) -> str:
    return f"tensorgate-{owner_of(name)}.owner"


# ----------------------------------------------------------------------------- registration


async def test_region_is_registered_and_loses_its_name(server: Server, folder: Path) -> None:
    async with registered(server) as lane:
        assert f"POST {REGIONS}/region/{server.own}/register" in server.requests
        assert names(folder) == [mark_of(server.own)]
        assert (lane.size, lane.used, lane.why_not) == (SIZE, 0, "")
        part = taken(lane, 5)
        assert (part.region, lane.used) == (server.own, PAGE)
        part.view[:] = b"input"
        memory = server.regions[server.own]
        assert memory is not None
        assert memory[part.offset : part.offset + 5] == b"input"
        part.release()


async def test_tensors_are_shared_while_any_lane_has_a_region(server: Server) -> None:
    lanes = SharedMemoryLanes(SharedMemoryPolicy(SIZE, 5, retry_interval=0.01))
    one, other = SharedMemoryLane(server, lanes), SharedMemoryLane(Server(), lanes)
    async with no_leaks():
        assert lanes.min_bytes == NOT_SHARED
        assert one.why_not == "it is not registered yet"
        one.start()
        await until(lambda: one.size)
        assert lanes.min_bytes == 5
        other.start()
        await until(lambda: other.size)
        server.refusal = "not any more"
        one.forget_region(server.own)
        assert lanes.min_bytes == 5
        await other.close()
        assert lanes.min_bytes == NOT_SHARED
        server.refusal = None
        await until(lambda: lanes.min_bytes == 5)
        await one.close()
        assert lanes.min_bytes == NOT_SHARED


async def test_regions_are_guarded_unless_no_server_can_have_one_of_a_gateway() -> None:
    lanes = SharedMemoryLanes(SharedMemoryPolicy(SIZE, 1))
    elsewhere = SharedMemoryLane(Server(), lanes, "not here", is_guarded=False)
    elsewhere.set_supported(True)
    assert not lanes.are_guarded
    here = SharedMemoryLane(Server(), lanes, "not wanted", is_supported=False)
    assert lanes.are_guarded  # until it is known what the server has
    here.set_supported(False)
    assert not lanes.are_guarded
    here.set_supported(True)
    assert lanes.are_guarded
    await here.close()
    assert not lanes.are_guarded


async def test_region_is_guarded_though_its_server_lists_the_extension_no_more(
    server: Server,
) -> None:
    lanes = SharedMemoryLanes(SharedMemoryPolicy(SIZE, 1, patience=0))
    lane = SharedMemoryLane(server, lanes)
    lane.start()
    await until(lambda: lane.size)
    lane.set_supported(False)
    assert lanes.are_guarded
    lane.forget_region(server.own)
    lane.set_supported(False)
    assert not lanes.are_guarded
    await lane.close()


async def test_words_of_a_server_that_refuses_tell_why_there_is_none(
    server: Server, folder: Path
) -> None:
    server.refusal = "start it with --allow-client-shm=true"
    async with lane_to(server) as lane:
        await until(lambda: "--allow" in lane.why_not)
        assert lane.why_not == "the server returned 501: start it with --allow-client-shm=true"
        assert lane.take(1) is None
        assert (lane.size, lane.used) == (0, 0)
        assert all(name.endswith(".owner") for name in names(folder))
    assert not names(folder)


async def test_region_whose_registration_got_no_response_is_unregistered(server: Server) -> None:
    server.responds.clear()
    async with lane_to(server) as lane:
        await until(lambda: server.count("register"))
        server.refusal = GatewayError(ErrorKind.NO_RESPONSE, "it closed the connection")
        server.responds.set()
        await until(lambda: lane.why_not == "it closed the connection")
        assert server.count("unregister") == 1


async def test_region_that_could_not_be_unregistered_is_so_after_the_next_registration(
    server: Server,
) -> None:
    server.responds.clear()
    async with lane_to(server, retry_interval=0.01) as lane:
        await until(lambda: server.count("register"))
        left = server.own
        server.refusal = GatewayError(ErrorKind.NO_RESPONSE, "it closed the connection")
        server.responds.set()
        await until(lambda: server.count("unregister"))
        assert left in server.regions
        server.refusal = None
        await until(lambda: lane.size)
        await until(lambda: left not in server.regions)


@asynccontextmanager
async def real_server(model: SharedMemoryModel) -> AsyncIterator[HttpEndpoint]:
    """Run a server; give its endpoint, which has a connection."""
    async with ScriptedServer(model) as running, no_leaks():
        endpoint = HttpEndpoint(parse_server_url(running.url), EndpointOptions(5))
        try:
            await send_control_request(endpoint, "/v2/models/m", 1000)
            yield endpoint
        finally:
            await endpoint.close()


async def test_region_whose_registration_was_sent_again_is_unregistered(folder: Path) -> None:
    model = SharedMemoryModel(1)
    model.cut_after = "register"
    async with real_server(model) as endpoint:
        lane = SharedMemoryLane(endpoint, SharedMemoryLanes(SharedMemoryPolicy(SIZE, 1)))
        lane.start()
        await until(lambda: "already in manager" in lane.why_not)
        assert not model.regions
        await lane.close()
    assert not names(folder)


async def test_region_of_a_registration_without_response_is_replaced() -> None:
    model = SharedMemoryModel(1)
    async with real_server(model) as endpoint:
        await endpoint.connections.close()  # a new connection: the registration is sent once
        model.cut_after = "register"
        lane = SharedMemoryLane(
            endpoint, SharedMemoryLanes(SharedMemoryPolicy(SIZE, 1, retry_interval=0.01))
        )
        lane.start()
        await until(lambda: lane.size)
        assert len(model.regions) == 1
        await lane.close()
    assert not model.regions


async def test_memory_that_does_not_exist_is_not_asked_for(server: Server, folder: Path) -> None:
    async with lane_to(server, 2**50) as lane:
        await until(lambda: "Cannot allocate memory" in lane.why_not)
        assert lane.take(1) is None
        assert server.count("register") == 0
        assert all(name.endswith(".owner") for name in names(folder))
    assert not names(folder)


async def test_server_elsewhere_is_not_asked(server: Server, folder: Path) -> None:
    async with lane_to(server, why_not="its address is not on this machine") as lane:
        await iterations(5)
        assert lane.take(1) is None
        assert lane.why_not == "its address is not on this machine"
    assert server.count("register") == 0
    assert not names(folder)


async def test_server_is_asked_once_it_has_listed_the_extension(
    server: Server, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with lane_to(server, is_supported=False) as lane:
        for _ in range(3):
            await iterations(5)
            assert lane.take(1) is None
            assert not server.requests
            assert not names(folder)
            lane.set_supported(False)
        assert lane.why_not == "the server does not list the extension system_shared_memory"
        assert caplog.messages == [f"{URL}: no shared memory: {lane.why_not}"]
        lane.set_supported(True)
        await until(lambda: lane.size)
        lane.set_supported(False)  # a proxy may have said that; the region is there
        assert lane.take(1) is not None
        assert lane.why_not == ""


async def test_region_that_the_server_has_forgotten_is_replaced(server: Server) -> None:
    async with registered(server) as lane:
        before = server.own
        part = taken(lane)
        server.regions.clear()
        server.responds.clear()
        lane.forget_region(before)
        assert lane.take(1) is None
        assert lane.why_not == "the server has forgotten it"
        server.responds.set()
        await until(lambda: lane.size)
        assert server.own != before
        assert owner_of(server.own) == owner_of(before)
        assert lane.used == 0
        part.view[:1] = b"x"  # whoever has a slice of the other may use it up to its end
        part.release()
        assert lane.used == 0
        lane.forget_region(before)  # another call has found that, too
        assert lane.size == SIZE
        assert lane.why_not == ""


async def test_region_of_an_address_with_several_servers_is_registered_ever_more_seldom(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with lane_to(server, retry_interval=0.05) as lane:
        times = []
        for count in range(1, 6):
            await until(lambda: lane.size)
            assert server.count("register") == count
            times.append(asyncio.get_running_loop().time())
            lane.forget_region(list(server.regions)[-1])
            assert lane.take(1) is None
        pauses = [after - before for before, after in pairwise(times)]
        assert pauses[0] < 0.05 < pauses[1] < pauses[2] < pauses[3]
        await until(lambda: "several servers" in lane.why_not)


async def test_reason_that_names_another_region_each_time_is_told_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.refusal = "Unable to open shared memory region: '/NAME'"
    async with lane_to(server, retry_interval=0.01) as lane:
        await until(lambda: server.count("register") > 3)
        reason = "the server returned 501: Unable to open shared memory region: '/…'"
        assert lane.why_not == reason
        assert caplog.messages == [f"{URL}: no shared memory: {reason}"]


async def test_model_is_certain_until_it_is_distrusted(server: Server) -> None:
    async with registered(server) as lane:
        lane.distrust("m")
        assert not lane.is_certain("m")
        assert lane.is_certain("other")


# ------------------------------------------------------------------------------------ calls


async def test_slice_is_free_once_its_call_and_the_server_are_done(server: Server) -> None:
    async with registered(server) as lane:
        part = taken(lane)
        async with call(lane, server, part) as (sending, future):
            future.set_result(Response(b"body", b""))
            response = await sending
            assert await response.read() == b"body"
            assert await response.read() == b""
        assert lane.used == PAGE  # the call may still send what is there to its client
        response.close()
        part.release()
        assert lane.used == 0


async def test_slice_is_free_with_the_last_byte_that_was_promised(server: Server) -> None:
    async with registered(server) as lane:
        sent = Response(b"bo", b"dy", length=4)
        response = await respond(lane, server, sent)
        await response.read()
        assert lane.used == PAGE
        await response.read()
        assert lane.used == 0
        response.close()
        assert sent.closed.is_set()


async def test_slice_of_a_cancelled_call_is_held_until_the_whole_response_has_come(
    server: Server,
) -> None:
    async with registered(server) as lane:
        part = taken(lane)
        async with call(lane, server, part) as (sending, future):
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            part.release()
            assert not future.done()
            await _ends_late(lane, future)


async def _ends_late(lane: SharedMemoryLane, future: asyncio.Future[UpstreamResponse]) -> None:
    response = Response(b"bo")
    future.set_result(response)
    await iterations(5)
    assert lane.used == PAGE
    response.arrive(b"dy", b"")
    await asyncio.wait_for(response.closed.wait(), 5)
    await until(lambda: lane.used == 0)


async def test_call_that_is_cancelled_before_it_could_be_sent_frees_its_slice(
    server: Server,
) -> None:
    async with registered(server) as lane:
        part = taken(lane)
        async with call(lane, server, part) as (sending, future):
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            part.release()
            future.set_exception(GatewayError(ErrorKind.UNREACHABLE, "cannot connect"))
            await until(lambda: lane.used == 0)


@pytest.mark.parametrize("is_reading", [False, True])
async def test_response_that_its_client_does_not_want_is_read_to_its_end(
    server: Server, is_reading: bool
) -> None:
    async with registered(server) as lane:
        sent = Response(b"bo")
        response = await respond(lane, server, sent)
        assert await response.read() == b"bo"
        if is_reading:
            reading = asyncio.ensure_future(response.read())
            await iterations(2)
            reading.cancel()
            await asyncio.wait([reading])
        response.close()
        response.close()
        await iterations(5)
        assert lane.used == PAGE
        assert not sent.closed.is_set()
        sent.arrive(b"dy", b"")
        await asyncio.wait_for(sent.closed.wait(), 5)
        await until(lambda: lane.used == 0)


@pytest.mark.parametrize(
    "kind", [ErrorKind.NO_RESPONSE, ErrorKind.BAD_RESPONSE, ErrorKind.SERVER_TIMEOUT]
)
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_slice_of_a_connection_that_broke_is_not_given_again(
    server: Server, kind: ErrorKind, is_cancelled: bool
) -> None:
    async with registered(server) as lane:
        part = taken(lane)
        async with call(lane, server, part) as (sending, future):
            if is_cancelled:
                sending.cancel()
                await asyncio.wait([sending])
            future.set_exception(GatewayError(kind, "it broke"))
            with pytest.raises(asyncio.CancelledError if is_cancelled else GatewayError):
                await sending
        part.release()
        await iterations(5)
        assert lane.used == PAGE
        assert lane.take(SIZE) is None
        assert taken(lane).offset == part.offset + PAGE


@pytest.mark.parametrize("is_read", [False, True])
async def test_slice_of_a_response_that_was_cut_short_is_not_given_again(
    server: Server, is_read: bool
) -> None:
    async with registered(server) as lane:
        sent = Response(b"bo", bad_response("cut short"), length=4)
        response = await respond(lane, server, sent)
        await response.read()
        if is_read:
            with pytest.raises(GatewayError):
                await response.read()
        response.close()
        await asyncio.wait_for(sent.closed.wait(), 5)
        await iterations(5)
        assert lane.used == PAGE


@pytest.mark.parametrize("kind", [ErrorKind.UNREACHABLE, ErrorKind.EXHAUSTED])
async def test_slice_of_a_request_that_was_never_sent_is_free(
    server: Server, kind: ErrorKind
) -> None:
    async with registered(server) as lane:
        part = taken(lane)
        async with call(lane, server, part) as (sending, future):
            future.set_exception(GatewayError(kind, "cannot connect"))
            with pytest.raises(GatewayError, match="cannot connect"):
                await sending
        assert lane.used == PAGE  # the call may try another endpoint
        part.release()
        assert lane.used == 0


# --------------------------------------------------------------------------------- lost slices


async def abandon(
    lane: SharedMemoryLane, server: Server, part: Slice
) -> asyncio.Future[UpstreamResponse]:
    """Make a call that is cancelled while it waits; return the server's response to be set."""
    async with call(lane, server, part) as (sending, future):
        sending.cancel()
        await asyncio.wait([sending])
    part.end_call()
    return future


async def lose(lane: SharedMemoryLane, server: Server, size: int) -> None:
    """Make a call whose connection breaks after its client is gone."""
    future = await abandon(lane, server, taken(lane, size))
    if not future.cancelled():
        future.set_exception(GatewayError(ErrorKind.NO_RESPONSE, "it broke"))


@contextmanager
def moved_away(folder: Path) -> Iterator[None]:
    gone = folder.rename(folder.with_suffix(".gone"))
    try:
        yield
    finally:
        gone.rename(folder)


def described(lane: SharedMemoryLane) -> dict[str, int | str]:
    memory = lane.describe()
    assert memory is not None
    return memory


def told(lane: SharedMemoryLane) -> tuple[object, ...]:
    memory = described(lane)
    return memory["size"], memory["in_use"], memory["quarantined"]


async def test_region_of_which_half_is_lost_is_replaced(server: Server) -> None:
    async with registered(server) as lane:
        before = server.own
        await lose(lane, server, SIZE // 2 - PAGE)
        part = taken(lane)
        await iterations(5)
        assert server.own == before
        await lose(lane, server, PAGE)
        await until(lambda: lane.size == 2 * SIZE)
        assert before in server.regions
        other = taken(lane, SIZE)
        assert other.region in server.regions.keys() - {before}
        assert told(lane) == (2 * SIZE, SIZE + PAGE, SIZE // 2)
        part.view[:1] = b"x"
        part.end_call()
        other.end_call()
        assert told(lane) == (2 * SIZE, 0, SIZE // 2)
        assert lane.why_not == ""
        assert server.count("unregister") == 0


async def test_replaced_region_is_unregistered_after_its_last_call(server: Server) -> None:
    async with registered(server, patience=0) as lane:
        before, part = server.own, taken(lane)
        async with call(lane, server, part) as (sending, future):
            await lose(lane, server, SIZE // 2)
            await until(lambda: lane.size == 2 * SIZE)
            future.set_result(Response(b""))
            await (await sending).read()
            await iterations(5)
            assert server.count("unregister") == 0
        part.end_call()
        await until(lambda: before not in server.regions)
        assert server.own != before
        assert told(lane) == (SIZE, 0, 0)


async def test_region_is_not_replaced_while_the_one_before_is_registered(server: Server) -> None:
    async with registered(server) as lane:
        await lose(lane, server, SIZE // 2)
        await until(lambda: lane.size == 2 * SIZE)
        await lose(lane, server, SIZE // 2)
        await iterations(20)
        assert server.count("register") == 2
        assert told(lane) == (2 * SIZE, 0, SIZE)
        taken(lane, SIZE // 2).end_call()


async def test_region_that_could_not_be_replaced_yet_is_replaced_later(server: Server) -> None:
    async with registered(server, patience=0) as lane:
        part = taken(lane)  # its call keeps the first region
        await lose(lane, server, SIZE // 2)
        await until(lambda: lane.size == 2 * SIZE)
        await lose(lane, server, SIZE // 2)
        part.end_call()
        del part  # its view keeps the memory
        await until(lambda: server.count("register") == 3)
        await until(lambda: told(lane) == (SIZE, 0, 0))


async def test_response_that_does_not_come_in_time_loses_its_slice(server: Server) -> None:
    async with registered(server, patience=0) as lane:
        before = server.own
        future = await abandon(lane, server, taken(lane, SIZE))
        await until(lambda: before not in server.regions)
        assert future.cancelled()  # and so its connection is closed
        await until(lambda: told(lane) == (SIZE, 0, 0))


async def test_hung_server_keeps_few_abandoned_calls(server: Server) -> None:
    async with lane_to(server, size=(MAX_ABANDONED + 2) * PAGE) as lane:
        await until(lambda: lane.size)
        waiting = [await abandon(lane, server, taken(lane)) for _ in range(MAX_ABANDONED)]
        late = await abandon(lane, server, taken(lane))
        await until(late.cancelled)  # and so its connection is closed
        assert lane.used == (MAX_ABANDONED + 1) * PAGE
        assert not any(each.done() for each in waiting)
        for each in waiting:
            each.set_result(Response(b""))
        await until(lambda: lane.used == PAGE)
        another = await abandon(lane, server, taken(lane))
        await iterations(5)
        assert not another.done()
        another.set_result(Response(b""))
        await until(lambda: lane.used == PAGE)


async def test_abandoned_response_above_the_limit_is_closed_unread(server: Server) -> None:
    async with lane_to(server, size=(MAX_ABANDONED + 2) * PAGE) as lane:
        await until(lambda: lane.size)
        waiting = [await abandon(lane, server, taken(lane)) for _ in range(MAX_ABANDONED)]
        sent = Response(b"bo")
        (await respond(lane, server, sent)).close()
        await asyncio.wait_for(sent.closed.wait(), 5)
        for each in waiting:
            each.set_result(Response(b""))
        await until(lambda: lane.used == PAGE)


async def test_region_is_unregistered_again_if_that_fails(server: Server) -> None:
    async with lane_to(server, patience=0.01, retry_interval=0.01) as lane:
        await until(lambda: lane.size)
        before = server.own
        await lose(lane, server, SIZE // 2)
        await until(lambda: lane.size == 2 * SIZE)
        server.refusal = GatewayError(ErrorKind.NO_RESPONSE, "it closed the connection")
        await until(lambda: server.count("unregister") > 1)
        assert told(lane)[0] == 2 * SIZE
        server.refusal = None
        await until(lambda: before not in server.regions)
        await until(lambda: told(lane)[0] == SIZE)


async def test_response_of_a_proxy_loses_its_slice(server: Server) -> None:
    async with registered(server, patience=0) as lane:
        before, part = server.own, taken(lane, SIZE)
        async with call(lane, server, part) as (sending, future):
            future.set_result(Response(b"", status=504))
            await (await sending).read()
        part.end_call()
        await until(lambda: before not in server.regions)


async def test_full_queue_of_the_server_itself_loses_nothing(server: Server) -> None:
    async with registered(server) as lane:
        part = taken(lane, SIZE)
        async with call(lane, server, part) as (sending, future):
            future.set_result(Response(b"{}", b"", status=503, content_type="application/json"))
            await (await sending).read()
            await (await sending).read()
        part.end_call()
        assert told(lane) == (SIZE, 0, 0)


async def test_region_makes_room_for_another_where_two_have_none(
    server: Server, folder: Path
) -> None:
    async with registered(server, patience=0, retry_interval=0.01) as lane:
        with moved_away(folder):
            await lose(lane, server, SIZE // 2)
            taken(lane, SIZE // 2).end_call()  # calls use the rest meanwhile
            assert server.regions
            await lose(lane, server, SIZE // 2)
            await until(lambda: not server.regions)
            assert lane.take(1) is None
            assert "No such file" in lane.why_not
            assert told(lane) == (0, 0, 0)


async def test_forgotten_region_counts_no_more_and_is_not_unregistered(server: Server) -> None:
    async with registered(server, patience=0) as lane:
        before, part = server.own, taken(lane)
        lane.forget_region(before)
        assert told(lane) == (0, 0, 0)
        await until(lambda: lane.size)
        part.end_call()
        await iterations(5)
        assert before in server.regions  # as this server has not forgotten it in truth


# ------------------------------------------------------------------------------------- size

MIB = 2**20


def allocated(lane: SharedMemoryLane) -> object:
    return described(lane)["allocated"]


async def grow(lane: SharedMemoryLane, size: int) -> Slice:
    """Ask for a slice that makes a region grow; return it once it is there."""
    assert lane.take(size) is None
    while (part := lane.take(size)) is None:
        await iterations(1)
    return part


async def test_slice_for_which_there_is_no_memory_yet_is_there_for_a_later_call(
    server: Server,
) -> None:
    async with lane_to(server, 64 * MIB) as lane:
        await until(lambda: lane.size)
        assert (lane.size, allocated(lane)) == (64 * MIB, 4 * MIB)
        small, large = taken(lane, 4 * MIB), await grow(lane, 40 * MIB)
        assert 44 * MIB <= int(str(allocated(lane))) <= 64 * MIB
        large.view[-5:] = b"input"
        memory = server.regions[server.own]
        assert memory is not None
        assert memory[large.offset : large.offset + large.size].endswith(b"input")
        assert server.count("register") == 1
        for part in (small, large):
            part.end_call()


async def test_memory_that_is_hardly_used_is_given_back_and_comes_again(server: Server) -> None:
    async with lane_to(server, 64 * MIB, shrink_interval=0.01) as lane:
        await until(lambda: lane.size)
        for _ in range(2):
            part = await grow(lane, 40 * MIB)
            part.view[-1:] = b"x"
            await asyncio.sleep(0.05)  # in which it looks at what is used, and leaves that
            assert bytes(part.view[-1:]) == b"x"
            part.end_call()
            await until(lambda: allocated(lane) == 4 * MIB)
        assert server.count("register") == 1


async def test_memory_of_a_lane_is_counted_until_it_is_given_back(server: Server) -> None:
    account = BufferAccount(100 * MIB)
    server.refusal = "not yet"
    async with lane_to(
        server, 64 * MIB, patience=0, retry_interval=0.01, shrink_interval=0.01, account=account
    ) as lane:
        await until(lambda: "not yet" in lane.why_not)
        server.refusal = None
        await until(lambda: lane.size)
        assert account.shared == 4 * MIB
        part = await grow(lane, 9 * MIB)
        assert account.shared == allocated(lane) == 16 * MIB
        assert lane.take(9 * MIB) is None  # a quarter has no room for 32 MiB
        await iterations(20)
        assert account.shared == allocated(lane) == 16 * MIB
        part.end_call()
        del part  # else its region could not be unmapped
        await until(lambda: allocated(lane) == 4 * MIB)
        await until(lambda: account.shared == 4 * MIB)
        lane.forget_region(server.own)
        await until(lambda: lane.size)
        await until(lambda: account.shared == 4 * MIB)
        taken(lane)
    assert account.shared == 0


async def test_lane_without_room_in_the_limit_of_buffered_bytes_has_no_region(
    server: Server,
) -> None:
    async with lane_to(server, 64 * MIB, account=BufferAccount(15 * MIB)) as lane:
        await until(lambda: "a quarter of limits.max_buffered_bytes" in lane.why_not)
        assert not server.count("register")


async def test_memory_is_counted_no_more_if_there_is_no_thread_to_unmap_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_thread = asyncio.to_thread

    async def to_thread(function: Callable[..., object], *args: object) -> object:
        if function.__name__ == "close":
            raise RuntimeError("can't start new thread")
        return await in_thread(function, *args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    account, server.refusal = BufferAccount(), "refused"
    async with lane_to(server, account=account) as lane:
        await until(lambda: "refused" in lane.why_not)
        assert account.shared == 0


async def test_close_that_is_cancelled_counts_a_retired_region_once(server: Server) -> None:
    account = BufferAccount()
    async with lane_to(server, patience=0.05, account=account) as lane:
        await until(lambda: lane.size)
        part, name = taken(lane), server.own
        await lose(lane, server, SIZE // 2)
        await until(lambda: lane.size == 2 * SIZE)
        closing = asyncio.create_task(lane.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        part.end_call()
        await asyncio.sleep(0.1)
        assert account.shared == 0
        assert name in server.regions


async def test_lane_that_grows_is_closed(server: Server, folder: Path) -> None:
    async with lane_to(server, 2**30) as lane:
        await until(lambda: lane.size)
        name = server.own
        assert lane.take(2**30) is None
        await until(lambda: allocated(lane) != 4 * MIB)
        await asyncio.wait_for(lane.close(), 2)
        assert server.regions == {}
        assert not names(folder)
        await until(lambda: not is_mapped(name))


async def test_region_that_grows_is_replaced(server: Server) -> None:
    account = BufferAccount()
    async with lane_to(server, 256 * MIB, patience=0, account=account) as lane:
        await until(lambda: lane.size)
        before = server.own
        assert lane.take(200 * MIB) is None
        await iterations(2)
        server.regions.clear()
        lane.forget_region(before)
        await until(lambda: lane.size)
        part = await grow(lane, 8 * MIB)
        assert part.region == server.own != before
        part.end_call()
        await until(lambda: not is_mapped(before))
        await until(lambda: account.shared == allocated(lane))


@contextmanager
def small_folder(path: Path) -> Iterator[None]:
    """Have regions in a folder of 64 MiB."""
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", path), check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small folder")


@needs_root
async def test_half_of_a_small_folder_stays_free(
    server: Server, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with small_folder(folder):
        async with lane_to(server, retry_interval=0.01, size=256 * MIB) as lane:
            await until(lambda: lane.size)
            for _ in range(30):
                assert lane.take(40 * MIB) is None
                await asyncio.sleep(0.005)
            assert allocated(lane) == 16 * MIB  # its mark takes some, too
            assert taken(lane, 16 * MIB).size == 16 * MIB
            assert lane.why_not == ""
        told_size = [each for each in caplog.messages if "stays as" in each]
        reason = f"half of {folder}, which has 64 MiB, has to stay free"
        assert told_size == [f"{URL}: shared memory stays as it is: {reason}"]


@needs_root
async def test_region_that_cannot_grow_is_replaced_once_half_of_what_it_has_is_lost(
    server: Server, folder: Path
) -> None:
    with small_folder(folder):
        async with lane_to(server, retry_interval=0.01, patience=0, size=256 * MIB) as lane:
            await until(lambda: lane.size)
            before = server.own
            assert lane.take(40 * MIB) is None
            await until(lambda: allocated(lane) == 16 * MIB)
            await lose(lane, server, 8 * MIB)
            await until(lambda: before not in server.regions and lane.size)
            assert told(lane) == (256 * MIB, 0, 0)


# ------------------------------------------------------------------------------------ close


async def test_closed_lane_leaves_nothing(server: Server, folder: Path) -> None:
    async with registered(server) as lane:
        name = server.own
    assert server.count("unregister") == 1
    assert server.regions == {}
    assert not names(folder)
    assert lane.take(1) is None
    assert (lane.size, lane.used) == (0, 0)
    await lane.close()  # an endpoint that is closed twice
    assert owner_of(name) is not None
    assert server.count("unregister") == 1


async def test_region_in_use_is_left_for_the_next_start(server: Server, folder: Path) -> None:
    async with registered(server) as lane:
        name, part = server.own, taken(lane)
        await lane.close()
        assert list(server.regions) == [name]
        assert server.count("unregister") == 0
        assert names(folder) == [mark_of(name)]
        assert is_dead(owner_of(name) or "")
        part.view[:] = bytes(part.size)
    async with registered(server):
        await until(lambda: name not in server.regions)
        await until(lambda: names(folder) == [mark_of(server.own)])


async def test_region_that_the_server_does_not_unregister_is_left_for_the_next_start(
    server: Server, folder: Path
) -> None:
    async with registered(server):
        name = server.own
        server.refusal = GatewayError(ErrorKind.UNREACHABLE, "cannot connect")
    assert names(folder) == [mark_of(name)]


async def test_close_waits_for_a_response_that_nobody_wants(server: Server) -> None:
    async with registered(server) as lane:
        sent = Response(b"bo")
        (await respond(lane, server, sent)).close()
        closing = asyncio.create_task(lane.close())
        await iterations(5)
        assert server.count("unregister") == 0
        sent.arrive(b"dy", b"")
        await closing
        assert server.regions == {}


async def test_region_of_a_start_that_is_closed_is_unregistered(
    server: Server, folder: Path
) -> None:
    async with lane_to(server) as lane:
        server.responds.clear()
        await until(lambda: server.count("register"))
        closing = asyncio.create_task(lane.close())
        server.responds.set()
        await closing
        assert server.regions == {}
    assert not names(folder)


async def test_region_that_was_being_made_leaves_no_file(server: Server, folder: Path) -> None:
    async with lane_to(server):
        await until(lambda: names(folder))
    await until(lambda: not names(folder))


async def test_close_does_not_wait_long_for_a_server_that_hangs(
    server: Server, folder: Path
) -> None:
    async with registered(server, patience=60, close_timeout=0.2) as lane:
        name, part = server.own, taken(lane)
        future = await abandon(lane, server, part)
        server.responds.clear()
        await asyncio.wait_for(lane.close(), 2)
        assert future.cancelled()
        assert is_dead(owner_of(name) or "")


async def test_unused_region_of_a_server_that_hangs_is_left_for_the_next_start(
    server: Server, folder: Path
) -> None:
    async with registered(server, close_timeout=0.1) as lane:
        name = server.own
        server.responds.clear()
        await asyncio.wait_for(lane.close(), 2)
        assert server.count("unregister") == 1
        assert names(folder) == [mark_of(name)]
        assert is_dead(owner_of(name) or "")


async def test_region_whose_registration_hangs_is_left_for_the_next_start(
    server: Server, folder: Path
) -> None:
    server.responds.clear()
    async with lane_to(server, close_timeout=0.1) as lane:
        await until(lambda: server.count("register"))
        await asyncio.wait_for(lane.close(), 2)
        assert names(folder) == [mark_of(server.own)]
        assert is_dead(owner_of(server.own) or "")


async def test_close_unregisters_free_regions_beside_one_in_use(server: Server) -> None:
    async with registered(server, close_timeout=0.1) as lane:
        before = server.own
        await lose(lane, server, SIZE // 2)
        await until(lambda: lane.size == 2 * SIZE)
        await lane.close()
        assert list(server.regions) == [before]


async def test_close_that_is_cancelled_leaves_nothing(server: Server, folder: Path) -> None:
    async with registered(server) as lane:
        name = server.own
        future = await abandon(lane, server, taken(lane))
        closing = asyncio.create_task(lane.close())
        await iterations(5)
        closing.cancel()
        await asyncio.wait([closing])
        await until(future.cancelled)
        assert is_dead(owner_of(name) or "")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_call_that_is_given_up_beside_a_close_is_ended(server: Server, when: str) -> None:
    async with registered(server, close_timeout=0) as lane:
        part = taken(lane)
        async with call(lane, server, part) as (sending, future):
            if when == "after":
                await lane.close()
            sending.cancel()
            await asyncio.wait([sending])
            await lane.close()
            await until(future.cancelled)


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("how", ["close", "reset", "timeout", "forgotten"])
async def test_region_that_nobody_uses_is_unmapped(server: Server, how: str) -> None:
    async with registered(server, patience=0.01 if how == "reset" else 0) as lane:
        name, part = server.own, taken(lane)
        part.release()
        part.view.release()  # the slice alone keeps the region from the garbage collector
        if how == "close":
            await lane.close()
        elif how in ("reset", "timeout"):
            await lose(lane, server, SIZE)
        else:
            server.regions.clear()
            lane.forget_region(name)
        await until(lambda: not is_mapped(name))
        assert part.region == name


# --------------------------------------------------------------------------- dead owners


async def test_regions_of_dead_owners_are_unregistered_one_by_one(
    server: Server, folder: Path
) -> None:
    dead, living = Owner(URL), Owner(URL)
    dead.close(keeps_regions=True)
    gone = [f"tensorgate-{dead.token}-{number}" for number in (1, 2)]
    kept = [f"tensorgate-{living.token}-1", "other-0123456789abcdef-1", "tensorgate-1", "input"]
    kept.append("tensorgate-0123456789abcdef-1")  # it has no mark here
    server.regions = dict.fromkeys([*gone, *kept])
    async with registered(server):
        await until(lambda: server.count("unregister") == len(gone))
        await until(lambda: server.count("status") == 2)
        (own,) = server.regions.keys() - kept
        await until(lambda: len(names(folder)) == 2)
        assert names(folder) == sorted((mark_of(kept[0]), mark_of(own)))
        assert set(server.regions) == {own, *kept}
        asked = [each for each in server.requests if each.endswith("/unregister")]
        assert asked == [f"POST {REGIONS}/region/{name}/unregister" for name in gone]
    living.close()


@pytest.mark.parametrize("status", [b"[", b"{}", b'{"error":"x"}', b"[1]", b'[{"key":""}]'])
async def test_status_that_is_no_list_of_regions_removes_no_mark(
    server: Server, folder: Path, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.status = status
    dead = Owner(URL)
    dead.close(keeps_regions=True)
    async with registered(server) as lane:
        await until(lambda: "old shared memory stays" in caplog.text)
        assert mark_of(f"tensorgate-{dead.token}-1") in names(folder)
        assert lane.take(1) is not None


async def test_mark_of_a_dead_owner_goes_once_its_server_has_none_of_its_regions(
    server: Server, folder: Path
) -> None:
    Owner(URL).close(keeps_regions=True)
    async with registered(server):
        await until(lambda: names(folder) == [mark_of(server.own)])


TLS = TlsTarget(ssl.create_default_context(), "models.test")
ADDRESSES = {
    "address": TcpAddress("127.0.0.1", 0),
    "resolved": TcpAddress("models.test", 0, address="127.0.0.1"),
    "gRPC over TLS": TcpAddress("localhost", 0, TLS, scheme="grpc"),
}


@pytest.mark.parametrize("address", ADDRESSES.values(), ids=ADDRESSES)
async def test_mark_of_a_dead_owner_goes_once_nobody_listens_at_its_server(
    server: Server, folder: Path, address: TcpAddress
) -> None:
    async with ScriptedServer() as living, ScriptedServer() as gone:
        ports = [int(each.url.rpartition(":")[2]) for each in (living, gone)]
        urls = [replace(address, port=port).url for port in ports]
        urls += [TcpAddress("localhost", 1, address="192.0.2.1").url, "unix:/x"]
        owners = [Owner(each) for each in urls]
        for each in owners:
            each.close(keeps_regions=True)
        kept = [f"tensorgate-{each.token}.owner" for each in owners if each is not owners[1]]
        await gone.__aexit__(None, None, None)
        async with registered(server):
            await until(lambda: names(folder) == sorted([*kept, mark_of(server.own)]))


async def test_mark_of_an_owner_that_is_killed_after_the_server_was_asked_stays(
    server: Server, folder: Path
) -> None:
    other = Owner(URL)
    server.regions = {f"tensorgate-{other.token}-1": None}
    server.responds.clear()
    async with lane_to(server):
        await until(lambda: server.count("register"))
        server.responds.set()
        await until(lambda: server.count("status"))
        other.close(keeps_regions=True)
        await until(lambda: server.count("status") == 2)
        await iterations(20)
        assert f"tensorgate-{other.token}.owner" in names(folder)


class _WaitingConnection(ReservedConnection):
    is_waiting = True

    def __init__(self) -> None:
        self.is_closed = False

    def send(self, *_: object) -> None:
        """Wait for a connection."""

    def close(self) -> None:
        self.is_closed = True


async def test_request_that_waits_for_a_connection_is_not_sent_for_its_slices(
    server: Server,
) -> None:
    async with registered(server) as lane:
        part, connection = taken(lane), _WaitingConnection()
        exchange = lane.reserve(connection, [part])
        exchange.send(RequestTemplate("POST", "/", ()), b"", (), ResponseFuture())
        exchange.close()
        assert connection.is_closed
        part.end_call()
        assert told(lane) == (SIZE, 0, 0)
