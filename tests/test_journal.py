"""The journal of a running gateway, with one process and with several workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.addresses import free_address
from tests.support.certificates import certificate_files
from tests.support.gateway_process import FAST_FILE_WATCH, Process, gateway_process
from tests.support.http_messages import http_response, request
from tests.support.operator import Operator
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import (
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

KEY = "key-of-operators"
HOST = {"Host": "localhost"}
WORKERS = pytest.mark.parametrize("workers", [1, 2])

Event = dict[str, Any]


@dataclass
class _Running:
    """A gateway with actions, and what its journal says."""

    process: Process
    url: str
    admin: str
    file: Path
    upstream: ScriptedServer

    async def events(self, **query: str) -> list[Event]:
        """Return the events, oldest first."""
        text = "&".join(f"{name}={value}" for name, value in query.items())
        async with connect(f"http://{self.admin}") as client:
            document = (await client.call("GET", f"/api/journal?{text}", headers=HOST)).json
        events: list[Event] = document["events"]
        return events[::-1]

    async def until_told(self, kind: str, times: int = 1) -> list[Event]:
        """Wait until there are so many events of a kind, and return them."""
        async with asyncio.timeout(20):
            while len(found := await self.events(kind=kind)) < times:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.05)
        assert len(found) == times
        return found

    async def act(self, action: str) -> None:
        """Drain the endpoint, or restore it."""
        headers = HOST | {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = f'{{"upstream": "demo", "endpoint": "{self.upstream.url}"}}'.encode()
        async with connect(f"http://{self.admin}") as client:
            response = await client.call("POST", f"/api/endpoints/{action}", body, headers)
        assert response.status == 200


@asynccontextmanager
async def _running(
    folder: Path,
    workers: int,
    more: str = "",
    unchecked: str = "",
    script: Script = always_respond(http_response()),  # noqa: B008  # it has no state
) -> AsyncIterator[_Running]:
    admin, file, keys = free_address(), folder / "gateway.yaml", folder / "keys"
    keys.write_text(f"{KEY}\n")
    async with ScriptedServer(script) as server:
        file.write_text(
            "listen: 127.0.0.1:0\n"
            f"admin: {{listen: {admin}, actions: true, keys: operators}}\n"
            f"api_keys: {{operators: {{file: {keys}}}}}\nworkers: {workers}\noffload: 0\n"
            f"upstreams: {{demo: {{endpoints: [{server.url}], dialect: triton}}}}\n{more}"
        )
        async with gateway_process(str(file), FAST_FILE_WATCH, unchecked) as (process, url):
            await process.wait_for_output(r"listening on http://\S+ \(admin\)")
            yield _Running(process, url, admin, file, server)


@WORKERS
async def test_reloads_tell_who_asked_and_what_changed_or_why_not(
    tmp_path: Path, workers: int
) -> None:
    async with _running(tmp_path, workers) as running:
        text = running.file.read_text()
        running.file.write_text(text + "request_id: false\n")
        (reloaded,) = await running.until_told("settings_reloaded")
        assert (reloaded["who"], reloaded["why"]) == ("file watch", "request_id changed")
        running.process.signal(signal.SIGHUP)
        _, reloaded = await running.until_told("settings_reloaded", 2)
        assert reloaded["who"] == "SIGHUP"
        running.file.write_text(text + "no_such_setting: 1\n")
        (refused,) = await running.until_told("reload_refused")
        assert refused["who"] == "file watch"
        assert refused["level"] == "error"
        assert "no_such_setting" in refused["why"]
        running.process.signal(signal.SIGHUP)
        _, refused = await running.until_told("reload_refused", 2)
        assert refused["who"] == "SIGHUP"
        started, *_ = await running.events()
        assert started["kind"] == "gateway_started"


@WORKERS
async def test_drained_endpoint_tells_which_operator_asked(tmp_path: Path, workers: int) -> None:
    async with _running(tmp_path, workers) as running:
        for action, kind in (("drain", "endpoint_drained"), ("restore", "endpoint_restored")):
            await running.act(action)
            (event,) = await running.until_told(kind)
            assert event["who"].startswith("operator at 127.")
            assert (event["upstream"], event["endpoint"]) == ("demo", running.upstream.url)


@WORKERS
async def test_gateway_that_drains_tells_it(tmp_path: Path, workers: int) -> None:
    async with _running(tmp_path, workers, script=never_respond) as running:
        async with connect(running.url) as client:
            await client.send(request("GET", "/v2/models/m/ready"))
            await running.upstream.connection()
            running.process.signal(signal.SIGTERM)
            (event,) = await running.until_told("gateway_draining")
        assert (event["who"], event["level"]) == ("SIGTERM or SIGINT", "warning")
        await running.process.end()


@WORKERS
async def test_new_certificate_and_an_unusable_one_are_told_once(
    tmp_path: Path, workers: int
) -> None:
    certificate, key = certificate_files(tmp_path)
    tls = f"tls: {{certificate: {certificate}, key: {key}}}\n"
    async with _running(tmp_path, workers, tls, "it serves TLS alone") as running:
        await asyncio.to_thread(Path(certificate).write_text, "nonsense")
        (refused,) = await running.until_told("certificate_refused")
        assert (refused["who"], refused["subject"]) == ("file watch", certificate)
        assert certificate in refused["why"]
        certificate_files(tmp_path)
        (reloaded,) = await running.until_told("certificate_reloaded")
        assert reloaded["subject"] == certificate


async def test_death_of_a_worker_and_its_successor_are_told_and_counted(tmp_path: Path) -> None:
    async with _running(tmp_path, 2) as running:
        victim = await Operator(running.admin).worker()
        os.kill(victim, signal.SIGKILL)
        (ended,) = await running.until_told("worker_ended")
        assert (ended["subject"], ended["why"]) == (f"worker {victim}", "was killed by SIGKILL")
        (restarted,) = await running.until_told("worker_restarted")
        assert restarted["subject"] == f"worker {restarted['process']}" != ended["subject"]
        async with connect(f"http://{running.admin}") as client:
            metrics = (await client.call("GET", "/metrics")).body.decode()
        assert "tensorgate_worker_restarts_total 1.0" in metrics
