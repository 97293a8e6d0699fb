"""Any worker shows all workers as one: calls of killed ones, and the state of living ones."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

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

    async def status(self) -> dict[str, Any]:
        async with connect(self._url) as client:
            status: dict[str, Any] = (await client.call("GET", "/status")).json
        return status

    async def until_status(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until a condition holds for what any worker shows."""
        async with asyncio.timeout(10):
            while not condition(await self.status()):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)
        for _ in range(6):
            assert condition(await self.status())

    async def worker(self) -> int:
        """Return the process id of a worker."""
        pid: int = (await self.status())["workers"][0]["pid"]
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


async def test_state_is_that_of_all_living_workers(tmp_path: Path) -> None:
    admin, file = free_address(), tmp_path / "gateway.yaml"
    async with ScriptedServer(always_respond(http_response())) as server:
        config = write_settings(file, server.url, more=f"admin: {admin}\nworkers: 2\n")
        async with gateway_process(config, FAST_FILE_WATCH) as (process, url):
            await process.wait_for_output(r"listening on http://\S+ \(admin\)")
            operator = _Operator(admin)
            async with _clients(url) as clients:
                for client in clients:
                    assert (await client.ask(CALL)).status == 200
                await operator.until_status(lambda status: status["connections"] == CONNECTIONS)
                status = await operator.status()
                shares = {each["pid"]: each["connections"] for each in status["workers"]}
                assert sum(shares.values()) == CONNECTIONS
                assert min(shares.values()) > 0
                victim, killed = next(iter(shares.items()))
                os.kill(victim, signal.SIGKILL)
                await _until_replaced(process, victim)
                left = CONNECTIONS - killed
                await operator.until_status(
                    lambda status: len(status["workers"]) == 2 and status["connections"] == left
                )
                assert victim not in [each["pid"] for each in (await operator.status())["workers"]]
