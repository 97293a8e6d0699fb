"""Logs of failed calls and of failing mirrors, at a limited rate."""

import logging
from collections.abc import Callable

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import FailureLog
from gateway.observe.families import FAMILIES, MIRROR_REQUESTS
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.observe.metric_store import MetricStore
from gateway.observe.mirror_stats import LOG_INTERVAL, MirrorStats
from tests.support.doubles.clock import Clock

REFUSED = GatewayError(ErrorKind.UNREACHABLE, "cannot connect to http://a: Connection refused")
LATE = GatewayError(ErrorKind.SERVER_TIMEOUT, "http://a: nothing moved for 10 s")


def test_message_is_logged_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = FailureLog(clock.time)
    for _ in range(50):
        log.write(REFUSED, "1f")
    log.write(LATE)
    clock.advance(10)
    log.write(REFUSED, "2f")
    assert caplog.messages == [
        f"request 1f failed with 503: {REFUSED.message}",
        f"request - failed with 504: {LATE.message}",
        "49 more calls failed within 10 s",
        f"request 2f failed with 503: {REFUSED.message}",
    ]


def test_number_of_calls_that_are_not_logged_is_written_when_the_ten_seconds_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = FailureLog(clock.time)
    for _ in range(3):
        log.write(REFUSED)
    clock.advance(9.9)
    log.flush_if_due()
    assert len(caplog.messages) == 1
    clock.advance(0.1)
    log.flush_if_due()
    log.flush_if_due()
    log.write(REFUSED)
    assert caplog.messages[1:2] == ["2 more calls failed within 10 s"]
    assert len(caplog.messages) == 3


def test_number_of_different_messages_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = FailureLog(clock.time)
    for number in range(1000):
        log.write(GatewayError(ErrorKind.BAD_RESPONSE, f"http://a returned {number} bytes"))
    assert len(caplog.messages) == 20
    clock.advance(10)
    log.write(REFUSED)
    assert caplog.messages[20].startswith("980 more calls failed")


def test_messages_that_differ_by_numbers_have_one_cause(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog(Clock().time)
    for size in range(100):
        log.write(GatewayError(ErrorKind.EXHAUSTED, f"{size} bytes are too many", cause="memory"))
    assert caplog.messages == ["request - failed with 503: 0 bytes are too many"]


@pytest.mark.parametrize("kind", [ErrorKind.BAD_REQUEST, ErrorKind.NOT_READY, ErrorKind.INTERNAL])
def test_errors_of_clients_health_checks_and_the_gateway_are_not_logged(
    kind: ErrorKind, caplog: pytest.LogCaptureFixture
) -> None:
    FailureLog(Clock().time).write(GatewayError(kind, "why"))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("status", "grpc_status", "error", "is_logged"),
    [
        (500, -1, "", True),
        (500, 13, "", True),
        (501, 12, "", False),
        (504, 4, "", False),
        (400, -1, "", False),
        (200, -1, "", False),
        (502, -1, "the gateway says why", False),
    ],
)
def test_server_error_is_logged_in_its_words(
    caplog: pytest.LogCaptureFixture, status: int, grpc_status: int, error: str, is_logged: bool
) -> None:
    record = CallRecord("GET", "/x", "1f")
    record.set_endpoint("servers", "http://a")
    record.status, record.grpc_status, record.error = status, grpc_status, error
    record.server_error = f"{status}: no\nmemory"
    log = FailureLog(Clock().time)
    for _ in range(3):
        log.observe(record)
    line = f"request 1f failed with {status}: http://a returned {status}: no\\nmemory"
    assert caplog.messages == [line] * is_logged


# Mirrors

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


def test_failures_are_logged_once_a_minute(told: Callable[[], list[str]]) -> None:
    clock = Clock()
    stats = MirrorStats("shadow", clock.time)
    stats.count_sent("")
    stats.count_sent("it is down")
    assert told() == ["1 of 2 requests failed, last: it is down"]
    for number in range(99):
        stats.count_sent(f"down for {number}" if number < 37 else "")
    clock.advance(LOG_INTERVAL - 0.1)
    stats.count_sent("")
    assert told() == []
    # Logged when it is due, although the mirror works again.
    clock.advance(0.1)
    stats.count_sent("")
    assert told() == ["37 of 101 requests failed, last: down for 36"]
    clock.advance(10 * LOG_INTERVAL)
    stats.count_sent("")
    assert told() == []
    # After a quiet time, the next failure is logged at once; successes since then count too.
    stats.count_sent("again")
    assert told() == ["1 of 2 requests failed, last: again"]


def test_skipped_requests_are_logged(told: Callable[[], list[str]]) -> None:
    clock = Clock()
    stats = MirrorStats("shadow", clock.time)
    stats.count_skipped("too large")
    assert told() == ["0 of 0 requests failed, 1 were not sent, last: too large"]
    stats.count_skipped("too large")
    stats.count_sent("it is down")
    stats.count_skipped("too many")
    clock.advance(LOG_INTERVAL)
    stats.count_sent("")
    assert told() == ["1 of 2 requests failed, 2 were not sent, last: too many"]


def test_rejected_requests_are_counted_and_logged_apart(told: Callable[[], list[str]]) -> None:
    store = MetricStore(FAMILIES)
    metrics = GatewayMetrics(store.writer(0)).mirror("r", "shadow")
    stats = MirrorStats("shadow", Clock().time, metrics)
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
    stats = MirrorStats("shadow", Clock().time)
    for number in range(3):
        stats.count_sent(f"down for {number}")
    assert told() == ["1 of 1 requests failed, last: down for 0"]
    stats.flush()
    stats.flush()
    assert told() == ["2 of 2 requests failed, last: down for 2"]


def test_each_failure_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    stats = MirrorStats("shadow", Clock().time)
    for failure in ("", "it is\ndown", "it is\ndown"):
        stats.count_sent(failure)
    stats.count_skipped("too large")
    debug = [each.message for each in caplog.records if each.levelno == logging.DEBUG]
    assert any(each.endswith(r"last: it is\ndown") for each in caplog.messages)
    failed = [r"failed: it is\ndown"] * 2 + ["was not sent: too large"]
    assert debug == [f"a request to the mirror 'shadow' {each}" for each in failed]
