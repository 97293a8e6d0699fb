"""Any worker shows the calls of all workers, those of killed ones included."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.addresses import free_address
from tests.support.gateway_process import (
    FAST_FILE_WATCH,
    Process,
    gateway_process,
    write_settings,
)
from tests.support.http_messages import http_response, request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

CALL = request("GET", "/v2/models/m/ready")
CONNECTIONS, CALLS = 8, 5


class _Operator:
    """Reads the pages of the admin address, each time over a new connection."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    async def counted(self) -> dict[str, float]:
        """Return the number of calls by model."""
        async with connect(self._url) as client:
            text = (await client.call("GET", "/metrics")).body.decode()
        return {
            sample.labels["model"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "tensorgate_requests_total" and sample.labels["status"] == "2xx"
        }

    async def until_counted(self, calls: int) -> None:
        """Wait until each of several scrapes, which meet any worker, shows that many calls."""
        async with asyncio.timeout(10):
            while sum((await self.counted()).values()) != calls:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)
        for _ in range(6):
            assert sum((await self.counted()).values()) == calls

    async def worker(self) -> int:
        """Return the process id of a worker."""
        async with connect(self._url) as client:
            pid: int = (await client.call("GET", "/status")).json["pid"]
        return pid


@asynccontextmanager
async def _clients(url: str) -> AsyncIterator[list[RawClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connect(url)) for _ in range(CONNECTIONS)]


async def _call_all(url: str) -> None:
    """Call over several connections, which go to all workers."""
    async with _clients(url) as clients:
        for _ in range(CALLS):
            for client in clients:
                assert (await client.ask(CALL)).status == 200


async def _until_replaced(process: Process, victim: int) -> None:
    await process.wait_for_output(f"worker {victim} was killed by SIGKILL")
    await process.wait_for_output(r"worker \d+ is up")


async def test_counts_are_those_of_all_workers(tmp_path: Path) -> None:
    """They survive a killed worker, and a reload."""
    admin, file = free_address(), tmp_path / "gateway.yaml"
    async with ScriptedServer(always_respond(http_response())) as server:
        config = write_settings(file, server.url, more=f"admin: {admin}\nworkers: 2\n")
        async with gateway_process(config, FAST_FILE_WATCH) as (process, url):
            await process.wait_for_output(r"listening on http://\S+ \(admin\)")
            operator = _Operator(admin)
            once = CONNECTIONS * CALLS
            await _call_all(url)
            await operator.until_counted(once)
            victim = await operator.worker()
            os.kill(victim, signal.SIGKILL)
            await _until_replaced(process, victim)
            await operator.until_counted(once)
            await _call_all(url)
            await operator.until_counted(2 * once)
            file.write_text(file.read_text() + "request_id: false\n")
            await process.wait_for_output("settings reloaded")
            await _call_all(url)
            await operator.until_counted(3 * once)
            assert set(await operator.counted()) <= {"m", "other"}
