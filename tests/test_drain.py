"""What operators read while a gateway drains, as a process of its own."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.addresses import free_address
from tests.support.gateway import until
from tests.support.gateway_process import TIMEOUT, gateway_process, write_settings
from tests.support.grpc.client import grpc_client
from tests.support.http_messages import request
from tests.support.raw_client import connect
from tests.support.servers.gated_response import GatedResponse
from tests.support.servers.grpc_server import grpc_server
from tests.support.servers.scripted_server import ScriptedServer

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


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_grpc_call_that_outlasts_the_drain_learns_why(tmp_path: Path, method: str) -> None:
    more = "limits: {drain_grace: 50ms, drain_timeout: 300ms}\n"
    may_end = threading.Event()
    has_begun = threading.Event()

    def wait(*_: Any) -> Any:
        has_begun.set()
        may_end.wait(TIMEOUT)
        return b""

    def wait_after_one(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield b""
        yield wait()

    with grpc_server(
        unary={"ModelInfer": wait}, streams={"ModelStreamInfer": wait_after_one}
    ) as server:
        config = write_settings(tmp_path / "gateway.yaml", server.url, more=more)
        async with gateway_process(config) as (process, url), grpc_client(url) as client:
            call = asyncio.create_task(client.call(method, b"\n\1m"))
            await until(has_begun.is_set)
            process.signal(signal.SIGTERM)
            response = await call
            assert response.code is grpc.StatusCode.UNAVAILABLE
            assert response.text == (
                "the gateway stopped before the call ended (limits.drain_timeout)"
            )
            assert len(response.messages) == (method == "ModelStreamInfer")
            status, _, err = await process.end()
        may_end.set()
    assert status == 0
    assert "1 calls did not finish in time and were aborted (limits.drain_timeout)" in err
