"""Incidents induced for real, at a gateway of two workers with clients that always call."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.resilience.fleet import FleetServer, fleet
from tests.resilience.server import Behaviour
from tests.support.gateway import until
from tests.support.operator import OperatedGateway, operated_gateway
from tests.support.raw_client import connect

CLIENTS = 4
SOON = 10.0
"""Seconds from the effect on clients in which an incident must be named."""
SLOW = 2.0
_LONG, _MORE_CLIENTS = 7000, 12
"""Characters of targets, and clients beside the others, that soon fill the memory for lines."""
_PERIOD = 0.6
"""Seconds between two turns of a throttled process."""


class Site:
    """A gateway of two workers, its servers, and clients that call all the time."""

    def __init__(self, gateway: OperatedGateway, servers: list[FleetServer]) -> None:
        self.process = gateway.process
        self.file = gateway.file
        self.operator = gateway.operator
        self.servers = servers
        self.numbers = 8
        """How many numbers each call has."""
        self.query = ""
        """What follows the target of each call."""
        self.effect_at: float | None = None
        """When a client first saw that something was wrong."""
        self._url = gateway.url
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, task: Coroutine[Any, Any, None]) -> None:
        """Run a task until the end of the test."""
        self._tasks.append(asyncio.create_task(task))

    async def close(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def call_for_ever(self) -> None:
        """Make calls, and note when the first of them fails or takes long."""
        while True:
            data = list(range(self.numbers))
            tensor = {"name": "N", "datatype": "INT32", "shape": [len(data)], "data": data}
            body = json.dumps({"inputs": [tensor]}).encode()
            began, status = time.monotonic(), 0
            target = f"/v2/models/resnet50/infer{self.query}"
            with suppress(OSError, EOFError):
                async with connect(self._url) as client:
                    status = (await client.call("POST", target, body)).status
            if status != 200 or time.monotonic() - began > SLOW / 2:
                self.effect_at = self.effect_at or time.monotonic()
            await asyncio.sleep(0.02)

    async def problems(self) -> list[dict[str, Any]]:
        """Return what is wrong now."""
        found: list[dict[str, Any]] = (await self.operator.get("/api/overview"))["problems"]
        return found

    async def endpoints(self) -> dict[str, dict[str, Any]]:
        """Return what the status says of each endpoint, by its URL."""
        groups = [
            each["endpoints"] for each in (await self.operator.status())["upstreams"].values()
        ]
        return {endpoint["url"]: endpoint for group in groups for endpoint in group}

    async def until_all_is_well(self) -> None:
        """Wait until both servers have responded, and nothing is wrong."""
        await until(self._is_well, 60)

    async def _is_well(self) -> bool:
        are_used = all(each["duration_ms"] for each in (await self.endpoints()).values())
        return are_used and not await self.problems()


Begin = Callable[[Site], Awaitable[None]]


async def _freeze(site: Site) -> None:
    site.servers[1].stop()


async def _kill(site: Site) -> None:
    await site.servers[1].kill()


async def _reload_nonsense(site: Site) -> None:
    with site.file.open("a") as file:
        file.write("wokers: 3\n")
    site.process.signal(signal.SIGHUP)


async def _lower_limit(site: Site) -> None:
    limit = "dialect: triton, concurrency: {max_requests: 1, max_queue: 0}"
    site.file.write_text(site.file.read_text().replace("dialect: triton", limit))
    site.process.signal(signal.SIGHUP)


async def _send_more_than_the_memory(site: Site) -> None:
    text = site.file.read_text()
    site.file.write_text(text.replace("limits: {", "limits: {max_buffered_bytes: 1MiB, "))
    site.process.signal(signal.SIGHUP)
    site.numbers = 200_000


async def _fill_disk(site: Site) -> None:
    """Let no file grow, as on a full disk, until lines of the access log are lost."""
    for worker in (await site.operator.status())["workers"]:
        resource.prlimit(worker["pid"], resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    site.query = "?" + "x" * _LONG
    for _ in range(_MORE_CLIENTS):
        site.run(site.call_for_ever())

    async def are_lost() -> float:
        (lost,) = await site.operator.samples("tensorgate_access_log_dropped_lines_total")
        return lost.value

    await until(are_lost, 60)
    site.effect_at = time.monotonic()


async def _throttle_workers(site: Site) -> None:
    """Let the workers run for a quarter of the time, as a container's CPU limit does."""
    pids = [each["pid"] for each in (await site.operator.status())["workers"]]
    site.run(_throttle(pids))


async def _throttle(pids: Sequence[int]) -> None:
    try:
        while True:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(3 * _PERIOD / 4)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(_PERIOD / 4)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _kill_worker(site: Site) -> None:
    os.kill((await site.operator.status())["workers"][1]["pid"], signal.SIGKILL)


async def _stop_worker(site: Site) -> None:
    pid = (await site.operator.status())["workers"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    site.run(_resume_at_the_end(pid))


async def _resume_at_the_end(pid: int) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        os.kill(pid, signal.SIGCONT)


def _behaves(**behaviour: Any) -> Begin:
    async def begin(site: Site) -> None:
        await site.servers[1].behave(Behaviour(**behaviour))

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
class Incident:
    """What happens, and what has to be said of it; URL is the address of the second server."""

    begin: Begin
    upstreams: str
    sentence: str
    log: str
    states: tuple[str, ...] = ("ejected",)
    """The states that the second server may be in."""
    level: str = "error"
    is_seen: bool = True
    """Clients see it; otherwise its effect is as soon as it begins."""
    status: str = ""
    """What /status says of it, beside the state of the server."""
    event: str = "endpoint_ejected"
    """The kind of its event in the journal, if it is one."""
    is_dated: bool = True
    """The problem says since when it is there."""

    is_on_page: bool = False
    """The page on incidents has its sentence or its line."""

    idle_timeout: str = "1s"
    """The timeout of the gateway that it needs."""

    def sentence_of(self, site: Site) -> str:
        """Return the pattern of its sentence."""
        return self.sentence.replace("URL", re.escape(site.servers[1].url))


INCIDENTS = {
    "frozen": Incident(_freeze, PAIR, EJECTED + "nothing moved for 1 s", "URL failed 5 times"),
    "frozen, with a long timeout": Incident(
        _freeze,
        PAIR,
        r"URL of model is failing: no response for \d+ s to calls of resnet50;"
        r" 99 % of them took at most [\d.]+ m?s in the \d+ s before",
        r"URL of upstream model is failing: no response for \d+ s to calls of resnet50;",
        ("failing",),
        is_seen=False,
        event="",
        idle_timeout="15s",
        is_on_page=True,
    ),
    "one of two fails": Incident(
        _behaves(fails=True),
        PAIR,
        r"URL of model is failing: .*: it returned 500: CUDA out of memory on device 0",
        r"URL of upstream model is failing: \d+ ",
        ("failing",),
        event="",
    ),
    "canary down": Incident(
        _kill,
        CANARY,
        r"no endpoint of canary can be used: cannot connect to URL: Connection refused",
        r"upstream canary is not ready: \d+ calls in a row could not connect",
        ("unreachable",),
        event="upstream_unreachable",
    ),
    "mirror down": Incident(
        _kill,
        MIRROR,
        r"no endpoint of copy can be used: cannot connect to URL: Connection refused",
        r"upstream copy is not ready",
        ("unreachable",),
        level="warning",
        is_seen=False,
        event="upstream_unreachable",
    ),
    "slow": Incident(
        _behaves(delay=SLOW),
        PAIR,
        r"URL of model is slow: its calls of resnet50 take [\d.]+ s"
        r" \(median of the last \d+ s\), and [\d.]+ m?s at the other endpoints",
        r"URL of upstream model is slow: its calls of resnet50 take",
        ("slow",),
        level="warning",
        event="",
        idle_timeout="30s",
        is_on_page=True,
    ),
    "bad reload": Incident(
        _reload_nonsense,
        PAIR,
        r"newer settings are not in use: .*gateway\.yaml:\d+: wokers: .*did you mean",
        r"settings not reloaded: .*gateway\.yaml:\d+: wokers: .*did you mean",
        ("in_use",),
        is_seen=False,
        status=r'"last_failure": ".*gateway\.yaml:\d+: wokers: ',
        event="reload_refused",
    ),
    "a limit refuses calls": Incident(
        _lower_limit,
        PAIR,
        r"\d+ calls? of the last seconds did not get one of the 2 slots of model",
        r"upstream 'model' is busy: ",
        ("in_use",),
        status=r'"concurrency": {"active": \d, "queued": 0, "max_requests": 2}',
        event="",
        is_dated=False,
        is_on_page=True,
    ),
    "no memory for bodies": Incident(
        _send_more_than_the_memory,
        PAIR,
        r"\d+ calls? of the last seconds found no memory \(limits\.max_buffered_bytes\)",
        r"at most 524288 bytes may be buffered \(limits\.max_buffered_bytes\)",
        ("in_use",),
        event="",
        is_dated=False,
        is_on_page=True,
    ),
    "throttled": Incident(
        _throttle_workers,
        PAIR,
        r"the event loop of worker \d+ lags by \d+ ms and uses \d+% of a core",
        r"the event loop lags by \d+ ms and uses \d+% of a core",
        ("in_use",),
        level="warning",
        is_seen=False,
        status=r'"event_loop_lag": {"text": "lags by \d+ ms and uses ',
        event="",
        is_on_page=True,
    ),
    "worker stopped": Incident(
        _stop_worker,
        PAIR,
        r"worker \d+ has not said anything for \d+ s",
        r"worker \d+ has not said anything for \d+ s: its calls wait meanwhile",
        ("in_use",),
        is_seen=False,
        status=r'"updated_at": "',
        event="",
        is_on_page=True,
    ),
    "disk full": Incident(
        _fill_disk,
        PAIR,
        r"\d+ lines of the access log of the last seconds could not be written",
        r"access log \S+: File too large; \d+ lines dropped so far",
        ("in_use",),
        level="warning",
        event="",
        is_dated=False,
        is_on_page=True,
    ),
    "worker killed": Incident(
        _kill_worker,
        PAIR,
        r"worker \d+ was killed by SIGKILL; another one takes its place",
        r"worker \d+ was killed by SIGKILL; another one starts",
        ("in_use",),
        is_seen=False,
        status=r'"name": "worker \d+", "why": "was killed by SIGKILL", "ended_at": "',
        event="worker_ended",
        is_on_page=True,
    ),
}


@asynccontextmanager
async def incident_site(folder: Path, incident: Incident) -> AsyncIterator[Site]:
    """Run what an incident needs, with clients, until all is well and it can begin."""
    async with fleet(2) as servers:
        good, bad = servers
        settings = (
            "workers: 2\noffload: 0\n"
            f"limits: {{idle_timeout: {incident.idle_timeout}}}\n"
            f"log: {{access: {{path: {folder / 'access.log'}}}}}\n"
            + incident.upstreams.format(good=good.url, bad=bad.url)
        )
        async with operated_gateway(folder, settings) as gateway:
            site = Site(gateway, servers)
            for _ in range(CLIENTS):
                site.run(site.call_for_ever())
            try:
                await site.until_all_is_well()
                site.effect_at = None
                yield site
            finally:
                await site.close()


async def begin(site: Site, incident: Incident) -> dict[str, Any]:
    """Let an incident begin, and return the problem that names it; meanwhile there is no other."""
    began = time.monotonic()
    await incident.begin(site)
    while True:
        problems = await site.problems()
        assert len(problems) <= 1, problems
        texts = [each["text"] for each in problems]
        if problems and re.search(incident.sentence_of(site), texts[0]):
            return problems[0]
        effect = site.effect_at if incident.is_seen else began
        waited = 0.0 if effect is None else time.monotonic() - effect
        assert waited < SOON, f"{texts}, {waited:.1f} s after the effect on clients"
        assert time.monotonic() - began < 3 * SOON, f"clients saw nothing, and there is {texts}"
        await asyncio.sleep(0.1)
