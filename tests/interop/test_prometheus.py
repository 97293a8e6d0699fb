"""A real Prometheus scrapes two workers: rules, dashboard and numbers are right."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import yaml

from gateway.build_info import NATIVE
from tests.deploy.monitoring import ALERTS, PROMETHEUS, Dashboard, Query, adapter_rule, alert_rules
from tests.docs.markdown import PAGES, blocks
from tests.interop.programs import program
from tests.support.addresses import free_address
from tests.support.gateway import until
from tests.support.gateway_process import running_process
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import binary_response, json_request, metadata
from tests.support.operator import OperatedGateway, operated_gateway
from tests.support.raw_client import RawClient, ReceivedResponse, connect
from tests.support.servers.scripted_server import Connection, ScriptedServer

PATIENCE = 60.0
"""Seconds after which a test fails that waits for what Prometheus should see."""
SCRAPE_INTERVAL = "500ms"
DELAY, LONG_DELAY = 0.003, 0.16
"""Seconds that calls take at the server."""
LARGE = 200_000
"""Elements of a body that is worth other threads."""
ALL_CALLS = "sum(tensorgate_requests_total)"
QUERIES = [pytest.param(each, id=each.place) for each in Dashboard().queries()]
WINDOW = "10m"
"""Longer than the test."""
INDUCED_ALERTS = {
    "TensorgateEndpointEjected",
    "TensorgateRefusingCalls",
    "TensorgateReloadFailed",
}
"""Alerts whose condition the test brings about."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


_SMALL_RESPONSE = binary_response(np.full(4, 0.5, "<f4").tobytes())
_LARGE_RESPONSE = binary_response(np.full(LARGE, 0.5, "<f4").tobytes())
_FAILURE = http_response(b'{"error":"out of memory"}', status="500 Internal Server Error")


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a result: its labels, and its values in order of time."""

    labels: dict[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the data of a response of the HTTP API."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        async with connect(self._url) as client:
            reply = await client.call("GET", f"/api/v1/{path}{query}")
        assert reply.status == 200, reply.body.decode()
        return reply.json["data"]

    async def query(self, expression: str) -> list[Series]:
        """Return what an expression is now, or the samples of a range."""
        data = await self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [_series({}, [data["result"]])]
        return [
            _series(each["metric"], each["values"] if "values" in each else [each["value"]])
            for each in data["result"]
        ]

    async def value(self, expression: str) -> float:
        """Return the one value of an expression; NaN if there is none."""
        found = await self.query(expression)
        assert len(found) <= 1, found
        return found[0].values[-1] if found else math.nan

    async def label_values(self, series: str, label: str) -> list[str]:
        """Return the values of a label, as Grafana asks for them."""
        values: list[str] = await self.get(f"label/{label}/values", **{"match[]": series})
        return values

    async def wait_until(self, expression: str, holds: Callable[[float], bool]) -> float:
        """Wait until the one value of an expression is as wanted; return it."""
        seen = [math.nan]

        async def has_come() -> bool:
            seen.append(await self.value(expression))
            return holds(seen[-1])

        await until(has_come, PATIENCE)
        return seen[-1]

    async def is_ready(self) -> bool:
        """Tell whether it answers queries."""
        try:
            async with connect(self._url) as client:
                return (await client.call("GET", "/-/ready")).status == 200
        except ConnectionError:
            return False


def _series(labels: dict[str, str], samples: list[list[Any]]) -> Series:
    times = tuple(float(time) for time, _ in samples)
    return Series(labels, times, tuple(float(value) for _, value in samples))


def write_example(folder: Path, target: str) -> Path:
    """Write the example settings with a gateway of this machine, and scrape it often."""
    settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": "1s"}
    settings["rule_files"] = [str(PROMETHEUS / file) for file in settings["rule_files"]]
    (job,) = settings["scrape_configs"]
    (static,) = job["static_configs"]
    static["targets"] = [target]
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(settings))  # which is YAML, too
    return file


@asynccontextmanager
async def running_prometheus(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    """Run Prometheus on the loopback interface, with its data in a folder."""
    address = free_address()
    command = (
        program("prometheus"),
        f"--config.file={write_example(folder, target)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    )
    async with running_process(*command):
        prometheus = Prometheus(address)
        await until(prometheus.is_ready, PATIENCE)
        yield prometheus


@asynccontextmanager
async def model_server() -> AsyncIterator[str]:
    """Run a server with the models slow, large and broken; all others are fast."""

    async def script(connection: Connection) -> None:
        while True:
            head = (await connection.request()).head
            connection.requests.clear()
            await connection.send(await _respond(head.target))

    async with ScriptedServer(script) as server:
        yield server.url


async def _respond(target: str) -> bytes:
    if not target.endswith("/infer"):
        return http_response(metadata(-1))
    model = target.split("/")[3]
    await asyncio.sleep(LONG_DELAY if model == "slow" else DELAY)
    if model == "broken":
        return _FAILURE
    return _LARGE_RESPONSE if model == "large" else _SMALL_RESPONSE


def infer(model: str, count: int = 4, headers: dict[str, str] | None = None) -> bytes:
    """Write a JSON infer request."""
    return request("POST", f"/v2/models/{model}/infer", json_request(*[0.5] * count), headers)


def settings(folder: Path, first: str, second: str) -> str:
    """Write settings with all that the dashboard shows: queues, mirrors, endpoints that fail."""
    return f"""
workers: 2
offload: 1
watch: false
log: {{access: {{path: {folder / "access.log"}}}}}
tracing: {{endpoint: "http://127.0.0.1:1", sample: 0%}}
upstreams:
  main:
    endpoints: [{first}, {second}]
    dialect: triton
    health_check: {{interval: 1s}}
    shared_memory: {{size: 1MiB, min_bytes: 1KiB}}
  flaky:
    endpoints: [{first}, "http://127.0.0.1:1"]
    dialect: triton
    load_balancing: {{policy: round_robin}}
    outlier_detection: {{consecutive_failures: 2, base_ejection_time: 5m}}
  limited:
    endpoints: [{first}]
    dialect: triton
    concurrency: {{max_requests: 2, max_queue: 2, queue_timeout: 50ms}}
  shadow: {{endpoints: [{second}], dialect: triton}}
routes:
  - {{name: flaky, match: {{model: flaky}}, upstream: flaky}}
  - {{name: limited, match: {{model: slow}}, upstream: limited}}
  - {{name: all, upstream: main, mirror: {{upstream: shadow}}}}
"""


@dataclass(slots=True)
class Stand:
    """A gateway with two workers, what scrapes it, and how many responses clients have got."""

    gateway: OperatedGateway
    prometheus: Prometheus
    answered: int = 0

    async def call(self, client: RawClient, data: bytes) -> ReceivedResponse:
        """Send a request and read the response."""
        reply = await client.ask(data)
        self.answered += 1
        return reply


@dataclass(frozen=True, slots=True)
class Observed:
    """What Prometheus and the gateway said at the end."""

    answered: int
    counted: float
    results: dict[str, list[Series]]
    """Of each query of the dashboard, by its text."""
    labels: dict[str, list[str]]
    """The values of each variable of the dashboard."""
    alerts: dict[str, str]
    """The state of each alert rule, or its error."""
    upstream_calls: list[Series]
    exemplars: list[str]
    metrics: str


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Let everything fail once, and ask Prometheus."""
    program("prometheus")
    return asyncio.run(_observe(tmp_path_factory.mktemp("prometheus")))


async def _observe(folder: Path) -> Observed:
    async with _stand(folder) as stand:
        await _let_all_fail(stand)
        await _reload(stand)
        return await _ask(stand)


@asynccontextmanager
async def _stand(folder: Path) -> AsyncIterator[Stand]:
    async with (
        model_server() as first,
        model_server() as second,
        operated_gateway(folder, settings(folder, first, second)) as gateway,
        running_prometheus(folder, gateway.operator.url.removeprefix("http://")) as prometheus,
    ):
        yield Stand(gateway, prometheus)


async def _let_all_fail(stand: Stand) -> None:
    """Make each counter that the dashboard shows count something.

    Once so that its series are there, and once more so that they rise.
    """
    for _ in range(2):
        await _fail_once(stand)
        await stand.prometheus.wait_until(ALL_CALLS, lambda seen: seen >= stand.answered)


async def _fail_once(stand: Stand) -> None:
    async with connect(stand.gateway.url) as client:
        trace = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        assert (await stand.call(client, infer("mixed", headers=trace))).status == 200
        assert (await stand.call(client, infer("broken"))).status == 500
        assert (await stand.call(client, infer("large", LARGE))).status == 200
        for _ in range(8):  # one of its two endpoints is not there
            assert (await stand.call(client, infer("flaky"))).status == 200

    async def one(statuses: list[int]) -> None:
        async with connect(stand.gateway.url) as client:
            statuses.append((await stand.call(client, infer("slow"))).status)

    statuses: list[int] = []
    async with asyncio.TaskGroup() as group:  # more than its limit
        for _ in range(16):
            group.create_task(one(statuses))
    assert set(statuses) == {200, 503}


async def _reload(stand: Stand) -> None:
    """Reload other settings, and then settings that are wrong."""
    good = f"{stand.gateway.file.read_text()}limits: {{idle_timeout: 1m}}\n"
    stand.gateway.file.write_text(good)
    stand.gateway.process.signal(signal.SIGHUP)
    await stand.gateway.process.wait_for_output("settings reloaded")
    changes = "max(changes(tensorgate_settings_loaded_timestamp_seconds[10m]))"
    await stand.prometheus.wait_until(changes, lambda value: value > 0)
    stand.gateway.file.write_text(f"{good}nonsense: 1\n")
    stand.gateway.process.signal(signal.SIGHUP)
    await stand.prometheus.wait_until("min(tensorgate_settings_current)", lambda value: value == 0)


async def _ask(stand: Stand) -> Observed:
    prometheus, dashboard = stand.prometheus, Dashboard()
    for alert in INDUCED_ALERTS:
        await prometheus.wait_until(f'count(ALERTS{{alertname="{alert}"}})', lambda n: n >= 1)
    texts = [_with_values(query.text) for query in dashboard.queries()]
    rule = adapter_rule()
    upstream_calls = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"])
    return Observed(
        answered=stand.answered,
        counted=await prometheus.value(ALL_CALLS),
        results={text: await prometheus.query(text) for text in texts},
        labels={
            name: await prometheus.label_values(_with_values(series), label)
            for name, series, label in dashboard.label_values()
        },
        alerts=await _alerts(prometheus),
        upstream_calls=await prometheus.query(
            upstream_calls.replace("<<.LabelMatchers>>", 'upstream="limited"')
        ),
        exemplars=await _exemplars(prometheus),
        metrics=await stand.gateway.operator.text("/metrics"),
    )


def _with_values(text: str) -> str:
    """Replace Grafana's variables by what they are where All is chosen."""
    for name in ("__rate_interval", "__range"):
        text = text.replace(f"${name}", WINDOW)
    for name, _, _ in Dashboard().label_values():
        text = text.replace(f"${name}", ".*")
    assert "$" not in text
    return text


async def _alerts(prometheus: Prometheus) -> dict[str, str]:
    (group,) = (await prometheus.get("rules"))["groups"]
    return {
        rule["name"]: rule["state"] if rule["health"] == "ok" else rule["lastError"]
        for rule in group["rules"]
    }


async def _exemplars(prometheus: Prometheus) -> list[str]:
    """Return the trace ids of the exemplars."""
    metric = "tensorgate_request_duration_seconds_bucket"
    found = await prometheus.get("query_exemplars", query=metric, start="0", end="9999999999")
    return [each["labels"]["trace_id"] for series in found for each in series["exemplars"]]


def test_prometheus_counts_each_call_that_was_answered(observed: Observed) -> None:
    assert observed.counted == observed.answered


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_of_the_dashboard_has_data(observed: Observed, query: Query) -> None:
    if "tensorgate_offload_jobs" in query.text and not NATIVE:
        pytest.skip("there are no offload threads without the C module")
    result = observed.results[_with_values(query.text)]
    assert result
    assert any(math.isfinite(value) for series in result for value in series.values)


def test_each_variable_of_the_dashboard_has_values(observed: Observed) -> None:
    assert observed.labels["job"] == ["tensorgate"]
    assert {"all", "flaky", "limited"} <= set(observed.labels["route"])
    assert {"mixed", "large", "slow"} <= set(observed.labels["model"])
    assert {"main", "flaky", "limited"} <= set(observed.labels["upstream"])
    assert len(observed.labels["instance"]) == 1


def test_prometheus_evaluates_each_alert_rule(observed: Observed) -> None:
    assert observed.alerts.keys() == {rule["alert"] for rule in alert_rules()}
    assert set(observed.alerts.values()) <= {"inactive", "pending", "firing"}
    raised = {name for name, state in observed.alerts.items() if state != "inactive"}
    assert raised >= INDUCED_ALERTS


def test_the_autoscaler_gets_its_metric(observed: Observed) -> None:
    (calls,) = observed.upstream_calls
    assert calls.values[-1] >= 0


def test_exemplars_lead_to_the_traces_of_clients(observed: Observed) -> None:
    assert set(observed.exemplars) == {TRACE}


async def promtool(*arguments: str, text: str = "") -> tuple[int, str]:
    """Run promtool; return its status, and all that it printed."""
    command = [program("promtool"), *arguments]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


async def test_promtool_accepts_the_metrics(observed: Observed) -> None:
    assert await promtool("check", "metrics", text=observed.metrics) == (0, "")


async def test_promtool_accepts_the_queries_of_the_documentation(tmp_path: Path) -> None:
    queries = [block.text for page in PAGES for block in blocks(page) if block.language == "promql"]
    rules = [{"record": f"shown:{number}", "expr": text} for number, text in enumerate(queries)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    status, said = await promtool("check", "rules", str(file))
    assert status == 0, said
    assert f"{len(queries)} rules found" in said


async def test_promtool_accepts_the_alert_rules_and_the_example() -> None:
    status, said = await promtool("check", "rules", str(ALERTS))
    assert status == 0, said
    assert f"{len(alert_rules())} rules found" in said
    status, said = await promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert status == 0, said


async def test_each_alert_fires_when_it_should_and_only_then() -> None:
    status, said = await promtool("test", "rules", str(PROMETHEUS / "alerts_test.yaml"))
    assert status == 0, said


async def test_the_tests_of_alerts_notice_each_rule_that_never_fires(tmp_path: Path) -> None:
    changed = alert_rules()
    for rule in changed:
        rule["expr"] = f"({rule['expr']}) and vector(0) > 1"
    rules, tests = tmp_path / ALERTS.name, tmp_path / "alerts_test.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "changed", "rules": changed}]}))
    tests.write_text((PROMETHEUS / tests.name).read_text())
    status, said = await promtool("test", "rules", str(tests))
    assert status != 0
    for rule in changed:
        assert f"alertname: {rule['alert']}," in said
