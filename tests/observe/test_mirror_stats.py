import logging
from collections.abc import Callable

import pytest

from gateway.observe.gateway_metrics import GATEWAY_FAMILIES, MIRROR_REQUESTS, GatewayMetrics
from gateway.observe.metric_store import MetricStore
from gateway.observe.mirror_stats import LOG_INTERVAL, MirrorStats

START = "mirror to 'shadow': "


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the lines logged since the last call."""
    caplog.set_level(logging.WARNING)

    def take() -> list[str]:
        messages = list(caplog.messages)
        caplog.clear()
        assert all(message.startswith(START) for message in messages)
        return [message.removeprefix(START) for message in messages]

    return take


class _Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_failures_are_logged_once_a_minute(told: Callable[[], list[str]]) -> None:
    time = _Time()
    stats = MirrorStats("shadow", time)
    stats.count_sent("")
    stats.count_sent("it is down")
    assert told() == ["1 of 2 requests failed, last: it is down"]
    for number in range(99):
        stats.count_sent(f"down for {number}" if number < 37 else "")
    time.now += LOG_INTERVAL - 0.1
    stats.count_sent("")
    assert told() == []
    # Logged when it is due, although the mirror works again.
    time.now += 0.1
    stats.count_sent("")
    assert told() == ["37 of 101 requests failed, last: down for 36"]
    time.now += 10 * LOG_INTERVAL
    stats.count_sent("")
    assert told() == []
    # After a quiet time, the next failure is logged at once; successes since then count too.
    stats.count_sent("again")
    assert told() == ["1 of 2 requests failed, last: again"]


def test_skipped_requests_are_logged(told: Callable[[], list[str]]) -> None:
    time = _Time()
    stats = MirrorStats("shadow", time)
    stats.count_skipped("too large")
    assert told() == ["0 of 0 requests failed, 1 were not sent, last: too large"]
    stats.count_skipped("too large")
    stats.count_sent("it is down")
    stats.count_skipped("too many")
    time.now += LOG_INTERVAL
    stats.count_sent("")
    assert told() == ["1 of 2 requests failed, 2 were not sent, last: too many"]


def test_rejected_requests_are_counted_and_logged_apart(told: Callable[[], list[str]]) -> None:
    store = MetricStore(GATEWAY_FAMILIES)
    metrics = GatewayMetrics(store.writer(0)).mirror("r", "shadow")
    stats = MirrorStats("shadow", _Time(), metrics)
    stats.count_sent("the response was 404: ''", 404)
    assert told() == [
        "0 of 1 requests failed, 1 were rejected with 4xx, last: the response was 404: ''"
    ]
    stats.count_sent("the response was 500: ''", 500)
    stats.count_sent("cannot connect")
    stats.count_sent("", 200)
    counts = {result: count for (_, _, result), (count,) in store.sums(MIRROR_REQUESTS).items()}
    assert counts == {"ok": 1, "rejected": 1, "failed": 2, "skipped": 0}


def test_pending_counts_are_logged_at_the_end(told: Callable[[], list[str]]) -> None:
    stats = MirrorStats("shadow", _Time())
    for number in range(3):
        stats.count_sent(f"down for {number}")
    assert told() == ["1 of 1 requests failed, last: down for 0"]
    stats.flush()
    stats.flush()
    assert told() == ["2 of 2 requests failed, last: down for 2"]


def test_each_failure_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    stats = MirrorStats("shadow", _Time())
    for failure in ("", "it is down", "it is down"):
        stats.count_sent(failure)
    stats.count_skipped("too large")
    debug = [each.message for each in caplog.records if each.levelno == logging.DEBUG]
    failed = ["failed: it is down", "failed: it is down", "was not sent: too large"]
    assert debug == [f"a request to the mirror 'shadow' {each}" for each in failed]


def test_line_break_of_a_failure_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    MirrorStats("shadow", _Time()).count_sent("http://a: output 'x\n2026-01-01 ERROR' is unknown")
    assert caplog.messages[-1].endswith(r"last: http://a: output 'x\n2026-01-01 ERROR' is unknown")
