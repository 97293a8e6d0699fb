"""What docs/guide/incidents.md shows is what incidents produce; others are in test_incidents.py."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.markdown import blocks
from tests.resilience.fleet import FleetServer, fleet
from tests.resilience.incident_page import PAGE, is_shown
from tests.resilience.server import Behaviour
from tests.support.addresses import HOST, free_address
from tests.support.gateway import until
from tests.support.gateway_process import FAST_FILE_WATCH, Process, gateway_process
from tests.support.http_messages import request
from tests.support.raw_client import connect

TARGET = "/v2/models/resnet50/infer"


def _body(count: int = 8) -> bytes:
    tensor = {"name": "N", "datatype": "INT32", "shape": [count], "data": [1] * count}
    return json.dumps({"inputs": [tensor]}).encode()


@dataclass(frozen=True, slots=True)
class _Site:
    process: Process
    url: str
    admin: str
    server: FleetServer
    file: Path
    log: Path

    async def infer(self) -> int:
        """Make a call; return its status."""
        async with connect(self.url) as client:
            return (await client.call("POST", TARGET, _body())).status

    async def status(self) -> dict[str, Any]:
        async with connect(self.admin) as client:
            status: dict[str, Any] = (await client.call("GET", "/status")).json
        return status

    async def in_progress(self, count: int) -> None:
        """Wait until so many calls are in progress."""
        async with asyncio.timeout(10):
            while (await self.status())["requests_in_progress"] < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def line(self, part: str) -> str:
        """Wait for the line of a call that contains a text."""
        await until(lambda: part in self.log.read_text())
        return next(line for line in self.log.read_text().splitlines() if part in line)


@asynccontextmanager
async def _site(folder: Path, more: str = "", upstream: str = "") -> AsyncIterator[_Site]:
    admin, file, log = free_address(), folder / "gateway.yaml", folder / "access.log"
    async with fleet(1) as (server,):
        file.write_text(
            f"listen: {HOST}:0\nadmin: {admin}\noffload: 0\nlog: {{access: {{path: {log}}}}}\n"
            f"upstreams: {{triton: {{endpoints: [{server.url}], dialect: triton, {upstream}}}}}\n"
            f"{more}\n"
        )
        async with gateway_process(str(file), FAST_FILE_WATCH) as (process, url):
            await process.wait_for_output(r"listening on \S+ \(admin\)")
            yield _Site(process, url, f"http://{admin}", server, file, log)


async def test_lines_of_calls_that_find_no_slot(tmp_path: Path) -> None:
    limit = "concurrency: {max_requests: 1, max_queue: 1, queue_timeout: 100ms}"
    async with _site(tmp_path, upstream=limit) as site:
        site.server.stop()
        first = asyncio.create_task(site.infer())
        await site.in_progress(1)
        queued = asyncio.create_task(site.infer())
        await site.in_progress(2)
        assert await site.infer() == await queued == 503
        site.server.resume()
        assert await first == 200
        assert is_shown(await site.line("more wait"))
        assert is_shown(await site.line("none ended within"))


async def test_line_of_a_call_that_finds_no_memory(tmp_path: Path) -> None:
    sizes = "max_buffered_bytes: 4MiB, max_buffered_body_bytes: 1MiB, max_request_bytes: 2MiB"
    limits = f"limits: {{{sizes}, max_inference_header_bytes: 64KiB}}"
    async with _site(tmp_path, limits) as site:
        data = request("POST", TARGET, _body(500_000))
        statuses: list[int] = []

        async def upload() -> None:
            async with connect(site.url) as client:
                await client.send(data[:1_400_000])
                statuses.append((await client.head()).status)

        clients = [asyncio.create_task(upload()) for _ in range(12)]
        await until(lambda: statuses)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        assert set(statuses) == {503}
        assert is_shown(await site.line("limits.max_buffered_bytes"))


async def test_line_of_a_server_that_dies_with_a_request(tmp_path: Path) -> None:
    async with _site(tmp_path) as site:
        site.server.stop()
        call = asyncio.create_task(site.infer())
        await site.in_progress(1)
        await asyncio.sleep(0.2)  # in which the request goes to the server
        await site.server.kill()
        assert await call == 502
        assert is_shown(await site.line("closed the connection"))


async def test_line_of_a_client_that_leaves(tmp_path: Path) -> None:
    async with _site(tmp_path) as site:
        await site.server.behave(Behaviour(delay=30))
        async with connect(site.url) as client:
            await client.send(request("POST", TARGET, _body()))
            await site.in_progress(1)
            await asyncio.sleep(0.2)  # in which the request goes to the server
        assert is_shown(await site.line("the client closed the connection"))


async def test_failed_reload(tmp_path: Path) -> None:
    async with _site(tmp_path) as site:
        with site.file.open("a") as file:
            file.write("limits: {idle_timeout: soon}\n")
        await site.process.wait_for_output("settings not reloaded")
        assert any(map(is_shown, site.process.said.splitlines()))
        shown = [json.loads(block.text) for block in blocks(PAGE) if block.language == "json"]
        settings = (await site.status())["settings"]
        (like,) = [each for each in shown if "last_failure" in each]
        assert list(settings) == list(like)
        assert (
            settings["last_failure"].partition(": ")[2] == like["last_failure"].partition(": ")[2]
        )


async def test_slow_call_and_endpoint(tmp_path: Path) -> None:
    """The page shows all fields of a call as JSON, and names of the status."""
    async with _site(tmp_path) as site:
        text = site.file.read_text()
        site.file.write_text(text.replace("{path:", "{format: json, path:"))
        await site.process.wait_for_output("settings reloaded")
        assert await site.infer() == 200
        line = json.loads(await site.line("200"))
        shown = [json.loads(block.text) for block in blocks(PAGE) if block.language == "json"]
        assert list(line) in [list(each) for each in shown]
        (endpoint,) = (await site.status())["upstreams"]["triton"]["endpoints"]
        (like,) = [each for each in shown if "last_error" in each]
        assert set(like) <= set(endpoint)
        queries = [block.text for block in blocks(PAGE) if block.language == "sh"]
        (fields,) = [found[1] for each in queries if (found := re.search(r"\| \{(.*)\}'", each))]
        assert fields.split(", ") == list(like)
