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
from tests.resilience.incident_page import PAGE, is_shown
from tests.support.addresses import free_address
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import binary_response, json_request
from tests.support.operator import Operator
from tests.support.servers.gated_response import GatedResponse
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
    respond_in_turn,
)

CALL = request("POST", "/v2/models/resnet50/infer", json_request())


@dataclass(frozen=True, slots=True)
class _Site:
    gateway: RunningGateway
    operator: Operator
    log: Path

    async def infer(self) -> int:
        """Make a call; return its status."""
        async with self.gateway.client() as client:
            return (await client.ask(CALL)).status

    async def endpoint(self) -> Any:
        """Return the status of the endpoint."""
        return (await self.operator.status())["upstreams"]["triton"]["endpoints"][0]

    async def line(self, part: str) -> str:
        """Wait for the line of a call that contains a text."""
        await until(lambda: part in self.log.read_text())
        return next(line for line in self.log.read_text().splitlines() if part in line)


@asynccontextmanager
async def _site(
    folder: Path, script: Script | None, *, log: str | None = None, **upstream: Any
) -> AsyncIterator[_Site]:
    """Run a gateway with the settings of the page; without a script nobody listens."""
    file, admin = folder / "access.log", free_address()
    async with ScriptedServer(*filter(None, [script])) as server:
        url = server.url if script else f"http://{free_address()}"
        general = {
            "admin": admin,
            "log": {"access": {"path": str(file), **({"format": log} if log else {})}},
            "upstreams": {"triton": {"endpoints": [url], "dialect": "triton", **upstream}},
            "routes": [{"upstream": "triton"}],
        }
        async with running_gateway(general=general, idle_timeout="1s") as gateway:
            yield _Site(gateway, Operator(admin), file)


async def test_lines_of_calls_that_find_no_slot(tmp_path: Path) -> None:
    limit = {"max_requests": 1, "max_queue": 1, "queue_timeout": "100ms"}
    script = GatedResponse(b'{"outputs":[]}')
    async with _site(tmp_path, script, concurrency=limit) as site, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(site.infer())
        await until(lambda: site.gateway.outstanding == 1)
        queued = tasks.create_task(site.infer())
        await until(lambda: site.gateway.gateway.listener.requests == 2)
        assert await site.infer() == await queued == 503
        script.may_respond.set()
        assert await first == 200
        assert is_shown(await site.line("more wait"))
        assert is_shown(await site.line("none ended within"))


async def _closes(connection: Connection) -> None:
    await connection.request()


OOM = b'{"error":"CUDA out of memory on device 0"}'
FAILURES: dict[str, tuple[Script | None, str, str]] = {
    "answers 500": (
        always_respond(http_response(OOM, status="500 Internal Server Error")),
        *("CUDA out of memory", "5xx"),
    ),
    "closes": (_closes, "closed the connection before it responded", "no_response"),
    "closes midway": (
        respond_in_turn(http_response(b'{"outputs":[]}', {"Content-Length": "99"})),
        *("before the end of its", "bad_response"),
    ),
    "sends garbage": (
        always_respond(b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n"),
        *("sent an invalid HTTP response", "bad_response"),
    ),
    "is frozen": (never_respond, "nothing moved for 1 s", "server_timeout"),
    "refuses connections": (None, "Connection refused", "unreachable"),
}


@pytest.mark.parametrize(("script", "reason", "kind"), FAILURES.values(), ids=FAILURES)
async def test_log_status_and_metrics_name_a_server_that_fails(
    script: Script | None, reason: str, kind: str, tmp_path: Path
) -> None:
    async with _site(tmp_path, script) as site:
        assert await site.infer() >= 500
        assert is_shown(await site.line(reason))
        endpoint = await site.endpoint()
        assert endpoint["failures"] == {kind: 1}
        assert reason in endpoint["last_error"]
        (sample,) = await site.operator.samples("tensorgate_endpoint_failures_total")
        assert (sample.labels["endpoint"], sample.labels["kind"]) == (endpoint["url"], kind)


async def test_line_of_a_client_that_leaves(tmp_path: Path) -> None:
    async with _site(tmp_path, never_respond) as site:
        async with site.gateway.client() as client:
            await client.send(CALL)
            await until(lambda: site.gateway.outstanding)
        assert is_shown(await site.line("the client closed the connection"))


async def test_slow_call_and_endpoint(tmp_path: Path) -> None:
    """The page shows all fields of a call as JSON, and names of the status."""
    script = always_respond(binary_response(bytes(12)))
    async with _site(tmp_path, script, log="json") as site:
        assert await site.infer() == 200
        line = json.loads(await site.line("200"))
        shown = [json.loads(block.text) for block in blocks(PAGE) if block.language == "json"]
        assert list(line) in [list(each) for each in shown]
        (like,) = [each for each in shown if "last_error" in each]
        assert set(like) <= set(await site.endpoint())
        queries = [block.text for block in blocks(PAGE) if block.language == "sh"]
        (fields,) = [found[1] for each in queries if (found := re.search(r"\| \{(.*)\}'", each))]
        assert fields.split(", ") == list(like)
