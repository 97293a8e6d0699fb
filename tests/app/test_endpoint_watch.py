"""What calls of all workers say of endpoints, as the pools are told each second."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest

from gateway.app.endpoint_watch import EndpointWatch, RecentLooks
from gateway.app.shared_memory import Waiting
from gateway.observe import families
from gateway.observe.metric_store import MetricStore
from gateway.routing.latency_outliers import Latency
from tests.support.gateway import no_leaks, until
from tests.upstream.pools import make_pool

ENDPOINT = ("u", "http://0")
NOW = 1_700_000_000.0


class _Looked:
    """Looks at what is counted in two workers, once a second."""

    def __init__(self) -> None:
        self.store = MetricStore(families.FAMILIES, 2)
        self.looks = RecentLooks(self.store)
        self.at = 0.0
        self.turn = 0
        self.pass_by(1)

    def serve(
        self,
        times: int = 1,
        seconds: float = 0.002,
        failure: str = "",
        endpoint: tuple[str, str] = ENDPOINT,
        model: str = "m",
    ) -> None:
        """Count calls, in the two workers in turn."""
        for _ in range(times):
            self.turn += 1
            writer = self.store.writer(self.turn % 2)
            if failure:
                writer.counter(families.ENDPOINT_FAILURES, (*endpoint, failure)).add(1.0)
            if failure != "unreachable":
                writer.histogram(families.SERVER_DURATION, endpoint).observe(seconds)
                writer.histogram(families.FIRST_BYTE, endpoint).observe(seconds)
                writer.histogram(families.ENDPOINT_LATENCY, (*endpoint, model)).observe(seconds)

    def pass_by(self, looks: int, step: float = 1) -> None:
        for _ in range(looks):
            self.at += step
            self.looks.look(self.at, NOW + self.at)


def test_calls_and_failures_of_the_last_seconds_are_counted_over_all_workers() -> None:
    looked = _Looked()
    looked.serve(30)
    looked.pass_by(12)
    looked.serve(6)
    looked.serve(3, failure="5xx")
    looked.serve(1, failure="unreachable")
    looked.pass_by(1)
    recent = looked.looks.recent_calls()[ENDPOINT]
    assert (recent.calls, recent.failures, recent.seconds) == (10, 4, 10)
    assert recent.succeeded_at == NOW + looked.at - 1
    looked.pass_by(10)
    assert looked.looks.recent_calls()[ENDPOINT].calls == 40


def test_call_whose_client_gave_up_before_a_response_is_no_success() -> None:
    looked = _Looked()
    looked.store.writer(0).histogram(families.SERVER_DURATION, ENDPOINT).observe(3.0)
    looked.pass_by(1)
    recent = looked.looks.recent_calls()[ENDPOINT]
    assert (recent.calls, recent.failures, recent.succeeded_at) == (1, 0, 0)
    looked.serve(1)
    looked.pass_by(1)
    assert looked.looks.recent_calls()[ENDPOINT].succeeded_at == NOW + looked.at - 1


def test_success_beside_calls_that_get_no_response_is_seen() -> None:
    looked = _Looked()
    looked.serve(5, failure="unreachable")
    for _ in range(5):
        writer = looked.store.writer(1)
        writer.counter(families.ENDPOINT_FAILURES, (*ENDPOINT, "no_response")).add(1.0)
        writer.histogram(families.SERVER_DURATION, ENDPOINT).observe(0.1)
    looked.serve(1)
    looked.pass_by(1)
    recent = looked.looks.recent_calls()[ENDPOINT]
    assert (recent.calls, recent.failures) == (11, 10)
    assert recent.succeeded_at == NOW + looked.at - 1


def test_few_calls_are_looked_for_in_the_whole_minute() -> None:
    looked = _Looked()
    for _ in range(3):
        looked.serve(1, failure="server_timeout")
        looked.pass_by(15)
    recent = looked.looks.recent_calls()[ENDPOINT]
    assert (recent.calls, recent.failures, recent.seconds) == (3, 3, 60)
    assert recent.succeeded_at == 0
    looked.pass_by(60)
    assert looked.looks.recent_calls() == {}


def test_what_was_counted_before_the_first_look_is_not_of_now() -> None:
    looked = _Looked()
    looked.serve(50, failure="5xx")
    again = RecentLooks(looked.store)
    again.look(1.0, NOW)
    assert again.recent_calls() == {}


def test_latency_is_that_of_the_latest_calls() -> None:
    """The calls of an endpoint that has become slow are few beside those of before."""
    looked = _Looked()
    for _ in range(50):
        looked.serve(100)
        looked.pass_by(1)
    for _ in range(6):
        looked.serve(1, seconds=2.0)
        looked.pass_by(1)
    latency, *older = looked.looks.latencies()[ENDPOINT]["m"].recent
    assert (latency.calls, latency.seconds) == (6, 6)
    assert latency.median == pytest.approx(2.0, rel=0.02)
    assert [each.seconds for each in older] == [15, 56]
    assert older[0].median == pytest.approx(0.002, rel=0.02)


def test_time_of_which_a_latency_is_named_as_it_was_measured() -> None:
    """With many endpoints the gateway looks less often than it should."""
    looked = _Looked()
    for _ in range(10):
        looked.serve(3)
        looked.pass_by(1, step=8)
    recent = looked.looks.latencies()[ENDPOINT]["m"].recent
    assert [(each.calls, each.seconds) for each in recent] == [(3, 8), (6, 16), (24, 64)]


def test_calls_without_a_model_have_no_latency_of_their_own() -> None:
    looked = _Looked()
    looked.serve(50, model="")
    looked.pass_by(1)
    assert looked.looks.latencies() == {}


def test_past_of_an_endpoint_is_of_all_calls_of_an_hour_once_five_minutes_are_known() -> None:
    looked = _Looked()
    for minute in range(10):
        assert _hour(looked) is None, minute
        looked.serve(10, seconds=0.1)
        looked.pass_by(60)
    looked.serve(80, seconds=2.0)
    looked.pass_by(1)
    past = _hour(looked)
    assert past is not None
    assert (past.calls, past.seconds) == (180, 601)
    assert past.median == pytest.approx(0.1, rel=0.02)
    looked.pass_by(3900)
    looked.serve(3)
    looked.pass_by(1)
    assert _hour(looked) is None


def _hour(looked: _Looked) -> Latency | None:
    latencies = looked.looks.latencies().get(ENDPOINT, {})
    return latencies["m"].hour if latencies else None


def test_endpoint_that_does_not_respond_is_silent_beside_its_own_latency() -> None:
    looked, series = _Looked(), (*ENDPOINT, "m")
    looked.serve(20, seconds=0.1)
    looked.pass_by(1)
    sent_at = looked.at
    for _ in range(4):
        looked.pass_by(1)
        assert looked.looks.silences({series: sent_at}) == {}
    looked.serve(20, endpoint=("u", "http://1"))
    looked.pass_by(1)
    silence = looked.looks.silences({series: sent_at})[ENDPOINT]
    assert (silence.model, silence.seconds, silence.usual.is_own) == ("m", 5, True)
    assert silence.usual.p99 == pytest.approx(0.1, rel=0.02)
    looked.serve(1)
    looked.pass_by(1)
    assert looked.looks.silences({series: sent_at}) == {}


def test_endpoint_that_cannot_be_connected_to_is_not_silent() -> None:
    looked, series = _Looked(), (*ENDPOINT, "m")
    looked.serve(20)
    looked.pass_by(1)
    sent_at = looked.at
    for _ in range(5):
        looked.serve(1, failure="unreachable")
        looked.pass_by(3)
        assert looked.looks.silences({series: sent_at}) == {}


def test_endpoint_that_never_responded_is_silent_beside_its_siblings() -> None:
    looked = _Looked()
    looked.serve(20)
    looked.pass_by(6)
    silences = looked.looks.silences({("u", "http://1", "m"): 1.0, ("u", "http://2", "n"): 1.0})
    assert not silences["u", "http://1"].usual.is_own
    assert list(silences) == [("u", "http://1")]


@asynccontextmanager
async def _slow_endpoint_is_seen(leads: Callable[[], bool]) -> AsyncIterator[None]:
    """Watch two endpoints, of which the first is slow; it is known to be when the body begins."""
    looked, pool = _Looked(), make_pool(2)
    looks: list[float] = []

    def waiting(now: float) -> Waiting:
        looks.append(now)
        return {}

    async with (
        no_leaks(),
        EndpointWatch(RecentLooks(looked.store), waiting, lambda: {"u": pool}, leads),
    ):
        await until(lambda: len(looks) > 1)  # what was counted before the first one is not known
        looked.serve(20, seconds=2.0)
        looked.serve(20, endpoint=("u", "http://1"))
        await until(lambda: _states(pool.snapshot()) == ["slow", "in_use"])
        yield


async def test_worker_that_begins_to_lead_logs_the_states_of_that_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.app.endpoint_watch._INTERVAL", 0.01)
    caplog.set_level(logging.WARNING)
    leads = False
    async with _slow_endpoint_is_seen(lambda: leads):
        assert not [each for each in caplog.messages if "is slow" in each]
        leads = True
        await until(lambda: [each for each in caplog.messages if "is slow" in each])
    assert len([each for each in caplog.messages if "is slow" in each]) == 1


def _states(snapshot: Iterable[object]) -> list[str]:
    return [str(getattr(each, "state", "")) for each in snapshot]
