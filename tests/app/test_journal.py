"""The journal: events of several processes as one list, and those of endpoints among them."""

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.app.build.upstreams import SharedUpstream, UpstreamSpec, build_upstreams
from gateway.app.journal import ENDPOINT_EJECTED, MAX_EVENTS, SETTINGS_RELOADED, Journal
from gateway.app.shared_memory import SharedMemory
from gateway.observe import families
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.observe.metric_store import MetricStore
from gateway.routing.latency_outliers import Latency, Outlier
from gateway.settings.upstreams import Upstream
from gateway.system.buffers import BufferAccount
from gateway.upstream.pool.member import Outcome
from tests.support.addresses import free_port
from tests.support.gateway import until
from tests.support.servers.scripted_server import ScriptedServer

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


def test_event_tells_what_happened_to_whom_by_whom_and_why() -> None:
    shared = SharedMemory(2)
    before = time.time()
    shared.journal(0).record(
        ENDPOINT_EJECTED, who="outlier detection", why="refused", upstream="u", endpoint=ONE
    )
    (event,) = shared.journal(1).read()
    assert event.pop("time") == pytest.approx(before, abs=10)
    assert event.pop("id")
    assert event == {
        "level": "error",
        "kind": "endpoint_ejected",
        "event": "endpoint ejected",
        "process": os.getpid(),
        "subject": f"{ONE} of u",
        "who": "outlier detection",
        "why": "refused",
        "upstream": "u",
        "endpoint": ONE,
    }


def test_events_of_all_processes_are_read_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory(2)
    times = iter([3, 1, 2])
    monkeypatch.setattr(time, "time_ns", lambda: next(times) * 10**9)
    for process, name in ((0, "third"), (1, "first"), (1, "second")):
        shared.journal(process).record(SETTINGS_RELOADED, who="SIGHUP", subject=name)
    assert [each["subject"] for each in shared.journal(0).read()] == ["third", "second", "first"]


def test_last_thousand_events_are_kept() -> None:
    journal = SharedMemory().journal(0)
    for number in range(MAX_EVENTS + 50):
        journal.record(SETTINGS_RELOADED, who="SIGHUP", why="x" * 60, subject=str(number))
    subjects = [each["subject"] for each in journal.read()]
    assert subjects == [str(number) for number in range(MAX_EVENTS + 49, 49, -1)]


def test_texts_of_servers_are_cut_and_need_not_be_unicode() -> None:
    journal = SharedMemory().journal(0)
    journal.record(ENDPOINT_EJECTED, who="a", why="\udcff" + "x" * 5000, upstream="u" * 5000)
    (event,) = journal.read()
    assert event["why"] == "?" + "x" * 299 + "..."
    assert len(event["upstream"]) < 310


@asynccontextmanager
async def _upstream(
    endpoints: Sequence[str], **declared: Any
) -> AsyncIterator[tuple[SharedUpstream, Journal]]:
    journal = SharedMemory().journal(0)
    settings = {"endpoints": list(endpoints), "dialect": "triton", **declared}
    spec = UpstreamSpec("u", Upstream.model_validate(settings), 1, 5, 0, 1000)
    metrics = GatewayMetrics(MetricStore(families.FAMILIES, 1).writer(0))
    upstream = build_upstreams([spec], {}, metrics, BufferAccount(), None, journal)["u"]
    upstream.acquire()
    await upstream.start()
    yield upstream, journal
    await upstream.release()


def _told(journal: Journal) -> list[tuple[str, str, str, str]]:
    names = "kind", "endpoint", "who", "why"
    return [tuple(each[name] for name in names) for each in reversed(journal.read())]


async def test_ejection_and_its_end_are_recorded_with_the_reason() -> None:
    outliers = {"consecutive_failures": 2, "base_ejection_time": 60}
    async with _upstream([ONE, TWO], outlier_detection=outliers) as (upstream, journal):
        pool = upstream.upstream.pool
        member = pool.members[0]
        for _ in range(3):
            pool.outlier_detector.record(member, Outcome.NO_RESPONSE, "it closed the connection")
        why = "2 failures in a row: it closed the connection"
        ejected = ("endpoint_ejected", ONE, "outlier detection", why)
        assert _told(journal) == [ejected]
        pool.outlier_detector.record(member, Outcome.SUCCEEDED, "")
        succeeded = "a call or a health check succeeded"
        ended = ("ejection_ended", ONE, "outlier detection", succeeded)
        assert _told(journal) == [ejected, ended]


async def test_ejection_of_a_slow_endpoint_says_how_slow_it_is() -> None:
    outliers = {"latency_factor": 5}
    async with _upstream([ONE, TWO], outlier_detection=outliers) as (upstream, journal):
        pool = upstream.upstream.pool
        member = pool.members[0]
        member.outlier = Outlier("resnet", Latency(50, 2.0), Latency(50, 0.002), has_siblings=True)
        pool.outlier_detector.eject_slow(member)
        assert _told(journal) == [
            ("endpoint_ejected", ONE, "outlier detection", str(member.outlier))
        ]


async def test_longer_ejection_is_no_new_event() -> None:
    outliers = {"consecutive_failures": 1, "base_ejection_time": "1ms"}
    async with _upstream([ONE, TWO], outlier_detection=outliers) as (upstream, journal):
        pool = upstream.upstream.pool
        member = pool.members[0]
        pool.outlier_detector.record(member, Outcome.NO_RESPONSE, "no")
        await until(lambda: member.ejection.until < time.monotonic())
        pool.outlier_detector.start_trial(member)
        pool.outlier_detector.record(member, Outcome.NO_RESPONSE, "no")
        assert member.ejection.ejections == 2
        assert [kind for kind, *_ in _told(journal)] == ["endpoint_ejected"]


@pytest.mark.parametrize(("required", "level"), [(True, "error"), (False, "warning")])
async def test_upstream_that_cannot_be_reached_is_an_error_if_it_is_required(
    required: bool, level: str
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with _upstream([url], required=required) as (upstream, journal):
        pool = upstream.upstream.pool
        for _ in range(3):
            pool.outlier_detector.record(pool.members[0], Outcome.UNREACHABLE, "refused")
        assert _told(journal) == [("upstream_unreachable", "", "calls", "refused")]
        pool.outlier_detector.record(pool.members[0], Outcome.SUCCEEDED, "")
        assert journal.read()[0]["kind"] == "upstream_reachable"
        assert [each["level"] for each in reversed(journal.read())] == [level, "info"]


async def test_health_checks_record_a_change_but_not_the_first_success() -> None:
    port = free_port()
    checks = {"interval": "10ms", "timeout": "1s", "unhealthy_threshold": 1}
    async with AsyncExitStack() as stack:
        async with ScriptedServer(port=port) as server:
            declared = _upstream([server.url], health_check=checks)
            upstream, journal = await stack.enter_async_context(declared)
            await until(lambda: upstream.upstream.pool.members[0].probed.healthy)
            assert _told(journal) == []
        await until(lambda: journal.read())
        ((kind, endpoint, who, why),) = _told(journal)
        assert (kind, endpoint, who) == ("endpoint_unhealthy", server.url, "health check")
        assert "refused" in why or "closed the connection" in why
        async with ScriptedServer(port=port):
            await until(lambda: len(journal.read()) == 2)
            assert journal.read()[0]["kind"] == "endpoint_healthy"
