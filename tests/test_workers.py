"""A gateway of several processes, as its user runs it: start, drain, death and replacement."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.resilience.fleet import fleet
from tests.resilience.grpc_load import GrpcLoad, grpc_load_on
from tests.support.addresses import HOST, free_address
from tests.support.gateway import until
from tests.support.gateway_process import TIMEOUT, Process, gateway_process, write_settings
from tests.support.http_messages import request
from tests.support.operator import Operator
from tests.support.raw_client import RawClient, connect
from tests.support.servers.gated_response import GatedResponse
from tests.support.servers.scripted_server import ScriptedServer, never_respond


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a settings file, not written yet."""
    return tmp_path / "gateway.yaml"


@asynccontextmanager
async def _gateway(
    file: Path, server: str, workers: int = 2, listen: str = f"{HOST}:0", more: str = ""
) -> AsyncIterator[tuple[Process, str]]:
    config = write_settings(file, server, listen, f"workers: {workers}\n{more}")
    async with gateway_process(config) as running:
        yield running


def _is_gone(pid: int) -> bool:
    """Tell whether a process has ended, as in proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "XZ"
    except (FileNotFoundError, ProcessLookupError):
        return True


class _Connections:
    """Counts the connections that workers have got since then, as long as none has a call."""

    def __init__(self, *workers: int) -> None:
        self._before = {pid: _count_sockets(pid) for pid in workers}

    async def until(self, *counts: int) -> None:
        """Wait until the workers have got so many connections each."""
        await until(lambda: self.counts == list(counts))

    @property
    def counts(self) -> list[int]:
        return [_count_sockets(pid) - before for pid, before in self._before.items()]


def _count_sockets(pid: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(descriptor).startswith("socket:")
    return count


async def _until_gone(pids: list[int]) -> None:
    await until(lambda: all(map(_is_gone, pids)), TIMEOUT)


async def _busy(stack: AsyncExitStack, url: str, server: ScriptedServer) -> list[RawClient]:
    """Open four connections, with a running call on each."""
    clients = [await stack.enter_async_context(connect(url)) for _ in range(4)]
    for client in clients:
        await client.send(request("GET", "/v2/x"))
    await server.connection(3)
    return clients


async def _outcome(client: RawClient) -> int:
    """Return the status of the response, or 0 if there is none."""
    try:
        return (await client.read_response()).status
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0


async def test_connections_are_spread_evenly(file: Path) -> None:
    async with ScriptedServer() as server, _gateway(file, server.url, 3) as (process, url):
        workers = process.children
        assert len(workers) == 3
        connections = _Connections(*workers)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(url)) for _ in range(9)]
            await connections.until(3, 3, 3)
            for number, client in enumerate(clients):
                for _ in range(2):
                    assert (await client.call("GET", f"/v2/{number}")).status == 200
        process.signal(signal.SIGTERM)
        status, out, err = await process.end()
    assert (status, out) == (0, "")
    assert sorted(re.findall(r'"GET /v2/(\d)" 200', err)) == sorted("012345678" * 2)
    for line in ("listening on", "stopping", "stopped"):
        assert err.count(line) == 1


async def test_connections_that_a_dead_worker_has_not_received_go_to_another(file: Path) -> None:
    async with ScriptedServer() as server, _gateway(file, server.url) as (process, url):
        victim = process.children[0]
        os.kill(victim, signal.SIGSTOP)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(url)) for _ in range(4)]
            for client in clients:
                await client.send(request("GET", "/v2/x"))
            await server.connection()  # by then the parent has accepted some
            os.kill(victim, signal.SIGKILL)
            assert [await _outcome(client) for client in clients] == [200] * 4
        process.signal(signal.SIGTERM)
        status, _, err = await process.end()
    assert status == 0
    assert f"worker {victim} was killed by SIGKILL" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_signal_drains_every_worker(file: Path, number: int) -> None:
    gated = GatedResponse()
    grace = "limits: {drain_grace: 100ms}\n"
    async with (
        ScriptedServer(gated) as server,
        _gateway(file, server.url, more=grace) as (process, url),
    ):
        async with AsyncExitStack() as stack:
            clients = await _busy(stack, url, server)
            idle = [await stack.enter_async_context(connect(url)) for _ in range(2)]
            workers = process.children
            process.signal(number)
            await process.wait_for_output("stopping")
            with pytest.raises(ConnectionRefusedError):
                async with connect(url):
                    pass
            assert [await client.rest() for client in idle] == [b"", b""]
            assert sorted(process.children) == sorted(workers)
            process.signal(number)  # once more is no reason for haste
            gated.may_respond.set()
            assert [await _outcome(client) for client in clients] == [200] * 4
        status, out, err = await process.end()
    assert (status, out) == (0, "")
    assert err.splitlines()[-1].endswith(": stopped")
    assert err.count("stopping") == 1
    for word in ("aborted", "worker ", "Traceback"):
        assert word not in err
    await _until_gone(workers)


@pytest.mark.parametrize("to_all", [False, True], ids=["to the parent", "to all"])
async def test_clients_in_the_accept_queue_are_served_before_the_end(
    file: Path, to_all: bool
) -> None:
    async with ScriptedServer() as server, _gateway(file, server.url) as (process, url):
        workers = process.children
        process.signal(signal.SIGSTOP)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(url)) for _ in range(20)]
            for client in clients:
                await client.send(request("GET", "/v2/x"))
            for pid in workers if to_all else ():
                os.kill(pid, signal.SIGTERM)
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
            replies = [await client.read_response() for client in clients]
        assert [reply.status for reply in replies] == [200] * 20
        assert (await process.end())[0] == 0


async def test_workers_drain_if_the_supervisor_is_killed(file: Path) -> None:
    gated = GatedResponse()
    async with ScriptedServer(gated) as server, _gateway(file, server.url) as (process, url):
        async with AsyncExitStack() as stack:
            clients = await _busy(stack, url, server)
            workers = process.children
            assert len(workers) == 2
            process.signal(signal.SIGKILL)
            await process.wait_for_output("the supervisor has died")
            gated.may_respond.set()
            assert [await _outcome(client) for client in clients] == [200] * 4
            await _until_gone(workers)
            with pytest.raises(ConnectionRefusedError):
                async with connect(url):
                    pass
        assert (await process.end())[0] == -signal.SIGKILL


DRAINING = "not ready: draining"


async def _poll(admin: str) -> None:
    """Read every page over a new connection each, as monitoring does, while the gateway drains."""
    await _ready(admin)
    async with connect(f"http://{admin}") as client:
        assert (await client.call("GET", "/live")).status == 200
    async with connect(f"http://{admin}") as client:
        assert (await client.call("GET", "/status")).json["draining"] is True
    async with connect(f"http://{admin}") as client:
        assert b"\ntensorgate_draining 1.0\n" in (await client.call("GET", "/metrics")).body


async def _poll_until_refused(admin: str) -> None:
    """Poll until nobody listens any more: whoever could connect is answered."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                await _ready(admin)
            except ConnectionRefusedError:
                return


async def _ready(admin: str) -> None:
    async with connect(f"http://{admin}") as client:
        reply = await client.call("GET", "/ready")
        assert (reply.status, reply.error) == (503, DRAINING)


@pytest.mark.parametrize(
    ("workers", "to_all"),
    [(1, False), (2, False), (2, True)],
    ids=["alone", "to the parent", "to all"],
)
async def test_admin_address_says_draining_until_the_last_worker_exits(
    tmp_path: Path, workers: int, to_all: bool
) -> None:
    admin = free_address()
    more = f"admin: {admin}\nworkers: {workers}\nlimits: {{drain_grace: 50ms}}\n"
    slow = GatedResponse()
    async with ScriptedServer(slow) as server:
        config = write_settings(tmp_path / "gateway.yaml", server.url, more=more)
        async with gateway_process(config) as (process, url), connect(url) as client:
            await client.send(request("GET", "/v2/x"))
            await server.connection()
            for pid in (process.pid, *process.children) if to_all else [process.pid]:
                os.kill(pid, signal.SIGTERM)
            await process.wait_for_output("stopping")
            if workers > 1:  # the one without a call ends; the admin process goes on
                await until(lambda: len(process.children) == 2, TIMEOUT)
            for _ in range(10):
                await _poll(admin)
            polls = asyncio.create_task(_poll_until_refused(admin))
            slow.may_respond.set()
            assert (await client.read_response()).status == 200
            await polls
            status, _, err = await process.end()
    assert status == 0
    assert err.splitlines()[-1].endswith(": stopped")
    for word in ("were aborted", "killed", "ERROR", "Traceback"):
        assert word not in err


MODEL = "echo"
PATIENCE = 20.0
RELOADS = 4
MORE = "workers: 2\nlog: {access: false}\n"
GOOD = {"ok", "cancelled", "stream: left", "DEADLINE_EXCEEDED", "broken"}
"""How calls may end: what clients do on purpose is counted, too."""


@pytest.mark.parametrize("workers", [1, 2])
async def test_calls_that_outlast_the_drain_are_counted_in_the_log(
    file: Path, workers: int
) -> None:
    more = "limits: {drain_grace: 50ms, drain_timeout: 300ms}\n"
    async with (
        ScriptedServer(never_respond) as server,
        _gateway(file, server.url, workers, more=more) as (process, url),
        connect(url) as client,
    ):
        await client.send(request("GET", "/v2/x"))
        await server.connection()
        process.signal(signal.SIGTERM)
        status, _, err = await process.end()
    assert status == 0
    assert "1 calls did not finish in time and were aborted (limits.drain_timeout)" in err


async def _until_more(load: GrpcLoad, count: int = 60) -> None:
    """Wait until so many more calls have ended well."""
    enough = load.ok + count
    await until(lambda: load.ok >= enough, PATIENCE)


async def _end(process: Process, load: GrpcLoad) -> None:
    await load.end()
    assert set(load.counts) <= GOOD, load.counts
    process.signal(signal.SIGTERM)
    status, _, err = await process.end()
    assert status == 0, err
    assert "ERROR" not in err


async def test_worker_that_gets_sigterm_loses_no_call(tmp_path: Path) -> None:
    """GOAWAY sends its clients to the other worker, and to the one that replaces it."""
    admin = free_address()
    async with fleet(1, over_grpc=True) as (server,):
        more = f"admin: {admin}\n{MORE}"
        config = write_settings(tmp_path / "gateway.yaml", server.url, more=more)
        async with gateway_process(config) as (process, url), grpc_load_on(url, (MODEL,)) as load:
            await process.wait_for_output(r"listening on http://\S+ \(admin\)")
            for _ in range(3):
                await _until_more(load)
                leaving = await Operator(admin).worker()
                os.kill(leaving, signal.SIGTERM)
                await process.wait_for_output(f"worker {leaving} ended with status 0")
                process.said = ""
                await process.wait_for_output(r"worker \d+ is up")
            await _until_more(load)
            await _end(process, load)


async def test_reloads_lose_no_call_and_end_no_stream(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    async with fleet(2, over_grpc=True) as servers:
        config = write_settings(file, servers[0].url, more=MORE)
        async with (
            gateway_process(config) as (process, url),
            grpc_load_on(url, (MODEL,)) as load,
            grpc.aio.insecure_channel(url.removeprefix("http://")) as channel,
        ):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stream = stub.ModelStreamInfer(timeout=3 * PATIENCE)
            for number in range(1, RELOADS + 1):
                await _until_more(load)
                url = servers[number % 2].url
                await asyncio.to_thread(write_settings, file, url, more=MORE)
                process.said = ""
                process.signal(signal.SIGHUP)
                await process.wait_for_output("settings reloaded from")
                request = service_pb2.ModelInferRequest(model_name=MODEL, id=str(number))
                await stream.write(request)
                assert (await stream.read()).infer_response.id == str(number)
            await _until_more(load)
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK
            await _end(process, load)
