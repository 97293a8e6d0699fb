"""A real Prometheus scrapes two workers under load: rules, dashboard and numbers are right."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.build_info import NATIVE
from tests.deploy.monitoring import ALERTS, PROMETHEUS, Dashboard, Query, adapter_rule, alert_rules
from tests.docs.markdown import PAGES, blocks
from tests.interop.load import LARGE, Ledger, infer, model_server
from tests.interop.programs import program
from tests.interop.prometheus import PATIENCE, Prometheus, Series, running_prometheus
from tests.support.addresses import HOST, free_address
from tests.support.gateway_process import Process, gateway_process
from tests.support.raw_client import connect

CALLS = 2500
"""Of each of the two loads."""
ALL_CALLS = "sum(tensorgate_requests_total)"
LOAD = 'model="mixed",status="2xx"'
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


def settings(admin: str, folder: Path, first: str, second: str, more: str = "") -> str:
    """Write settings with all that the dashboard shows: queues, mirrors, endpoints that fail."""
    return f"""
listen: {HOST}:0
admin: {admin}
workers: 2
offload: 1
watch: false
log: {{access: {{path: {folder / "access.log"}}}}}
tracing: {{endpoint: "http://127.0.0.1:1", sample: 0%}}
upstreams:
  main: {{endpoints: [{first}, {second}], dialect: triton, health_check: {{interval: 1s}}}}
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
{more}"""


@dataclass(slots=True)
class Stand:
    """A gateway with two workers, what scrapes it, and what clients have sent."""

    process: Process
    url: str
    admin: str
    file: Path
    prometheus: Prometheus
    ledger: Ledger = field(default_factory=Ledger)

    async def metrics(self) -> str:
        """Read the metrics from the gateway itself."""
        async with connect(f"http://{self.admin}") as operator:
            reply = await operator.call("GET", "/metrics")
        assert reply.status == 200
        return reply.body.decode()

    async def counted(self) -> float:
        """Return how many calls the gateway has counted."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(await self.metrics())
            for sample in family.samples
            if sample.name == "tensorgate_requests_total"
        )

    async def until_counted(self, calls: float) -> None:
        """Wait until the gateway and Prometheus have counted so many calls, and no more."""
        async with asyncio.timeout(PATIENCE):
            while await self.counted() < calls:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.05)
        assert await self.counted() == calls
        await self.prometheus.wait_until(ALL_CALLS, lambda seen: seen >= calls)
        await self.prometheus.wait_for_scrapes(3)
        assert await self.prometheus.value(ALL_CALLS) == calls

    async def until_scraped(self, share: float, calls: float) -> None:
        """Wait until Prometheus has seen a share of the load's calls."""
        wanted = calls + share * CALLS
        await self.prometheus.wait_until(ALL_CALLS, lambda seen: seen >= wanted)


@dataclass(frozen=True, slots=True)
class Observed:
    """What Prometheus and the gateway said at the end."""

    ledger: Ledger
    lost_with_worker: float
    """Requests that the killed worker counted without a response that came through, less others."""
    counted: float
    bounds: list[float]
    quantiles: dict[float, float]
    results: dict[str, list[Series]]
    """Of each query of the dashboard, by its text."""
    labels: dict[str, list[str]]
    """The values of each variable of the dashboard."""
    counters: list[Series]
    last_scrape: float
    alerts: dict[str, str]
    """The state of each alert rule, or its error."""
    upstream_calls: list[Series]
    exemplars: list[str]
    metrics: str


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Load a gateway, kill a worker, reload, let everything fail once, and ask Prometheus."""
    program("prometheus")
    return asyncio.run(_observe(tmp_path_factory.mktemp("prometheus")))


async def _observe(folder: Path) -> Observed:
    async with _stand(folder) as stand:
        await _let_all_fail(stand)
        lost = await _load_and_kill(stand)
        await _load_and_reload(stand, lost)
        await _fail_a_reload(stand)
        return await _ask(stand, lost)


@asynccontextmanager
async def _stand(folder: Path) -> AsyncIterator[Stand]:
    admin, file = free_address(), folder / "gateway.yaml"
    async with model_server() as first, model_server() as second:
        file.write_text(settings(admin, folder, first, second))
        async with gateway_process(str(file)) as (process, url):
            await process.wait_for_output(r"listening on \S+ \(admin\)")
            async with running_prometheus(folder, admin) as prometheus:
                yield Stand(process, url, admin, file, prometheus)


async def _let_all_fail(stand: Stand) -> None:
    """Make each counter that the dashboard shows count something.

    Once so that its series are there, and once more so that they rise.
    """
    for _ in range(2):
        await _fail_once(stand.url, stand.ledger)
        await stand.until_counted(stand.ledger.answered)


async def _fail_once(url: str, ledger: Ledger) -> None:
    async with connect(url) as client:
        trace = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        assert (await ledger.call(client, infer("mixed", headers=trace))).status == 200
        assert (await ledger.call(client, infer("broken"))).status == 500
        assert (await ledger.call(client, infer("large", LARGE))).status == 200
        for _ in range(8):  # one of its two endpoints is not there
            assert (await ledger.call(client, infer("flaky"))).status == 200

    async def one(statuses: list[int]) -> None:
        async with connect(url) as client:
            statuses.append((await ledger.call(client, infer("slow"))).status)

    statuses: list[int] = []
    async with asyncio.TaskGroup() as group:  # more than its limit
        for _ in range(16):
            group.create_task(one(statuses))
    assert set(statuses) == {200, 503}


async def _load_and_kill(stand: Stand) -> float:
    """Kill a worker under load; return how many more calls were counted than answered."""
    ledger, before = stand.ledger, stand.ledger.answered
    load = asyncio.create_task(ledger.load(stand.url, infer("mixed"), CALLS))
    await stand.until_scraped(0.3, before)
    workers = await stand.process.wait_for_output(r"2 workers: (\d+), (\d+)")
    assert not load.done()
    os.kill(int(workers[1]), signal.SIGKILL)
    await stand.process.wait_for_output(f"worker {workers[1]} was killed by SIGKILL")
    await stand.process.wait_for_output(r"worker \d+ is up")
    await load
    assert ledger.answered + ledger.lost == before + CALLS
    await stand.prometheus.wait_for_scrapes(2)
    counted = await stand.counted()
    await stand.until_counted(counted)
    return counted - ledger.answered


async def _load_and_reload(stand: Stand, lost: float) -> None:
    """Reload the settings under load, with a change of every route's calls."""
    ledger, before = stand.ledger, stand.ledger.answered + lost
    losses = ledger.lost
    load = asyncio.create_task(ledger.load(stand.url, infer("mixed"), CALLS))
    await stand.until_scraped(0.3, before)
    text = stand.file.read_text()
    stand.file.write_text(f"{text}limits: {{idle_timeout: 1m}}\n")
    stand.process.signal(signal.SIGHUP)
    await stand.process.wait_for_output("settings reloaded")
    assert not load.done()
    await load
    assert ledger.lost == losses
    await stand.until_counted(ledger.answered + lost)


async def _fail_a_reload(stand: Stand) -> None:
    good = stand.file.read_text()
    stand.file.write_text(f"{good}nonsense: 1\n")
    stand.process.signal(signal.SIGHUP)
    await stand.prometheus.wait_until("min(tensorgate_settings_current)", lambda value: value == 0)


async def _ask(stand: Stand, lost: float) -> Observed:
    prometheus, dashboard = stand.prometheus, Dashboard()
    buckets = f"sum by (le) (rate(tensorgate_request_duration_seconds_bucket{{{LOAD}}}[{WINDOW}]))"
    for alert in INDUCED_ALERTS:
        await prometheus.wait_until(f'count(ALERTS{{alertname="{alert}"}})', lambda n: n >= 1)
    texts = [_with_values(query.text) for query in dashboard.queries()]
    rule = adapter_rule()
    upstream_calls = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"])
    return Observed(
        ledger=stand.ledger,
        lost_with_worker=lost,
        counted=await prometheus.value(ALL_CALLS),
        bounds=sorted(float(each.labels["le"]) for each in await prometheus.query(buckets)),
        quantiles={
            share: await prometheus.value(f"histogram_quantile({share}, {buckets})")
            for share in (0.5, 0.99)
        },
        results={text: await prometheus.query(text) for text in texts},
        labels={
            name: await prometheus.label_values(_with_values(series), label)
            for name, series, label in dashboard.label_values()
        },
        # Before the counters, as there may be a scrape between.
        last_scrape=(await prometheus.query(f"up[{WINDOW}]"))[0].times[-1],
        counters=await prometheus.query(
            f'{{__name__=~"(tensorgate|process)_.*_(total|bucket|count|sum)"}}[{WINDOW}]'
        ),
        alerts=await _alerts(prometheus),
        upstream_calls=await prometheus.query(
            upstream_calls.replace("<<.LabelMatchers>>", 'upstream="limited"')
        ),
        exemplars=await _exemplars(prometheus),
        metrics=await stand.metrics(),
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
    """Through the kill of a worker, and a reload.

    Calls in progress at the kill may be counted without a response, and the one whose response was
    just written may miss its count.
    """
    ledger = observed.ledger
    assert ledger.answered > 2 * CALLS - ledger.lost
    assert observed.counted == ledger.answered + observed.lost_with_worker
    assert -1 <= observed.lost_with_worker <= ledger.lost


def test_no_counter_ever_goes_back_or_vanishes(observed: Observed) -> None:
    assert observed.counters
    for series in observed.counters:
        assert list(series.values) == sorted(series.values), series.labels
        assert series.times[-1] >= observed.last_scrape - 0.001, series.labels


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_quantiles_are_within_one_bucket_of_what_clients_measured(
    observed: Observed, share: float
) -> None:
    measured, shown = observed.ledger.quantile(share), observed.quantiles[share]
    places = [bisect_left(observed.bounds, value) for value in (measured, shown)]
    assert abs(places[0] - places[1]) <= 1, (measured, shown)


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
