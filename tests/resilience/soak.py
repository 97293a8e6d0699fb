"""Keeps a gateway under mixed traffic for minutes, and checks that nothing grows.

    python -m tests.resilience.soak --minutes 10

Careful clients check each response, over HTTP and over gRPC, from servers over HTTP and over gRPC.
Others send every form and leave at a random stage; gRPC clients cancel calls and miss deadlines;
hostile clients send what the fuzz tests of HTTP/2 send, and break connections. Servers are killed,
stopped and told to fail, and settings are reloaded all the while. In two quiet moments,
after a warm-up and at the end, nothing may be left of the clients, the next one is served, and
memory, descriptors, tasks and processes are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.fuzz.http2.hostile_clients import hostile_client
from tests.resilience.fleet import FleetServer, fleet
from tests.resilience.grpc_load import GrpcLoad, grpc_load_on
from tests.resilience.hostile_traffic import uploads
from tests.resilience.load import MIXED, Kind, Load, load_on
from tests.resilience.server import Behaviour
from tests.support.addresses import HOST, free_port
from tests.support.checks.nothing_left_in_process import (
    check_log,
    fetch_status,
    until_nothing_is_left,
)
from tests.support.gateway_process import TIMEOUT, Process, gateway_process
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect

MIB = 2**20
GROWTH = 32 * MIB
"""Bytes by which resident memory may differ between two quiet moments."""
MORE_DESCRIPTORS = 2
"""Descriptors that the gateway opens on first use."""
WARM_UP = 0.25
"""The share of the time after which the first quiet moment comes."""
QUIET = 25.0
"""Seconds of a quiet moment: memory that is free goes back every ten."""
LEAVING = 10
"""The number of disconnecting clients."""
HOSTILE = 2
"""The number of hostile clients."""

MODELS = ("echo", "echo_grpc")
"""That of servers over HTTP, and that of servers over gRPC."""

_INFER = "/v2/models/echo/infer"
_INNOCENT = b'{"inputs":[{"name":"N","datatype":"INT32","shape":[1],"data":[1]}]}'
_SIZE = 3_000_000
"""Bytes of a large request."""
_LEFT = (ConnectionError, asyncio.IncompleteReadError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a gateway takes in a quiet moment, with its children: sizes in bytes."""

    memory: int
    descriptors: int
    processes: int
    tasks: int


def _forms() -> dict[str, bytes]:
    """Write a request of each form."""
    forms = uploads(_SIZE, model=MODELS[0], name="N")
    broken = forms["floats"].replace(b"0.12345]", b"}" * 8)
    header = request("POST", _INFER, b'{"id":"' + b"a" * 900_000 + b'"}')
    return forms | {"broken": broken, "header": header, "GET": request("GET", "/v2/models/echo")}


class _DisconnectingClient:
    """A client that sends any form, and leaves at a random stage, or stays to the end."""

    def __init__(self, url: str, forms: dict[str, bytes]) -> None:
        self._url = url
        self._forms = forms
        self.calls = 0

    async def run(self) -> None:
        """Call again and again, until cancelled."""
        while True:
            with suppress(*_LEFT):
                async with asyncio.timeout(20), connect(self._url) as client:
                    await self._call(client)
            self.calls += 1
            await asyncio.sleep(random.random() * 0.2)

    async def _call(self, client: RawClient) -> None:
        data = random.choice(list(self._forms.values()))
        if random.random() < 0.5:
            await client.send(data[: random.randrange(len(data))])
        else:
            await client.send(data)
            if random.random() < 0.5:
                await client.reader.read(random.randrange(1, 300_000))
            else:
                await client.read_response()
        await asyncio.sleep(random.random() * 0.3)
        if random.random() < 0.5:
            client.reset()


async def _attack(url: str) -> None:
    """Connect, send what hostile clients of HTTP/2 send, and leave; again and again."""
    while True:
        with suppress(*_LEFT):
            hostile = hostile_client(random.Random())
            async with asyncio.timeout(20), connect(url) as client:
                await client.send(*hostile.pieces)
                if hostile.reads:
                    await client.reader.read(2**16)
                if hostile.resets:
                    client.reset()
        await asyncio.sleep(0.1)


async def _inject_failures(servers: Sequence[FleetServer], calm: asyncio.Lock) -> None:
    """Let servers fail one after the other, in every way, but when it is calm."""

    async def die(server: FleetServer) -> None:
        await server.kill()
        await asyncio.sleep(2)
        await server.start()

    async def freeze(server: FleetServer) -> None:
        server.stop()
        await asyncio.sleep(2)
        server.resume()

    def behaving(behaviour: Behaviour) -> Callable[[FleetServer], Awaitable[None]]:
        async def behave(server: FleetServer) -> None:
            await server.behave(behaviour)
            await asyncio.sleep(2)
            await server.behave(Behaviour())

        return behave

    ways = [
        die,
        freeze,
        behaving(Behaviour(unavailable=True)),
        behaving(Behaviour(delay=0.5)),
        behaving(Behaviour(cut=True)),
        behaving(Behaviour(keep_alive=0.01)),
        behaving(Behaviour(closes_unanswered=True)),
    ]
    while True:
        server = random.choice(servers)
        async with calm:
            await random.choice(ways[:2] if server.over_grpc else ways)(server)
        await asyncio.sleep(1)


async def _reload(process: Process, file: Path) -> None:
    """Have the gateway take other settings every few seconds."""
    text = await asyncio.to_thread(file.read_text)
    while True:
        for idle in ("20s", "21s"):
            await asyncio.sleep(5)
            limits = f"limits: {{max_buffered_bytes: 256MiB, idle_timeout: {idle}}}\n"
            await asyncio.to_thread(file.write_text, text + limits)
            process.signal(signal.SIGHUP)


async def _read_log(process: Process) -> None:
    """Read the log of the gateway, so that its pipe never fills up."""
    assert process.process.stderr is not None
    while line := await process.process.stderr.readline():
        process.said += line.decode()


async def _sample(process: Process, admin: str) -> Sample:
    """Count what the gateway takes now."""
    pids = _family(process.pid)
    status = await fetch_status(admin)
    return Sample(
        sum(_resident(pid) for pid in pids),
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        len(pids),
        status["tasks"],
    )


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _family(int(child)))]


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Traffic:
    """All clients that check what they get; those over gRPC call servers of both kinds."""

    http: Load
    to_grpc_servers: Load
    grpc: GrpcLoad

    @property
    def wrong(self) -> int:
        """Return the number of responses that are not those to their requests."""
        loads = (self.http, self.to_grpc_servers)
        return sum(load.counts.wrong for load in loads) + self.grpc.counts["wrong"]

    async def end(self) -> None:
        """Let each client finish its call."""
        for load in (self.http, self.to_grpc_servers, self.grpc):
            await load.end()


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run it in a task, and end that task."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


@asynccontextmanager
async def _traffic(
    url: str, disconnecting: Sequence[_DisconnectingClient]
) -> AsyncIterator[_Traffic]:
    """Have all clients at work; inside, some leave, and others check what they get."""
    over_http, over_grpc = MODELS
    some = (Kind.SMALL, Kind.SMALL, Kind.LARGE, Kind.CHUNKED, Kind.FRESH)
    async with (
        load_on(url, MIXED, pause=0.01, model=over_http) as http,
        load_on(url, some, pause=0.01, model=over_grpc) as to_grpc_servers,
        grpc_load_on(url, MODELS, pause=0.01) as grpc,
        asyncio.TaskGroup() as group,
    ):
        traffic = _Traffic(http, to_grpc_servers, grpc)
        tasks = [group.create_task(leaver.run()) for leaver in disconnecting]
        tasks += [group.create_task(_attack(url)) for _ in range(HOSTILE)]
        yield traffic
        for task in tasks:
            task.cancel()
        await traffic.end()


def _settings(servers: Sequence[FleetServer]) -> str:
    """Write upstreams: servers over HTTP, and for one model those over gRPC."""
    urls = {
        over_grpc: ", ".join(each.url for each in servers if each.over_grpc is over_grpc)
        for over_grpc in (False, True)
    }
    return (
        "log: {access: false}\n"
        "upstreams:\n"
        f"  fleet: {{endpoints: [{urls[False]}], dialect: triton}}\n"
        f"  grpc_fleet: {{endpoints: [{urls[True]}], dialect: triton}}\n"
        "routes:\n"
        f"  - {{match: {{model: {MODELS[1]}}}, upstream: grpc_fleet}}\n"
        "  - upstream: fleet\n"
    )


async def soak(minutes: float, folder: Path) -> list[str]:
    """Run it all; print what is seen, and give what is wrong."""
    port, admin = free_port(), free_port()
    file = folder / "gateway.yaml"
    async with fleet() as http_servers, fleet(2, over_grpc=True) as grpc_servers:
        servers = [*http_servers, *grpc_servers]
        file.write_text(f"listen: {HOST}:{port}\nadmin: {HOST}:{admin}\n{_settings(servers)}")
        calm = asyncio.Lock()
        async with (
            gateway_process(str(file)) as (process, url),
            _running(_read_log(process)) as reading,
            _running(_inject_failures(servers, calm)) as disturbing,
            _running(_reload(process, file)) as reloading,
        ):
            disconnecting = [_DisconnectingClient(url, _forms()) for _ in range(LEAVING)]
            samples, wrong = [], 0
            for share in (WARM_UP, 1 - WARM_UP):
                end = time.monotonic() + 60 * minutes * share
                async with _traffic(url, disconnecting) as traffic:
                    while time.monotonic() < end:
                        await asyncio.sleep(min(10, 60 * minutes * share))
                        now = await _sample(process, f"http://{HOST}:{admin}")
                        print(_line(now, traffic, disconnecting), flush=True)
                # grpcio keeps a cancelled stream, and with it the channel's connection, in a cycle.
                gc.collect()
                wrong += traffic.wrong
                print("gRPC:", dict(traffic.grpc.counts), flush=True)
                async with calm:
                    await _check_quiet(process, url, f"http://{HOST}:{admin}")
                    await asyncio.sleep(QUIET)
                samples.append(await _sample(process, f"http://{HOST}:{admin}"))
                print("quiet:", _line(samples[-1], traffic, disconnecting), flush=True)
            for task in (disturbing, reloading):
                task.cancel()
            await asyncio.wait((disturbing, reloading))
            process.signal(signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT):
                await reading
                status = await process.process.wait()
    return _find_problems(samples, wrong, status)


def _line(sample: Sample, traffic: _Traffic, disconnecting: Sequence[_DisconnectingClient]) -> str:
    counts = ", ".join(f"{each.name} {getattr(sample, each.name):,}" for each in fields(sample))
    calls = sum(leaver.calls for leaver in disconnecting)
    http, to_grpc_servers = traffic.http.counts.ok, traffic.to_grpc_servers.counts.ok
    return (
        f"{counts}; good responses: {http:,} over HTTP, {to_grpc_servers:,} from gRPC servers, "
        f"{traffic.grpc.ok:,} over gRPC; {calls:,} calls left"
    )


async def _check_quiet(process: Process, url: str, admin: str) -> None:
    """Fail if anything is left of the clients, or the next ones are not served."""
    await until_nothing_is_left(admin)
    for model in MODELS:
        async with connect(url) as client:
            response = await client.ask(request("POST", f"/v2/models/{model}/infer", _INNOCENT))
        assert response.status == 200, response
    check_log(process.said)


def _find_problems(samples: Sequence[Sample], wrong: int, status: int) -> list[str]:
    """Return what is wrong between two quiet moments."""
    first, last = samples
    found = []
    growth = last.memory - first.memory
    if growth > GROWTH:
        found.append(f"memory grew by {growth / MIB:.0f} MiB")
    for name, slack in (("descriptors", MORE_DESCRIPTORS), ("processes", 0), ("tasks", 0)):
        before, after = getattr(first, name), getattr(last, name)
        if after > before + slack:
            found.append(f"{name} grew from {before} to {after}")
    if wrong:
        found.append(f"{wrong} responses were wrong")
    if status:
        found.append(f"the gateway ended with status {status}")
    return found


def main() -> None:
    """Run from the command line; the status is 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(soak(minutes, Path(folder)))
    print("\n".join(found) or "nothing grew")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
