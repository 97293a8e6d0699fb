"""An incident with one of two servers: log, metrics and status alone tell server, model and reason.

The servers stand as two endpoints of one upstream, or as a stable one and a canary.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.resilience.fleet import FleetServer, fleet
from tests.resilience.incident_page import is_shown
from tests.resilience.server import Behaviour
from tests.support.addresses import HOST, free_address
from tests.support.gateway import until
from tests.support.gateway_process import gateway_process
from tests.support.raw_client import ReceivedResponse, connect
from tests.support.scale import SCALE

MODEL = "resnet50"
SLOW = 0.25
"""Seconds that a slow server takes for a response."""
_TEXT = re.compile(
    r'\S+ "(?P<method>\S+) (?P<target>\S+)" (?P<status>\d+) \d+ (?P<duration_ms>[\d.]+)'
    r' (?P<request_id>\S+) (?P<upstream>\S+) (?P<endpoint>\S+) (?:-|"(?P<reason>.*)")'
)
_MOST_CALLS = 60

Line = dict[str, Any]
Break = Callable[[FleetServer], Awaitable[None]]


async def _freeze(server: FleetServer) -> None:
    server.stop()


async def _kill(server: FleetServer) -> None:
    await server.kill()


def _behaves(**behaviour: Any) -> Break:
    async def begin(server: FleetServer) -> None:
        await server.behave(Behaviour(**behaviour))

    return begin


@dataclass(frozen=True, slots=True)
class _Incident:
    """What happens to a server, and what has to be seen of it."""

    begin: Break
    status: int
    reason: str
    kind: str | None
    """The kind of the gateway's own error; none if the server responds itself."""
    retried: bool = False
    """The gateway sends the request to another endpoint if there is one."""


INCIDENTS = {
    "frozen": _Incident(
        _freeze, 504, r"nothing moved for 1 s \(limits\.idle_timeout\)", "server_timeout"
    ),
    "answers 500": _Incident(
        _behaves(fails=True), 500, "the server returned 500: CUDA out of memory on device 0", None
    ),
    "refuses connections": _Incident(_kill, 503, "Connection refused", "unreachable", retried=True),
    "closes midway": _Incident(
        _behaves(cut=True), 502, "closed the connection before the end of its", "bad_response"
    ),
    "sends garbage": _Incident(
        _behaves(garbage=True), 502, "sent an invalid HTTP response", "bad_response"
    ),
}


@dataclass(frozen=True, slots=True)
class _Site:
    """A gateway with two servers, as its clients and its operators see it."""

    url: str
    admin: str
    log: Path
    good: FleetServer
    bad: FleetServer

    async def infer(self, count: int = 8) -> ReceivedResponse:
        """Make a call over a new connection."""
        data = list(range(count))
        tensor = {"name": "N", "datatype": "INT32", "shape": [count], "data": data}
        body = json.dumps({"inputs": [tensor]}).encode()
        async with connect(self.url) as client:
            return await client.call("POST", f"/v2/models/{MODEL}/infer", body)

    async def lines(self, calls: int) -> list[Line]:
        """Return the lines of the access log, once there is one for each call."""
        await until(lambda: len(self.log.read_text().splitlines()) == calls)
        return [_parse(line) for line in self.log.read_text().splitlines()]

    async def metrics(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric that are not 0, summed over all other labels."""
        async with connect(self.admin) as client:
            text = (await client.call("GET", "/metrics")).body.decode()
        values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.value:
                    values[tuple(sample.labels[label] for label in labels)] += sample.value
        return dict(values)

    async def endpoints(self) -> dict[str, dict[str, Any]]:
        """Return what the status says of each server."""
        async with connect(self.admin) as client:
            status = (await client.call("GET", "/status")).json
        groups = [upstream["endpoints"] for upstream in status["upstreams"].values()]
        return {endpoint["url"]: endpoint for group in groups for endpoint in group}

    async def quantiles(self) -> dict[str, float]:
        """Return the 99th percentile in ms of each server whose one is known."""
        found = {url: each["duration_ms"] for url, each in (await self.endpoints()).items()}
        return {url: durations["p99"] for url, durations in found.items() if durations}


def _parse(line: str) -> Line:
    if line.startswith("{"):
        fields: Line = json.loads(line)
        return fields
    found = _TEXT.fullmatch(line)
    assert found, line
    fields = {name: value for name, value in found.groupdict().items() if value}
    return fields | {"status": int(found["status"]), "duration_ms": float(found["duration_ms"])}


PAIR = """\
upstreams:
  model: {{endpoints: [{good}, {bad}], dialect: triton}}
"""
CANARY = """\
upstreams:
  model: {{endpoints: [{good}], dialect: triton}}
  canary: {{endpoints: [{bad}], dialect: triton}}
routes:
  - upstream: [{{name: model, weight: 50}}, {{name: canary, weight: 50}}]
"""


@asynccontextmanager
async def _site(folder: Path, upstreams: str, access: str) -> AsyncIterator[_Site]:
    """Run a gateway to which both servers have responded."""
    admin, log, file = free_address(), folder / "access.log", folder / "gateway.yaml"
    async with fleet(2) as (good, bad):
        file.write_text(
            f"listen: {HOST}:0\nadmin: {admin}\noffload: 0\nlimits: {{idle_timeout: 1s}}\n"
            f"log: {{access: {{path: {log}, {access}}}}}\n"
            + upstreams.format(good=good.url, bad=bad.url)
        )
        async with gateway_process(str(file)) as (process, url):
            await process.wait_for_output(r"listening on \S+ \(admin\)")
            site = _Site(url, f"http://{admin}", log, good, bad)
            await _until_used(site)
            yield site


async def _until_used(site: _Site) -> None:
    """Make calls until both servers have responded; they name themselves."""
    servers: set[str | None] = set()
    for _ in range(_MOST_CALLS):
        servers.add((await site.infer()).head.get("Server"))
        if len(servers) == 2:
            return
    raise AssertionError(f"only {servers} got a call")


SITES = {"of two endpoints": PAIR, "canary": CANARY}
_FORMATS = ("text", "json")
_ALL = [(name, site, form) for name in INCIDENTS for site in SITES for form in _FORMATS]
TRIED = _ALL if SCALE >= 1 else _ALL[::3]
"""Neither depends on the others: a full run tries all of them together."""


@pytest.mark.parametrize(("name", "servers", "log_format"), TRIED)
async def test_log_metrics_and_status_name_the_failing_server(
    name: str, servers: str, log_format: str, tmp_path: Path
) -> None:
    incident, upstreams = INCIDENTS[name], SITES[servers]
    async with _site(tmp_path, upstreams, f"format: {log_format}") as site:
        before = len(await site.lines(await _calls_so_far(site)))
        await incident.begin(site.bad)
        retried = incident.retried and upstreams is PAIR
        statuses = await _until_failed(site, retried)
        failures = 0 if retried else len(statuses) - statuses.count(200)
        assert set(statuses) == ({200} if retried else {200, incident.status})

        lines = (await site.lines(before + len(statuses)))[before:]
        assert [line["status"] for line in lines] == statuses
        for line in lines:
            _check_line(line, incident, site, log_format == "json")
        texts = site.log.read_text().splitlines()[before:]
        assert log_format == "json" or all(map(is_shown, texts)), texts

        await _check_metrics(site, incident, failures, retried)
        await _check_status(site, incident)


async def _calls_so_far(site: _Site) -> int:
    counts = await site.metrics("tensorgate_requests_total")
    return int(counts[()])


async def _until_failed(site: _Site, retried: bool) -> list[int]:
    """Make calls until two have met the broken server, and two the other; return the statuses."""
    statuses: list[int] = []
    for _ in range(_MOST_CALLS):
        statuses.append((await site.infer()).status)
        failed = len(statuses) - statuses.count(200)
        if retried:
            failed = int((await site.metrics("tensorgate_retries_total")).get((), 0))
        if failed >= 2 and statuses.count(200) >= 2:
            return statuses
    raise AssertionError(f"the broken server got too few calls: {statuses}")


def _check_line(line: Line, incident: _Incident, site: _Site, has_all: bool) -> None:
    if line["status"] == 200:
        assert line["endpoint"] == site.good.url
        assert "reason" not in line
        return
    assert line["endpoint"] == site.bad.url
    assert re.search(incident.reason, line["reason"])
    assert MODEL in line["target"]
    if has_all:
        assert line["model"] == MODEL
        assert line.get("error_kind") == incident.kind
        assert line["answered_by"] == ("gateway" if incident.kind else "server")


async def _check_metrics(site: _Site, incident: _Incident, failures: int, retried: bool) -> None:
    """Check what Prometheus sees: which model fails, of which kind, and at which endpoint."""
    calls = await site.metrics("tensorgate_requests_total", "model", "status")
    assert calls.get((MODEL, "5xx"), 0) == failures
    at = await site.metrics("tensorgate_endpoint_failures_total", "endpoint", "kind")
    assert set(at) == {(site.bad.url, incident.kind or "5xx")}
    kinds = await site.metrics("tensorgate_errors_total", "kind")
    assert kinds == ({} if retried or incident.kind is None else {(incident.kind,): failures})


async def _check_status(site: _Site, incident: _Incident) -> None:
    endpoints = await site.endpoints()
    good, bad = endpoints[site.good.url], endpoints[site.bad.url]
    assert (good["failures_total"], good["last_error"]) == (0, None)
    assert bad["failures_total"] >= 2
    assert bad["failures"] == {incident.kind or "5xx": bad["failures_total"]}
    assert re.search(incident.reason.removeprefix("the server "), bad["last_error"])
    assert bad["last_error_at"]


@pytest.mark.parametrize("upstreams", SITES.values(), ids=SITES)
async def test_log_metrics_and_status_name_the_slow_server(upstreams: str, tmp_path: Path) -> None:
    """Of the calls that succeed, only the slow ones are logged, with the server's time."""
    access = f"format: json, sample: 0%, slow: {SLOW * 900:.0f}ms"
    async with _site(tmp_path, upstreams, access) as site:
        await site.bad.behave(Behaviour(delay=SLOW))
        quantiles: dict[str, float] = {}
        # The percentiles of both are known when they had calls between two samples.
        async with asyncio.timeout(30):
            while site.log.read_text().count("\n") < 2 or len(quantiles) < 2:
                assert (await site.infer()).status == 200
                quantiles = await site.quantiles()
        (line, *more) = [_parse(line) for line in site.log.read_text().splitlines()]
        assert more
        for each in (line, *more):
            assert (each["endpoint"], each["model"]) == (site.bad.url, MODEL)
            assert SLOW * 900 <= each["first_byte_ms"] <= each["server_ms"] <= each["duration_ms"]
        sums = await site.metrics("tensorgate_server_duration_seconds_sum", "endpoint")
        counts = await site.metrics("tensorgate_server_duration_seconds_count", "endpoint")
        means = {endpoint: total / counts[endpoint] for endpoint, total in sums.items()}
        assert max(means, key=means.__getitem__) == (site.bad.url,)
        assert quantiles[site.bad.url] > quantiles[site.good.url]


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_a_response_that_breaks_off_is_logged_with_its_reason(
    log_format: str, tmp_path: Path
) -> None:
    """The client got the head of a good response: the status is 200, and the call has failed."""
    async with _site(tmp_path, CANARY, f"format: {log_format}") as site:
        before = await _calls_so_far(site)
        await site.bad.behave(Behaviour(cut=True))
        calls = 0
        failed = False
        while not failed:
            calls += 1
            assert calls < _MOST_CALLS
            try:
                assert (await site.infer(100_000)).status == 200
            except (ConnectionError, EOFError):
                failed = True
        (*_, line) = await site.lines(before + calls)
        assert (line["status"], line["endpoint"]) == (200, site.bad.url)
        assert "closed the connection before the end of its response" in line["reason"]
        assert log_format == "json" or is_shown(site.log.read_text().splitlines()[-1])
        kinds = await site.metrics("tensorgate_errors_total", "kind", "upstream")
        assert kinds == {("bad_response", "canary"): 1}
        endpoint = (await site.endpoints())[site.bad.url]
        assert endpoint["failures_total"] == 1
        assert "closed the connection before the end of its response" in endpoint["last_error"]
