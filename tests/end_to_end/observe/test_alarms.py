"""Each incident is one alarm with one sentence: in the log, /status, the page and ``top``.

Two workers serve clients that call all the time. What is wrong is named within ten seconds of its
effect on them, and nothing else is.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.top.address import parse_admin_address
from gateway.top.client import AdminClient
from gateway.top.frame import Frame, plain_page
from gateway.top.poller import Poller, Wanted
from gateway.top.view import PANELS
from tests.resilience.fleet import FleetServer, fleet
from tests.resilience.server import Behaviour
from tests.support.addresses import HOST, free_address
from tests.support.gateway_process import Process, gateway_process
from tests.support.raw_client import connect

LOCAL = {"Host": "localhost"}
CLIENTS = 4
SOON = 10.0
"""Seconds from the effect on clients in which an incident must be named."""
WATCHED = 4.0
"""Seconds after that in which no other alarm may come."""
SLOW = 2.0

Break = Callable[[list[FleetServer]], Awaitable[None]]


async def _freeze(servers: list[FleetServer]) -> None:
    servers[1].stop()


async def _kill(servers: list[FleetServer]) -> None:
    await servers[1].kill()


async def _kill_all(servers: list[FleetServer]) -> None:
    for server in servers:
        await server.kill()


def _behaves(**behaviour: Any) -> Break:
    async def begin(servers: list[FleetServer]) -> None:
        await servers[1].behave(Behaviour(**behaviour))

    return begin


PAIR = "upstreams: {{model: {{endpoints: [{good}, {bad}], dialect: triton}}}}\n"
CANARY = (
    "upstreams:\n  model: {{endpoints: {good}, dialect: triton}}\n"
    "  canary: {{endpoints: {bad}, dialect: triton}}\n"
    "routes: [{{upstream: [{{name: model, weight: 50}}, {{name: canary, weight: 50}}]}}]\n"
)
MIRROR = (
    "upstreams:\n  model: {{endpoints: {good}, dialect: triton}}\n"
    "  copy: {{endpoints: {bad}, dialect: triton, required: false}}\n"
    "routes: [{{upstream: model, mirror: {{upstream: copy, percent: 100}}}}]\n"
)
EJECTED = r"URL of model is ejected .*"


@dataclass(frozen=True, slots=True)
class _Incident:
    """What happens to a server, and what has to be said of it; URL is its address."""

    begin: Break
    upstreams: str
    sentence: str
    log: str
    states: tuple[str, ...] = ("ejected",)
    level: str = "error"
    is_seen: bool = True
    """Clients see it; otherwise its effect is as soon as it begins."""


INCIDENTS = {
    "frozen": _Incident(_freeze, PAIR, EJECTED + "nothing moved for 1 s", "URL failed 5 times"),
    "refuses": _Incident(
        _kill, PAIR, EJECTED + "Connection refused", "URL failed 5 times", is_seen=False
    ),
    "half of a canary fails": _Incident(
        _behaves(fails_at_times=True),
        CANARY,
        # By chance there are three failures in a row.
        r"URL of canary is failing: \d+ (of its \d+ calls .* failed|failures in a row).*: it ret",
        r"URL of upstream canary is failing: \d+ ",
        ("failing",),
    ),
    "resets": _Incident(_behaves(resets=True), PAIR, EJECTED + "closed", "URL failed 5 times"),
    "half a response": _Incident(
        _behaves(cut=True), PAIR, EJECTED + "before the end of its", "URL failed 5 times"
    ),
    "canary down": _Incident(
        _kill,
        CANARY,
        r"no endpoint of canary can be used: cannot connect to URL: Connection refused",
        r"upstream canary is not ready: \d+ calls in a row could not connect",
        ("unreachable",),
    ),
    "answers 503": _Incident(
        _behaves(unavailable=True), PAIR, EJECTED + "it returned 503", "URL failed 5 times"
    ),
    "all down": _Incident(
        _kill_all,
        PAIR,
        r"no endpoint of model can be used: cannot connect to .*: Connection refused",
        r"upstream model is not ready",
        ("ejected", "unreachable"),
    ),
    "mirror down": _Incident(
        _kill,
        MIRROR,
        r"no endpoint of copy can be used: cannot connect to URL: Connection refused",
        r"upstream copy is not ready",
        ("unreachable",),
        level="warning",
        is_seen=False,
    ),
    "slow": _Incident(
        _behaves(delay=SLOW),
        PAIR,
        r"URL of model is slow: its calls of resnet50 take [\d.]+ s \(median\), and [\d.]+ m?s at",
        r"URL of upstream model is slow: its calls of resnet50 take",
        ("slow",),
        level="warning",
    ),
    "HTML": _Incident(
        _behaves(page=True), PAIR, EJECTED + "holds no tensors", "URL failed 5 times"
    ),
}


class _Site:
    """A gateway of two workers, its servers, and clients that call all the time."""

    def __init__(self, process: Process, url: str, admin: str, servers: list[FleetServer]) -> None:
        self.process = process
        self.admin = admin
        self.servers = servers
        self.effect_at: float | None = None
        """When a client first saw that something was wrong."""
        self.calls = 0
        self._url = url

    async def call_for_ever(self) -> None:
        data = list(range(8))
        tensor = {"name": "N", "datatype": "INT32", "shape": [8], "data": data}
        body = json.dumps({"inputs": [tensor]}).encode()
        while True:
            began, status = time.monotonic(), 0
            with suppress(OSError, EOFError):
                async with connect(self._url) as client:
                    response = await client.call("POST", "/v2/models/resnet50/infer", body)
                    status = response.status
            self.calls += 1
            if status != 200 or time.monotonic() - began > SLOW / 2:
                self.effect_at = self.effect_at or time.monotonic()
            await asyncio.sleep(0.02)

    async def get(self, path: str) -> Any:
        async with connect(self.admin) as client:
            return (await client.call("GET", path, headers=LOCAL)).json

    async def problems(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get("/api/overview"))["problems"]
        return found

    async def outliers(self) -> dict[str, float]:
        async with connect(self.admin) as client:
            text = (await client.call("GET", "/metrics", headers=LOCAL)).body.decode()
        return {
            sample.labels["endpoint"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "tensorgate_endpoint_latency_outlier"
        }


@asynccontextmanager
async def _site(folder: Path, upstreams: str, idle_timeout: str) -> AsyncIterator[_Site]:
    admin, file = free_address(), folder / "gateway.yaml"
    async with fleet(2) as servers:
        good, bad = servers
        file.write_text(
            f"listen: {HOST}:0\nadmin: {admin}\nworkers: 2\noffload: 0\n"
            f"limits: {{idle_timeout: {idle_timeout}}}\n"
            f"log: {{access: {{path: {folder / 'access.log'}}}}}\n"
            + upstreams.format(good=good.url, bad=bad.url)
        )
        async with gateway_process(str(file)) as (process, url):
            await process.wait_for_output(r"listening on \S+ \(admin\)")
            site = _Site(process, url, f"http://{admin}", servers)
            clients = [asyncio.create_task(site.call_for_ever()) for _ in range(CLIENTS)]
            try:
                yield site
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


async def _until_all_is_well(site: _Site) -> None:
    """Wait until both servers have responded, and nothing is wrong."""
    async with asyncio.timeout(60):
        while not await _is_used(site) or await site.problems():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _is_used(site: _Site) -> bool:
    upstreams = (await site.get("/status"))["upstreams"].values()
    endpoints = [endpoint for upstream in upstreams for endpoint in upstream["endpoints"]]
    return all(endpoint["duration_ms"] for endpoint in endpoints)


@pytest.mark.parametrize("incident", INCIDENTS.values(), ids=INCIDENTS)
async def test_incident_is_one_alarm_with_one_sentence(incident: _Incident, tmp_path: Path) -> None:
    idle_timeout = "30s" if incident.states == ("slow",) else "1s"
    async with _site(tmp_path, incident.upstreams, idle_timeout) as site:
        await _until_all_is_well(site)
        bad = site.servers[1]
        sentence = incident.sentence.replace("URL", re.escape(bad.url))
        began = time.monotonic()
        site.effect_at = None
        await incident.begin(site.servers)
        found = await _until_named(site, sentence, began, incident.is_seen)
        assert found["level"] == incident.level

        log = incident.log.replace("URL", re.escape(bad.url))
        await site.process.wait_for_output(log)
        endpoint = await _endpoint(site, bad.url)
        assert endpoint["state"] in incident.states
        assert endpoint["state_text"]
        assert endpoint["state_since"]
        shown = " ".join((await asyncio.to_thread(_top, site.admin)).split())
        assert re.search(sentence, shown), shown
        assert re.search(rf"{re.escape(bad.url)} ({'|'.join(incident.states)}) ", shown), shown
        is_slow = float("slow" in incident.states)
        assert (await site.outliers())[bad.url] == is_slow
        assert (await site.outliers())[site.servers[0].url] == 0

        end = time.monotonic() + WATCHED
        while time.monotonic() < end:
            assert len(await site.problems()) == 1, await site.problems()
            await asyncio.sleep(0.2)


def _top(admin: str) -> str:
    """Return what ``tensorgate top --once`` prints."""
    address = parse_admin_address(admin)
    client = AdminClient(address)
    poller = Poller(client, 1.0)
    for panel in PANELS:
        poller.read(Wanted(panel))
    client.close()
    page = plain_page(Frame(address.shown, 1.0), poller.snapshot, 300)
    return "\n".join(line.plain for line in page)


async def _until_named(site: _Site, sentence: str, began: float, is_seen: bool) -> dict[str, Any]:
    """Wait for the sentence; until then and from then on, there is no other problem."""
    texts = []
    while True:
        problems = await site.problems()
        assert len(problems) <= 1, problems
        texts = [each["text"] for each in problems]
        if problems and re.search(sentence, texts[0]):
            return problems[0]
        effect = site.effect_at if is_seen else began
        waited = 0.0 if effect is None else time.monotonic() - effect
        assert waited < SOON, f"{texts}, {waited:.1f} s after the effect on clients"
        assert time.monotonic() - began < 3 * SOON, f"clients saw nothing, and there is {texts}"
        await asyncio.sleep(0.1)


async def _endpoint(site: _Site, url: str) -> dict[str, Any]:
    groups = [each["endpoints"] for each in (await site.get("/status"))["upstreams"].values()]
    endpoints: dict[str, dict[str, Any]] = {each["url"]: each for group in groups for each in group}
    return endpoints[url]
