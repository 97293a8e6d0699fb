"""Server processes that a test can kill, stop and restart, with a gateway before them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.resilience.server import Behaviour
from tests.support.addresses import HOST, free_port
from tests.support.gateway_process import TIMEOUT, Process, gateway_process
from tests.support.raw_client import connect


class FleetServer:
    """One server of a fleet: a process at a port that it keeps for life.

    One ``over_grpc`` cannot be told how to behave.
    """

    def __init__(self, port: int, *, over_grpc: bool = False) -> None:
        self.name = str(port)
        self.over_grpc = over_grpc
        self.url = f"{'grpc' if over_grpc else 'http'}://{HOST}:{port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, for the first time or again, and wait until it listens."""
        module = "tests.resilience.grpc_server" if self.over_grpc else "tests.resilience.server"
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, HOST, self.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT):
            assert await self._process.stdout.readline() == b"ready\n"

    async def kill(self) -> None:
        """Kill it, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            await self._process.communicate()
            self._process = None

    def stop(self) -> None:
        """Stop the process by SIGSTOP; its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process by SIGCONT."""
        self._signal(signal.SIGCONT)

    async def behave(self, behaviour: Behaviour) -> None:
        """Set the behaviour from now on."""
        async with connect(self.url) as client:
            assert (await client.call("PUT", "/behave", behaviour.text)).status == 200

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@asynccontextmanager
async def fleet(size: int = 3, *, over_grpc: bool = False) -> AsyncIterator[list[FleetServer]]:
    """Run so many servers."""
    async with AsyncExitStack() as stack:
        servers = [FleetServer(free_port(), over_grpc=over_grpc) for _ in range(size)]
        for server in servers:
            stack.push_async_callback(server.kill)
        await asyncio.gather(*(server.start() for server in servers))
        yield servers


def running_gateway(
    file: Path,
    servers: Sequence[FleetServer],
    more: str = "",
    upstream: str = "",
) -> AbstractAsyncContextManager[tuple[Process, str]]:
    """Run a gateway in front of servers, with its settings in ``file``.

    ``more`` is added to the settings, ``upstream`` to the settings of the upstream.
    """
    urls = ", ".join(server.url for server in servers)
    file.write_text(
        f"listen: {HOST}:0\n"
        # Nobody reads the log while clients run, so it must not fill the pipe.
        "log: {access: false}\n"
        f"upstreams: {{fleet: {{endpoints: [{urls}], dialect: triton, {upstream}}}}}\n{more}"
    )
    return gateway_process(str(file))
