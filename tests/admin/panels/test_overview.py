"""What is wrong with a gateway, in sentences for operators."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.admin.history import Window
from gateway.admin.panels.overview import describe_overview, find_problems
from gateway.admin.status import State, merge_statuses
from gateway.observe import families
from gateway.observe.metric_store import MetricStore
from tests.admin.site import (
    SINCE,
    URL,
    endpoint,
    make_settings,
    make_store,
    sampled,
    upstream,
    worker_status,
)

REFUSED = "cannot connect to http://h:1: Connection refused"
AT = datetime.fromisoformat(SINCE).timestamp()
FULL = {"active": 8, "queued": 2, "max_requests": 8}
MOST = make_settings().limits.max_buffered_bytes

Problem = tuple[str, str, str | None, str | None, str, str | None]


def _merged(*statuses: dict[str, Any]) -> dict[str, Any]:
    return merge_statuses(statuses or [worker_status()], make_store())


def _problems(*statuses: dict[str, Any], window: Window | None = None) -> list[Problem]:
    found = find_problems(_merged(*statuses), window, make_settings())
    names = ("level", "panel", "upstream", "endpoint", "text", "since")
    return [tuple(each[name] for name in names) for each in found]


def _texts(*statuses: dict[str, Any], window: Window | None = None) -> list[str]:
    return [each[4] for each in _problems(*statuses, window=window)]


def _of(*endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return worker_status({"u": upstream(*endpoints, **fields)})


def _window(count: Callable[[MetricStore], None], seconds: float = 10) -> Window | None:
    store = make_store()
    return sampled(store, lambda: count(store), seconds).now


def _call(store: MetricStore, times: float, status: str = "2xx", upstream: str = "u") -> None:
    histogram = store.writer(0).histogram(
        families.DURATION, ("r", "infer", "m", upstream, "", status)
    )
    for _ in range(round(times)):
        histogram.observe(0.01)


def _state(state: str, text: str = "") -> dict[str, Any]:
    return endpoint(state=state, state_text=text)


def _drained(count: int, of: int) -> list[dict[str, Any]]:
    """Return endpoints of which some are drained: the last one of these since the first time."""
    fields: dict[str, Any] = {"drained": True, "state": "drained", "healthy": False}
    return [
        endpoint(url=f"http://h:{port}", state_since=f"2026-01-01T12:00:0{9 - port}", **fields)
        if port < count
        else endpoint(url=f"http://h:{port}")
        for port in range(of)
    ]


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        # endpoints
        (
            _of(_state("ejected", "ejected for 30 s: x")),
            ("error", "topology", "u", URL, f"{URL} of u is ejected for 30 s: x", SINCE),
        ),
        (
            _of(_state("failing", "5 of 9 failed"), required=False),
            ("warning", "topology", "u", URL, f"{URL} of u is failing: 5 of 9 failed", SINCE),
        ),
        (
            _of(_state("slow", "2 s, and 2 ms")),
            ("warning", "topology", "u", URL, f"{URL} of u is slow: 2 s, and 2 ms", SINCE),
        ),
        (_of(_state("in_use", REFUSED)), None),
        # upstreams
        (
            _of(endpoint(), unreachable_reason=REFUSED),
            ("error", "topology", "u", None, f"no endpoint of u can be used: {REFUSED}", None),
        ),
        (
            _of(endpoint(), dialect={"name": None, "reason": REFUSED}),
            ("warning", "topology", "u", None, f"the dialect of u is not known: {REFUSED}", None),
        ),
        (_of(), ("error", "topology", "u", None, "u has no endpoint", None)),
        # What operators drained, whatever else is wrong with it.
        *(
            (
                _of(*_drained(count, of)),
                (level, "topology", "u", None, f"operators have drained {what} of u", since),
            )
            for count, of, level, what, since in (
                (1, 1, "error", "the only endpoint", "2026-01-01T12:00:09"),
                (3, 3, "error", "all endpoints", "2026-01-01T12:00:07"),
                (1, 3, "warning", "1 of 3 endpoints", "2026-01-01T12:00:09"),
            )
        ),
        # limits
        (
            _of(endpoint(), concurrency={"active": 8, "queued": 1, "max_requests": 8}),
            ("warning", "topology", "u", None, "1 call waits for one of the 8 slots of u", None),
        ),
        (
            _of(endpoint(), concurrency={"active": 1, "queued": 12, "max_requests": 1}),
            ("warning", "topology", "u", None, "12 calls wait for the only slot of u", None),
        ),
        (
            worker_status(concurrency=FULL),
            (
                *("warning", "topology", None, None),
                *("2 calls wait for one of the 8 slots of the gateway", None),
            ),
        ),
        (worker_status(concurrency={**FULL, "queued": 0}), None),
        (
            worker_status(buffered_bytes=int(0.95 * MOST)),
            (
                *("warning", "overview", None, None),
                *("bodies take 95% of the memory for them (limits.max_buffered_bytes)", None),
            ),
        ),
        (worker_status(buffered_bytes=int(0.89 * MOST)), None),
        # the gateway itself
        (
            worker_status(
                settings={"number": 1, "last_failure": "nonsense: unknown key", "failed_at": AT}
            ),
            (
                *("error", "overview", None, None),
                *("newer settings are not in use: nonsense: unknown key", SINCE),
            ),
        ),
    ],
)
def test_problem_has_its_sentence_and_its_time(
    status: dict[str, Any], problem: Problem | None
) -> None:
    assert _problems(status | {"time": time.time()}) == ([problem] if problem else [])


def test_one_cause_is_one_problem() -> None:
    """Endpoints, dialect, errors and queue of an upstream that cannot be used are no others."""

    def count(store: MetricStore) -> None:
        _call(store, 50, "5xx")
        _call(store, 50, "2xx", "v")

    window = _window(count)
    unknown = {"name": None, "reason": REFUSED}
    queue = {"active": 1, "queued": 3, "max_requests": 1}
    ill, well = _state("unreachable", REFUSED), upstream(endpoint())
    down = upstream(ill, unreachable_reason=REFUSED, dialect=unknown, concurrency=queue)
    ((*_, text, since),) = _problems(worker_status({"u": down, "v": well}), window=window)
    assert (text, since) == (f"no endpoint of u can be used: {REFUSED}", SINCE)
    some = worker_status({"u": upstream(ill, dialect=unknown), "v": well})
    of_endpoint = f"{URL} of u is unreachable: {REFUSED}"
    assert _texts(some, window=window) == [of_endpoint]
    assert _texts(worker_status({"u": well, "v": well}), window=window) == [
        "50% of the calls of the last seconds failed"
    ]
    other = worker_status({"u": well, "v": upstream(ill)})
    assert _texts(other, window=window)[1:] == [
        "100% of the other calls of the last seconds failed"
    ]


@pytest.mark.parametrize(
    ("limits", "fields", "text"),
    [
        (
            {("concurrency", ""): 38, ("queue_timeout", ""): 2},
            {"concurrency": FULL},
            "40 calls of the last seconds did not get one of the 8 slots of the gateway",
        ),
        (
            {("memory", ""): 40, ("mirror_memory", ""): 5},
            {"buffered_bytes": 10**12},
            "40 calls of the last seconds found no memory (limits.max_buffered_bytes)",
        ),
        (
            {("concurrency", "u"): 40},
            {"upstreams": {"u": upstream(endpoint(), concurrency={**FULL, "max_requests": 1})}},
            "40 calls of the last seconds did not get the only slot of u",
        ),
    ],
)
def test_calls_that_a_limit_refuses_are_one_problem(
    limits: dict[tuple[str, str], int], fields: dict[str, Any], text: str
) -> None:
    def count(store: MetricStore, others: int) -> None:
        for slot, (labels, calls) in enumerate(limits.items()):
            store.writer(slot).counter(families.REFUSALS, labels).add(calls)
        _call(store, 40, "5xx")
        _call(store, others, "5xx", "v")
        _call(store, others, "2xx", "v")

    full = worker_status(**fields)
    assert _texts(full, window=_window(lambda store: count(store, 0))) == [text]
    others = "50% of the other calls of the last seconds failed"
    assert set(_texts(full, window=_window(lambda store: count(store, 10)))) == {others, text}


@pytest.mark.parametrize(
    ("seconds_ago", "texts"), [(5, []), (30, ["50% of the calls of the last seconds failed"])]
)
def test_calls_that_failed_before_their_upstream_recovered_are_no_problem(
    seconds_ago: float, texts: list[str]
) -> None:
    def count(store: MetricStore) -> None:
        _call(store, 10, "5xx")
        _call(store, 10)

    since = datetime.fromtimestamp(time.time() - seconds_ago, UTC).isoformat()
    assert _texts(_of(endpoint(state_since=since)), window=_window(count)) == texts


@pytest.mark.parametrize(
    ("good", "bad", "seconds", "text"),
    [
        (900, 100, 10, "10% of the calls of the last seconds failed"),
        (0, 30, 10, "100% of the calls of the last seconds failed"),
        (990, 10, 10, None),
        (0, 0, 10, None),
        (0, 1, 20, None),  # a call that fails now and then
    ],
)
def test_errors_are_reported_if_they_are_many(
    good: int, bad: int, seconds: float, text: str | None
) -> None:
    def count(store: MetricStore) -> None:
        _call(store, good)
        _call(store, bad, "5xx")

    assert _texts(window=_window(count, seconds)) == ([text] if text else [])


def test_lines_that_are_missing_in_the_log_are_reported() -> None:
    window = _window(lambda store: store.writer(1).counter(families.DROPPED_LOG_LINES).add(3))
    text = "3 lines of the access log of the last seconds could not be written"
    assert _problems(window=window) == [("warning", "overview", None, None, text, None)]


def test_workers_that_lag_or_hang_are_reported_with_their_time() -> None:
    def lagging(pid: int, since: float) -> dict[str, Any]:
        lag = {"text": "lags by 140 ms and uses 97% of a core", "since": since}
        return worker_status(pid=pid, event_loop_lag=lag)

    text = "the event loop of worker 7 lags by 140 ms and uses 97% of a core"
    warning = ("warning", "overview", None, None)
    one = lagging(7, AT)
    assert _problems(one, worker_status(pid=8)) == [(*warning, text, SINCE)]
    two = f"{text}; those of 2 workers lag"
    assert _problems(one, lagging(8, AT + 100)) == [(*warning, two, SINCE)]
    now = time.time()
    hanging = worker_status(pid=7, time=now - 61.7), worker_status(pid=8, time=now - 4)
    assert _texts(*hanging) == ["worker 7 has not said anything for 62 s"]
    assert [each[5] for each in _problems(worker_status(time=AT))] == [SINCE]


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
    events = [
        {
            "kind": kind[0] if kind else "worker_ended",
            "time": time.time() - seconds_ago,
            "subject": f"worker {pid}",
            "why": "was killed by SIGKILL",
        }
        for pid, seconds_ago, *kind in ended
    ]
    status = merge_statuses([worker_status()], make_store(), events=events)
    found = find_problems(status, None, make_settings())
    assert [each["text"] for each in found] == ([text] if text else [])
    for each in found:
        assert each["since"] == status["ended_processes"][-1]["ended_at"]


def test_errors_come_before_warnings_and_there_are_at_most_fifty() -> None:
    states = [endpoint(url=f"http://h:{port}", state="slow") for port in range(80)]
    problems = _problems(_of(*states, endpoint(url="http://bad:1", state="unhealthy")))
    assert [each[0] for each in problems] == ["error"] + ["warning"] * 49
    assert problems[0][3] == "http://bad:1"


def test_overview_tells_rates_and_workers() -> None:
    store = make_store()

    def count() -> None:
        writer = store.writer(1)
        writer.counter(families.REQUEST_BYTES, ("r",)).add(1000)
        writer.counter(families.REQUEST_BYTES, ("s",)).add(500)
        writer.counter(families.RESPONSE_BYTES, ("r",)).add(20)
        _call(store, 1)
        writer.histogram(families.CALL_LATENCY, ("m",)).observe(0.01)

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
