"""Any worker shows all workers as one: calls of killed ones, and the state of living ones."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.addresses import free_address
from tests.support.gateway_process import (
    FAST_FILE_WATCH,
    Process,
    gateway_process,
    write_settings,
)
from tests.support.http_messages import http_response, request
from tests.support.operator import Operator
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

CALL = request("GET", "/v2/models/m/ready")
CONNECTIONS, CALLS = 8, 5


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
            operator = Operator(admin)
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
            operator = Operator(admin)
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
