"""What docs/guide/incidents.md shows is what incidents produce."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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


FAILURES: dict[str, tuple[Behaviour | None, str, str]] = {
    "answers 500": (Behaviour(fails=True), "CUDA out of memory", "5xx"),
    "closes midway": (Behaviour(cut=True), "before the end of its", "bad_response"),
    "sends garbage": (Behaviour(garbage=True), "sent an invalid HTTP response", "bad_response"),
    "is frozen": (Behaviour(delay=30), "nothing moved for 1 s", "server_timeout"),
    "refuses connections": (None, "Connection refused", "unreachable"),
}


@pytest.mark.parametrize(("behaviour", "reason", "kind"), FAILURES.values(), ids=FAILURES)
async def test_log_status_and_metrics_name_a_server_that_fails(
    behaviour: Behaviour | None, reason: str, kind: str, tmp_path: Path
) -> None:
    async with _site(tmp_path, "limits: {idle_timeout: 1s}") as site:
        if behaviour is None:
            await site.server.kill()
        else:
            await site.server.behave(behaviour)
        assert await site.infer() >= 500
        assert is_shown(await site.line(reason))
        (endpoint,) = (await site.status())["upstreams"]["triton"]["endpoints"]
        assert endpoint["failures"] == {kind: 1}
        assert reason in endpoint["last_error"]
        async with connect(site.admin) as client:
            metrics = (await client.call("GET", "/metrics")).body.decode()
        failures = r'tensorgate_endpoint_failures_total\{.*endpoint="%s",.*kind="%s".*\} 1\.0'
        assert re.search(failures % (re.escape(site.server.url), kind), metrics)


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
