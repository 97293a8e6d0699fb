"""What is wrong with a gateway, in sentences for operators."""

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from gateway.admin.history import Window
from gateway.admin.panels.overview import describe_overview, find_problems
from gateway.admin.status import State, merge_statuses
from gateway.observe.call_metrics import CALL_LATENCY, DURATION, REQUEST_BYTES, RESPONSE_BYTES
from gateway.observe.gateway_metrics import DROPPED_LOG_LINES, REFUSALS
from tests.admin.site import (
    SINCE,
    endpoint,
    make_settings,
    make_store,
    sampled,
    upstream,
    worker_status,
)

REFUSED = "cannot connect to http://h:1: Connection refused"


def _merged(*statuses: dict[str, Any]) -> dict[str, Any]:
    return merge_statuses(statuses or [worker_status()], make_store())


def _problems(
    *statuses: dict[str, Any], window: Window | None = None
) -> list[tuple[str, str, str | None, str | None, str]]:
    found = find_problems(_merged(*statuses), window, make_settings())
    names = ("level", "panel", "upstream", "endpoint", "text")
    return [tuple(each[name] for name in names) for each in found]


def _of(state: dict[str, Any], **fields: Any) -> list[tuple[str, str, str | None, str | None, str]]:
    return _problems(worker_status({"u": upstream(state, **fields)}))


def test_nothing_is_wrong_with_a_gateway_in_use() -> None:
    assert _problems() == []


@pytest.mark.parametrize(
    ("state", "why", "level", "text"),
    [
        ("ejected", "ejected for 30 s: x", "error", "http://h:1 of u is ejected for 30 s: x"),
        ("unhealthy", "its check fails", "error", "http://h:1 of u is unhealthy: its check fails"),
        ("unreachable", REFUSED, "error", f"http://h:1 of u is unreachable: {REFUSED}"),
        ("failing", "5 of 9 failed", "error", "http://h:1 of u is failing: 5 of 9 failed"),
        ("slow", "2 s, and 2 ms", "warning", "http://h:1 of u is slow: 2 s, and 2 ms"),
    ],
)
def test_endpoint_that_is_not_well_is_reported_with_its_state_and_its_time(
    state: str, why: str, level: str, text: str
) -> None:
    ill = endpoint(state=state, state_text=why)
    assert _of(ill) == [(level, "topology", "u", "http://h:1", text)]
    status = _merged(worker_status({"u": upstream(ill)}))
    (found,) = find_problems(status, None, make_settings())
    assert found["since"] == SINCE
    (optional,) = _of(ill, required=False)
    assert optional[0] == "warning"


@pytest.mark.parametrize("state", ["in_use", "draining"])
def test_endpoint_that_leaves_or_has_recovered_is_no_problem(state: str) -> None:
    assert _of(endpoint(state=state, consecutive_failures=2, last_error=REFUSED)) == []


def test_upstream_that_is_not_required_is_a_warning() -> None:
    for fields in ({"unreachable_reason": REFUSED}, {}):
        endpoints = [endpoint()] if fields else []
        problems = _problems(worker_status({"u": upstream(*endpoints, required=False, **fields)}))
        assert [each[0] for each in problems] == ["warning"]


def test_one_cause_is_one_problem() -> None:
    """Endpoints, dialect, errors and queue of an upstream that cannot be used are no others."""
    store = make_store()

    def count() -> None:
        for name, status, calls in (("u", "5xx", 50), ("v", "2xx", 50)):
            labels = ("r", "infer", "m", name, "", status)
            for _ in range(calls):
                store.writer(0).histogram(DURATION, labels).observe(0.01)

    window = sampled(store, count).now
    unknown = {"name": None, "reason": REFUSED}
    queue = {"active": 1, "queued": 3, "max_requests": 1}
    ill = endpoint(state="unreachable", state_text=REFUSED)
    well = upstream(endpoint())
    down = upstream(ill, unreachable_reason=REFUSED, dialect=unknown, concurrency=queue)
    (found,) = _problems(worker_status({"u": down, "v": well}), window=window)
    assert found[4] == f"no endpoint of u can be used: {REFUSED}"
    (problem,) = find_problems(_merged(worker_status({"u": down})), None, make_settings())
    assert problem["since"] == SINCE
    (found,) = _problems(
        worker_status({"u": upstream(ill, dialect=unknown), "v": well}), window=window
    )
    assert found[3] == "http://h:1"
    (found,) = _problems(worker_status({"u": well, "v": well}), window=window)
    assert found[4] == "50% of the calls of the last seconds failed"
    other, found = _problems(worker_status({"u": well, "v": upstream(ill)}), window=window)
    assert (other[3], found[4]) == (
        "http://h:1",
        "100% of the other calls of the last seconds failed",
    )


@pytest.mark.parametrize(
    ("fields", "level", "text"),
    [
        ({"unreachable_reason": REFUSED}, "error", f"no endpoint of u can be used: {REFUSED}"),
        (
            {"dialect": {"name": None, "reason": REFUSED}},
            "warning",
            f"the dialect of u is not known: {REFUSED}",
        ),
        (
            {"concurrency": {"active": 8, "queued": 1, "max_requests": 8}},
            "warning",
            "1 call waits for one of the 8 slots of u",
        ),
        (
            {"concurrency": {"active": 1, "queued": 12, "max_requests": 1}},
            "warning",
            "12 calls wait for the only slot of u",
        ),
    ],
)
def test_upstream_that_is_not_well_is_reported(
    fields: dict[str, Any], level: str, text: str
) -> None:
    assert _of(endpoint(), **fields) == [(level, "topology", "u", None, text)]


def test_upstream_without_endpoints_is_reported() -> None:
    found = _problems(worker_status({"u": upstream()}))
    assert found == [("error", "topology", "u", None, "u has no endpoint")]


@pytest.mark.parametrize(
    ("drained", "of", "level", "text"),
    [
        (1, 1, "error", "operators have drained the only endpoint of u"),
        (3, 3, "error", "operators have drained all endpoints of u"),
        (1, 3, "warning", "operators have drained 1 of 3 endpoints of u"),
    ],
)
def test_endpoints_that_operators_drained_are_counted(
    drained: int, of: int, level: str, text: str
) -> None:
    """Whatever else is wrong with them. The problem is there since the first was drained."""
    fields: dict[str, Any] = {"drained": True, "state": "drained", "healthy": False}
    states = [
        endpoint(url=f"http://h:{port}", state_since=f"2026-01-01T12:00:0{9 - port}", **fields)
        if port < drained
        else endpoint(url=f"http://h:{port}")
        for port in range(of)
    ]
    status = worker_status({"u": upstream(*states)})
    assert _problems(status) == [(level, "topology", "u", None, text)]
    (problem,) = find_problems(_merged(status), None, make_settings())
    assert problem["since"] == f"2026-01-01T12:00:0{10 - drained}"


def test_limit_of_the_gateway_is_reported() -> None:
    (found,) = _problems(worker_status(concurrency={"active": 8, "queued": 2, "max_requests": 8}))
    assert found[4] == "2 calls wait for one of the 8 slots of the gateway"
    assert _problems(worker_status(concurrency={"active": 8, "queued": 0, "max_requests": 8})) == []


def test_calls_that_a_limit_refuses_are_one_problem() -> None:
    store = make_store()

    def count() -> None:
        store.writer(0).counter(REFUSALS, ("concurrency", "u")).add(7)
        store.writer(1).counter(REFUSALS, ("queue_timeout", "u")).add(2)
        store.writer(0).counter(REFUSALS, ("mirror_memory", "")).add(5)
        for _ in range(9):
            labels = ("r", "infer", "m", "u", "", "5xx")
            store.writer(0).histogram(DURATION, labels).observe(0.01)

    limit = {"active": 1, "queued": 3, "max_requests": 1}
    busy = worker_status({"u": upstream(endpoint(), concurrency=limit)})
    assert _problems(busy, window=sampled(store, count).now) == [
        (
            "error",
            "topology",
            "u",
            None,
            "9 calls of the last seconds did not get the only slot of u",
        )
    ]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (
            "queue_timeout",
            "40 calls of the last seconds did not get one of the 8 slots of the gateway",
        ),
        ("memory", "40 calls of the last seconds found no memory (limits.max_buffered_bytes)"),
    ],
)
def test_calls_that_a_limit_of_the_gateway_refuses_are_one_problem(limit: str, text: str) -> None:
    store = make_store()

    def count(others: int) -> None:
        store.writer(0).counter(REFUSALS, (limit, "")).add(40)
        for status, calls in (("5xx", 40 + others), ("2xx", 10)):
            for _ in range(calls):
                labels = ("r", "infer", "m", "u", "", status)
                store.writer(0).histogram(DURATION, labels).observe(0.01)

    full = worker_status(
        concurrency={"active": 8, "queued": 2, "max_requests": 8}, buffered_bytes=10**12
    )
    if limit == "memory":
        full["concurrency"] = None
    else:
        full["buffered_bytes"] = 0
    (found,) = _problems(full, window=sampled(store, partial(count, 0)).now)
    assert (found[0], found[4]) == ("error", text)
    failed, refused = _problems(full, window=sampled(store, partial(count, 10)).now)
    assert failed[4] == "50% of the other calls of the last seconds failed"
    assert refused[4] == text


@pytest.mark.parametrize(
    ("seconds_ago", "texts"),
    [(5, []), (30, ["50% of the calls of the last seconds failed"])],
)
def test_calls_that_failed_before_their_upstream_recovered_are_no_problem(
    seconds_ago: float, texts: list[str]
) -> None:
    store = make_store()

    def count() -> None:
        for status in ("5xx", "2xx"):
            for _ in range(10):
                labels = ("r", "infer", "m", "u", "", status)
                store.writer(0).histogram(DURATION, labels).observe(0.01)

    since = datetime.fromtimestamp(time.time() - seconds_ago, UTC).isoformat()
    status = worker_status({"u": upstream(endpoint(state_since=since))})
    found = _problems(status, window=sampled(store, count).now)
    assert [text for *_, text in found] == texts


def test_lines_that_are_missing_in_the_log_are_reported() -> None:
    store = make_store()
    history = sampled(store, lambda: store.writer(1).counter(DROPPED_LOG_LINES).add(3))
    (found,) = _problems(window=history.now)
    text = "3 lines of the access log of the last seconds could not be written"
    assert found == ("warning", "overview", None, None, text)


def test_event_loops_that_lag_are_one_problem() -> None:
    def lag(since: float) -> dict[str, Any]:
        return {"text": "lags by 140 ms and uses 97% of a core", "since": since}

    one = worker_status(pid=7, event_loop_lag=lag(1767268800.0))
    (found,) = _problems(one, worker_status(pid=8))
    text = "the event loop of worker 7 lags by 140 ms and uses 97% of a core"
    assert found == ("warning", "overview", None, None, text)
    status = _merged(one, worker_status(pid=8, event_loop_lag=lag(1767268900.0)))
    (problem,) = find_problems(status, None, make_settings())
    assert problem["text"] == f"{text}; those of 2 workers lag"
    assert problem["since"] == SINCE


def test_worker_that_hangs_is_reported() -> None:
    now = time.time()
    found = _problems(worker_status(pid=7, time=now - 61.7), worker_status(pid=8, time=now - 4))
    assert found == [
        ("error", "overview", None, None, "worker 7 has not said anything for 62 s"),
    ]


def test_worker_hangs_since_it_last_said_something() -> None:
    (problem,) = find_problems(_merged(worker_status(time=1767268800.0)), None, make_settings())
    assert problem["since"] == SINCE


def test_settings_that_failed_are_reported() -> None:
    failed = {"number": 1, "last_failure": "nonsense: unknown key", "failed_at": 1767268800.0}
    status = _merged(worker_status(settings=failed))
    (found,) = find_problems(status, None, make_settings())
    assert found["text"] == "newer settings are not in use: nonsense: unknown key"
    assert found["since"] == SINCE


def _ended(pid: int, seconds_ago: float, kind: str = "worker_ended") -> dict[str, Any]:
    return {
        "kind": kind,
        "time": time.time() - seconds_ago,
        "subject": f"worker {pid}",
        "why": "was killed by SIGKILL",
    }


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        ([(7, 50)], "worker 7 was killed by SIGKILL; another one takes its place"),
        (
            [(9, 1), (8, 2, "worker_restarted"), (7, 50)],
            "worker 9 was killed by SIGKILL; another one takes its place;"
            " 2 processes have ended in the last minute",
        ),
        ([(7, 61)], None),
    ],
)
def test_processes_that_ended_in_the_last_minute_are_one_problem(
    ended: list[Any], text: str | None
) -> None:
    events = [_ended(*each) for each in ended]
    status = merge_statuses([worker_status()], make_store(), events=events)
    found = list(find_problems(status, None, make_settings()))
    assert [each["text"] for each in found] == ([text] if text else [])
    for each in found:
        assert each["since"] == status["ended_processes"][-1]["ended_at"]


def test_memory_that_is_nearly_full_is_reported() -> None:
    most = make_settings().limits.max_buffered_bytes
    (found,) = _problems(
        worker_status(buffered_bytes=int(0.95 * most)), worker_status(buffered_bytes=0)
    )
    assert found[0] == "warning"
    assert found[4] == "bodies take 95% of the memory for them (limits.max_buffered_bytes)"
    assert _problems(worker_status(buffered_bytes=int(0.89 * most))) == []


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        (90, 10, "10% of the calls of the last seconds failed"),
        (0, 3, "100% of the calls of the last seconds failed"),
        (99, 1, None),
        (0, 0, None),
        (0, 0.5, None),
    ],
)
def test_errors_are_reported_if_they_are_many(good: float, bad: float, text: str | None) -> None:
    """``bad`` may be a call that fails now and then: half of one in ten seconds."""
    store = make_store()

    def count() -> None:
        for status, calls in (("2xx", good), ("5xx", bad)):
            histogram = store.writer(0).histogram(DURATION, ("r", "infer", "m", "u", "", status))
            for _ in range(round(calls * 10 if bad != 0.5 else calls * 1.9)):
                histogram.observe(0.01)

    seconds = 10 if bad != 0.5 else 20
    found = _problems(window=sampled(store, count, seconds).now)
    assert [each[4] for each in found] == ([text] if text else [])


def test_errors_come_before_warnings_and_there_are_at_most_fifty() -> None:
    states = [endpoint(url=f"http://h:{port}", state="slow") for port in range(80)]
    states.append(endpoint(url="http://bad:1", state="unhealthy"))
    status = _merged(worker_status({"u": upstream(*states)}))
    problems = find_problems(status, None, make_settings())
    assert len(problems) == 50
    assert [each["level"] for each in problems] == ["error"] + ["warning"] * 49
    assert problems[0]["endpoint"] == "http://bad:1"


def test_overview_tells_rates_and_workers() -> None:
    store = make_store()

    def count() -> None:
        writer = store.writer(1)
        writer.counter(REQUEST_BYTES, ("r",)).add(1000)
        writer.counter(REQUEST_BYTES, ("s",)).add(500)
        writer.counter(RESPONSE_BYTES, ("r",)).add(20)
        writer.histogram(DURATION, ("r", "infer", "m", "u", "", "2xx")).observe(0.01)
        writer.histogram(CALL_LATENCY, ("m",)).observe(0.01)

    status = _merged(worker_status(pid=1), worker_status(pid=2))
    history = sampled(store, count)
    state = State(1.0, status, history.now, history.minute)
    overview = describe_overview(state, make_settings(), 0.5)
    assert (overview["time"], overview["started_at"]) == (1.0, 0.5)
    assert [each["pid"] for each in overview["workers"]] == [1, 2]
    now = overview["now"]
    assert (now["connections"], now["requests_in_progress"]) == (6, 4)
    assert (now["request_bytes_per_second"], now["response_bytes_per_second"]) == (150, 2)
    assert (now["calls_per_second"], now["error_ratio"]) == (0.1, 0)
    assert now["p99_ms"] == pytest.approx(10, rel=0.02)
    assert now["duration_window_seconds"] == 10
    before = describe_overview(State(1.0, status), make_settings(), 0.5)["now"]
    known = {name: value for name, value in before.items() if value is not None}
    assert known == {"requests_in_progress": 4, "connections": 6, "buffered_bytes": 200}
