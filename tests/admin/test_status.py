"""The status of several workers is shown as one: sums, and the worse where they differ."""

from typing import Any

import pytest

from gateway.admin.status import merge_statuses
from gateway.build_info import COMPILED, NATIVE
from gateway.observe.call_metrics import CALL_FAMILIES, ENDPOINT_LATENCY, SERVER_DURATION
from gateway.observe.gateway_metrics import ENDPOINT_FAILURES, GATEWAY_FAMILIES
from gateway.observe.metric_store import MetricStore
from tests.admin.site import URL, endpoint, sampled

DIALECT = {"name": "triton", "reason": "configured"}
PROTOCOL = {"name": "http", "reason": "dialect triton takes binary tensors over HTTP"}


def _status(pid: int, *endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    upstream = {
        "required": True,
        "healthy": None,
        "unreachable_reason": None,
        "dialect": DIALECT,
        "inference_protocol": PROTOCOL,
        "concurrency": {"active": 1, "queued": 2, "max_requests": 4},
        "endpoints": list(endpoints),
    }
    upstream |= fields.pop("upstream", {})
    return {
        "pid": pid,
        "time": 0.0,
        "draining": False,
        "settings": {"last_failure": None, "number": pid},
        "connections": 3,
        "tls_handshakes": 4,
        "requests_in_progress": 2,
        "tasks": 5,
        "bodies_in_transit": 1,
        "buffered_bytes": 100,
        "event_loop_lag": None,
        "concurrency": None,
        "process": {"process_open_fds": 10.0, "process_start_time_seconds": float(pid)},
        "upstreams": {"u": upstream},
    } | fields


def _store() -> MetricStore:
    return MetricStore(CALL_FAMILIES + GATEWAY_FAMILIES, 2)


def _merged_endpoint(*states: dict[str, Any]) -> dict[str, Any]:
    statuses = [_status(pid, state) for pid, state in enumerate(states)]
    (merged,) = merge_statuses(statuses, _store())["upstreams"]["u"]["endpoints"]
    assert isinstance(merged, dict)
    return merged


def test_numbers_are_sums() -> None:
    merged = merge_statuses([_status(1, endpoint()), _status(2, endpoint())], _store())
    assert (merged["connections"], merged["tls_handshakes"]) == (6, 8)
    assert merged["requests_in_progress"] == 4
    assert (merged["tasks"], merged["buffered_bytes"]) == (10, 200)
    assert merged["bodies_in_transit"] == 2
    assert merged["concurrency"] is None
    assert merged["process"] == {"process_open_fds": 20, "process_start_time_seconds": 1}
    upstream = merged["upstreams"]["u"]
    assert upstream["concurrency"] == {"active": 2, "queued": 4, "max_requests": 8}
    (both,) = upstream["endpoints"]
    assert both["requests_in_progress"] == 2
    assert [worker["pid"] for worker in merged["workers"]] == [1, 2]
    assert all(worker["seconds_since_update"] > 1e9 for worker in merged["workers"])


def test_the_form_of_the_gateway_is_shown() -> None:
    merged = merge_statuses([_status(1)], _store())
    assert (merged["compiled"], merged["native"]) == (COMPILED, NATIVE)


def test_the_worse_settings_are_shown() -> None:
    bad = {"last_failure": "nonsense: unknown key", "number": 7}
    for settings in ([{}, {"settings": bad}], [{"settings": bad}, {}]):
        statuses = [_status(pid, **fields) for pid, fields in enumerate(settings)]
        assert merge_statuses(statuses, _store())["settings"] == bad


def test_gateway_drains_if_a_worker_does() -> None:
    statuses = [_status(1), _status(2, draining=True)]
    assert merge_statuses(statuses, _store())["draining"] is True


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(None, None, None), (True, None, True), (True, False, False), (None, False, False)],
)
def test_endpoint_is_healthy_if_all_workers_find_it_so(
    one: bool | None, other: bool | None, expected: bool | None
) -> None:
    results = {None: "", True: "fine", False: "GET / returned 503"}
    states = [endpoint(healthy=each, health_check_result=results[each]) for each in (one, other)]
    merged = _merged_endpoint(*states)
    assert merged["healthy"] is expected
    assert merged["health_check_result"] == results[expected]
    upstreams = [_status(1, upstream={"healthy": each}) for each in (one, other)]
    assert merge_statuses(upstreams, _store())["upstreams"]["u"]["healthy"] is expected


def test_endpoint_is_ejected_if_a_worker_ejects_it() -> None:
    ejected = endpoint(
        consecutive_failures=5, consecutive_ejections=2, ejection_remaining_seconds=7.5
    )
    for states in ((ejected, endpoint()), (endpoint(), ejected)):
        merged = _merged_endpoint(*states)
        assert (merged["consecutive_failures"], merged["consecutive_ejections"]) == (5, 2)
        assert merged["ejection_remaining_seconds"] == 7.5


def test_last_error_of_all_workers_is_shown() -> None:
    early = endpoint(last_error="early", last_error_at="2026-01-01T00:00:00.000+00:00")
    late = endpoint(last_error="late", last_error_at="2026-01-01T00:00:00.001+00:00")
    for states in ((early, late, endpoint()), (endpoint(), late, early)):
        assert _merged_endpoint(*states)["last_error"] == "late"


def test_what_one_worker_knows_is_shown() -> None:
    unknown = {
        "dialect": {"name": None, "reason": "cannot connect"},
        "inference_protocol": {"name": None, "reason": "the dialect is not known"},
    }
    known = endpoint(models=["m"], dialect=DIALECT)
    statuses = [_status(1, endpoint(), upstream=unknown), _status(2, known)]
    upstream = merge_statuses(statuses, _store())["upstreams"]["u"]
    assert upstream["dialect"] == DIALECT
    assert upstream["inference_protocol"] == PROTOCOL
    assert (upstream["endpoints"][0]["models"], upstream["endpoints"][0]["dialect"]) == (
        ["m"],
        DIALECT,
    )


def test_endpoints_and_upstreams_that_one_worker_has_are_shown() -> None:
    """Workers find the addresses of a name, and take a reload, at different times."""
    other = _status(2, endpoint(url="http://h:2"))
    other["upstreams"]["new"] = other["upstreams"]["u"]
    merged = merge_statuses([_status(1, endpoint()), other], _store())["upstreams"]
    assert {name: [each["url"] for each in merged[name]["endpoints"]] for name in merged} == {
        "u": [URL, "http://h:2"],
        "new": ["http://h:2"],
    }


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("in_use", "failing", "failing"),
        ("unreachable", "failing", "unreachable"),
        ("draining", "in_use", "in_use"),
        ("slow", "ejected", "ejected"),
    ],
)
def test_worst_state_that_a_worker_finds_is_shown(one: str, other: str, expected: str) -> None:
    states = [endpoint(state=each, state_text=f"it is {each}") for each in (one, other)]
    for order in (states, states[::-1]):
        merged = _merged_endpoint(*order)
        assert (merged["state"], merged["state_text"]) == (expected, f"it is {expected}")


def test_first_worker_tells_since_when_and_the_one_with_most_failures_why() -> None:
    early, late = "2026-01-01T00:00:00.000+00:00", "2026-01-01T00:00:00.001+00:00"
    few = endpoint(
        state="failing", state_text="3 failures", consecutive_failures=3, state_since=early
    )
    many = endpoint(
        state="failing", state_text="9 failures", consecutive_failures=9, state_since=late
    )
    for states in ((few, many), (many, few)):
        merged = _merged_endpoint(*states)
        assert (merged["state_text"], merged["state_since"]) == ("9 failures", early)


def test_worker_that_first_finds_an_endpoint_slow_names_the_model() -> None:
    """Each worker names one of several slow models, and keeps to it."""
    early, late = (
        endpoint(state="slow", state_text=text, latency_outlier=text, state_since=f"2026-01-0{day}")
        for day, text in ((1, "its calls of a"), (2, "its calls of longer"))
    )
    late["consecutive_failures"] = 1
    for states in ((early, late), (late, early)):
        merged = _merged_endpoint(*states)
        assert merged["state_text"] == merged["latency_outlier"] == "its calls of a"


def test_worker_whose_calls_failed_tells_why_the_upstream_is_unreachable() -> None:
    own = _status(1, endpoint(consecutive_failures=3), upstream={"unreachable_reason": "refused"})
    other = _status(2, endpoint(), upstream={"unreachable_reason": "another worker cannot"})
    for statuses in ([own, other], [other, own]):
        upstream = merge_statuses(statuses, _store())["upstreams"]["u"]
        assert upstream["unreachable_reason"] == "refused"


def test_percentiles_are_those_of_the_last_minute() -> None:
    """They are exact to 2 %, over all models, and say of how many seconds they are."""
    store = _store()
    writer = store.writer(0)

    def serve(seconds: float, times: int, model: str) -> None:
        for _ in range(times):
            writer.histogram(ENDPOINT_LATENCY, ("u", URL, model)).observe(seconds)

    def count() -> None:
        serve(2.0, 60, "m")
        serve(0.3, 39, "n")
        serve(0.0071, 1, "")

    serve(9.0, 10_000, "m")
    minute = sampled(store, count, 42.0).minute
    (found,) = merge_statuses([_status(1, endpoint())], store, minute)["upstreams"]["u"][
        "endpoints"
    ]
    assert found["duration_window_seconds"] == 42
    assert found["duration_ms"] == {
        "p50": pytest.approx(2000, rel=0.02),
        "p90": pytest.approx(2000, rel=0.02),
        "p95": pytest.approx(2000, rel=0.02),
        "p99": pytest.approx(2000, rel=0.02),
    }
    (idle,) = merge_statuses([_status(1, endpoint(url="http://h:2"))], store, minute)["upstreams"][
        "u"
    ]["endpoints"]
    assert idle["duration_ms"] is None


def test_calls_and_failures_are_those_that_all_workers_have_counted() -> None:
    store = _store()
    for segment in range(2):
        writer = store.writer(segment)
        writer.histogram(SERVER_DURATION, ("u", URL)).observe(0.004)
        for kind in ("5xx", "unreachable")[: segment + 1]:
            writer.counter(ENDPOINT_FAILURES, ("u", URL, kind)).add(1.0)
    merged = merge_statuses([_status(1, endpoint())], store)
    (found,) = merged["upstreams"]["u"]["endpoints"]
    assert found["calls_total"] == 3  # with one that could not connect
    assert found["failures"] == {"5xx": 2, "unreachable": 1}
    assert found["failures_total"] == 3
