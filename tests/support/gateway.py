"""Runs a gateway in the test process, and checks that it leaks nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from inspect import isawaitable
from typing import Any

import pytest

from gateway.app.gateway import Gateway
from gateway.app.loaded_resources import load_resources
from gateway.app.shared_memory import SharedMemory
from gateway.app.standalone import StandaloneGateway
from gateway.listener.connection import ClientConnection
from gateway.listener.server import HttpListener
from gateway.settings.limits import Concurrency
from gateway.settings.schema import Settings
from gateway.upstream.pool.pool import Pool
from tests.support.addresses import HOST
from tests.support.checks.nothing_left import Remains, nothing_left
from tests.support.gateway_process import sockets_of_fork_server
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import Script, ScriptedServer

# The tests' own patience is 5 s: where a gateway that waits would wait longer, it hangs.
LIMITS = {"idle_timeout": 30, "request_timeout": 60, "drain_timeout": 0.2, "connect_timeout": 5}


def split_limits(limits: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections ``concurrency`` and ``limits`` for settings of both."""
    concurrency = {name: limits[name] for name in Concurrency.model_fields if name in limits}
    others = {name: value for name, value in limits.items() if name not in concurrency}
    return {"concurrency": concurrency, "limits": {**LIMITS, **others}}


class RunningGateway:
    """A running gateway, with access to its internals."""

    def __init__(self, gateway: StandaloneGateway, remains: Remains) -> None:
        self.gateway = gateway
        self.remains = remains
        self.url = next(iter(gateway.addresses), "")

    @property
    def outstanding(self) -> int:
        """Return the number of calls that hold an endpoint."""
        pools = [upstream.pool for upstream in self.gateway.active_config.upstreams.values()]
        return sum(sum(pool.outstanding) for pool in pools)

    @property
    def pool(self) -> Pool:
        """Return the endpoints of the one upstream."""
        (upstream,) = self.gateway.active_config.upstreams.values()
        return upstream.pool

    def client(self) -> AbstractAsyncContextManager[RawClient]:
        """Open a connection to it."""
        return connect(self.url)

    async def until_idle(self) -> None:
        """Wait until no call is running."""
        await until(lambda: not self.outstanding and not self.gateway.listener._active_calls)


def http1_connections(listener: HttpListener) -> list[ClientConnection]:
    """Return the connections of a listener, all of which must speak HTTP/1.1."""
    connections = []
    for connection in listener._connections:
        assert isinstance(connection, ClientConnection)
        connections.append(connection)
    return connections


@asynccontextmanager
async def checked_gateway(settings: Settings, unchecked: str = "") -> AsyncIterator[RunningGateway]:
    """Run a gateway; at the end it must hold nothing of its peers: see ``nothing_left``."""
    gateway = StandaloneGateway(settings)
    async with nothing_left(gateway, unchecked) as remains:
        yield RunningGateway(gateway, remains)


@asynccontextmanager
async def gateway_of(settings: Settings, unchecked: str = "") -> AsyncIterator[StandaloneGateway]:
    """Run a ``checked_gateway`` for tests that need no more than the gateway itself."""
    async with checked_gateway(settings, unchecked) as running:
        yield running.gateway


@asynccontextmanager
async def worker_of(
    settings: Settings,
    shared: SharedMemory | None = None,
    on_closed: Callable[[], None] = lambda: None,
    slot: int = 0,
) -> AsyncIterator[Gateway]:
    """Run the gateway of a worker, which is given its connections: see ``nothing_left``."""
    shared = shared or SharedMemory()
    gateway = Gateway(load_resources(settings), shared, slot, on_closed)
    async with nothing_left(gateway):
        yield gateway


@asynccontextmanager
async def worker_client(worker: Gateway) -> AsyncIterator[RawClient]:
    """Open a connection to a worker."""
    with socket.create_server((HOST, 0)) as listening:
        async with connect(f"http://{HOST}:{listening.getsockname()[1]}") as client:
            worker.take(listening.accept()[0])
            yield client


UPSTREAM = "upstream 'servers'"
"""How errors name the upstream of these gateways to clients."""


@asynccontextmanager
async def running_gateway(
    *urls: str,
    route: dict[str, Any] | None = None,
    upstream: dict[str, Any] | None = None,
    offload: int | str = 0,
    tls: dict[str, str] | None = None,
    models: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
    general: dict[str, Any] | None = None,
    unchecked: str = "",
    **limits: object,
) -> AsyncIterator[RunningGateway]:
    """Run a gateway in front of servers; further arguments are settings.

    It is a ``checked_gateway``, unless it is ``unchecked`` for the given reason.
    ``others`` are further upstreams, ``general`` are settings without a section, ``limits`` are
    settings of the sections limits and concurrency. ``urls`` are taken for Tritons, so that they
    are asked nothing but what clients ask, and for such that survive cancellations.
    """
    servers = {"endpoints": list(urls), "dialect": "triton", "grpc_cancellation": "forward"}
    settings = Settings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "tls": tls,
            "offload": offload,
            "upstreams": {
                "servers": {**servers, **(upstream or {})},
                **(others or {}),
            },
            "routes": [{"upstream": "servers", **(route or {})}],
            "models": models or {},
            **(general or {}),
            **split_limits(limits),
        }
    )
    async with checked_gateway(settings, unchecked) as gateway:
        yield gateway


@asynccontextmanager
async def gateway_client(*urls: str, **settings: Any) -> AsyncIterator[RawClient]:
    """Run a gateway in front of servers, and return a connection to it."""
    async with running_gateway(*urls, **settings) as gateway, gateway.client() as client:
        yield client


@asynccontextmanager
async def gateway_before(
    *scripts: Script, **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, RunningGateway]]:
    """Run a gateway in front of a server with these scripts; the settings are its own."""
    async with (
        ScriptedServer(*scripts) as server,
        running_gateway(server.url, **settings) as gateway,
    ):
        yield server, gateway


@asynccontextmanager
async def served(
    *scripts: Script, **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, RunningGateway, RawClient]]:
    """Run a server with these scripts, a ``running_gateway`` before it, and a client of that."""
    async with (
        gateway_before(*scripts, **settings) as (server, gateway),
        gateway.client() as client,
    ):
        yield server, gateway, client


async def until(condition: Callable[[], object], patience: float = 5.0) -> None:
    """Wait until a condition holds, which may be awaitable; fails after ``patience`` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while not (await found if isawaitable(found := condition()) else found):
        assert loop.time() < end, "the condition never held"
        await asyncio.sleep(0.005)


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed the directory
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count - sockets_of_fork_server()


@asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """Check that the code inside leaves no task and no socket behind."""
    tasks, sockets = asyncio.all_tasks(), _sockets()
    yield
    own = asyncio.current_task()
    await until(lambda: asyncio.all_tasks() - {own} <= tasks)
    gc.collect(0)
    await until(lambda: _sockets() <= sockets)


@contextmanager
def no_errors_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that neither the gateway nor aiohttp nor asyncio logged an error."""
    yield
    records = [*caplog.get_records("setup"), *caplog.get_records("call")]
    errors = [record.getMessage() for record in records if record.levelno >= logging.ERROR]
    assert not errors
