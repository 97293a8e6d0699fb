"""The status of several workers is shown as one: sums, and the worse where they differ."""

from typing import Any

import pytest

from gateway.admin.status import merge_statuses
from gateway.build_info import COMPILED, NATIVE
from gateway.observe import families
from tests.admin.site import URL, endpoint, make_store, upstream, worker_status

DIALECT = {"name": "triton", "reason": "configured"}


def _status(pid: int, *endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    limit = {"active": 1, "queued": 2, "max_requests": 4}
    described = upstream(*endpoints, concurrency=limit, **fields.pop("upstream", {}))
    process = {"process_open_fds": 10.0, "process_start_time_seconds": float(pid)}
    return worker_status({"u": described}, pid=pid, time=0.0, process=process, **fields)


def _merged_endpoint(*states: dict[str, Any]) -> dict[str, Any]:
    statuses = [_status(pid, state) for pid, state in enumerate(states)]
    (merged,) = merge_statuses(statuses, make_store())["upstreams"]["u"]["endpoints"]
    assert isinstance(merged, dict)
    return merged


def test_numbers_are_sums() -> None:
    merged = merge_statuses([_status(1, endpoint()), _status(2, endpoint())], make_store())
    assert (merged["connections"], merged["tls_handshakes"]) == (6, 2)
    assert merged["requests_in_progress"] == 4
    assert (merged["tasks"], merged["buffered_bytes"]) == (10, 200)
    assert merged["bodies_in_transit"] == 2
    assert merged["concurrency"] is None
    assert merged["process"] == {"process_open_fds": 20, "process_start_time_seconds": 1}
    found = merged["upstreams"]["u"]
    assert found["concurrency"] == {"active": 2, "queued": 4, "max_requests": 8}
    (both,) = found["endpoints"]
    assert both["requests_in_progress"] == 2
    assert [worker["pid"] for worker in merged["workers"]] == [1, 2]
    assert all(worker["seconds_since_update"] > 1e9 for worker in merged["workers"])


def test_the_worse_settings_are_shown() -> None:
    bad = {"last_failure": "nonsense: unknown key", "number": 7}
    for settings in ([{}, {"settings": bad}], [{"settings": bad}, {}]):
        statuses = [_status(pid, **fields) for pid, fields in enumerate(settings)]
        assert merge_statuses(statuses, make_store())["settings"] == bad


def test_gateway_drains_if_a_worker_does() -> None:
    merged = merge_statuses([_status(1), _status(2, draining=True)], make_store())
    assert merged["draining"] is True
    assert (merged["compiled"], merged["native"]) == (COMPILED, NATIVE)


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
    assert merge_statuses(upstreams, make_store())["upstreams"]["u"]["healthy"] is expected


def test_endpoint_is_ejected_if_a_worker_ejects_it() -> None:
    ejected = endpoint(
        consecutive_failures=5, consecutive_ejections=2, ejection_remaining_seconds=7.5
    )
    for states in ((ejected, endpoint()), (endpoint(), ejected)):
        merged = _merged_endpoint(*states)
        assert (merged["consecutive_failures"], merged["consecutive_ejections"]) == (5, 2)
        assert merged["ejection_remaining_seconds"] == 7.5


def test_endpoint_is_drained_if_one_worker_drains_it_and_draining_if_all_do() -> None:
    for one, other in ((True, False), (False, True), (True, True)):
        states = [endpoint(drained=each, draining=each) for each in (one, other)]
        merged = _merged_endpoint(*states)
        assert (merged["drained"], merged["draining"]) == (True, one and other)


def test_shared_memory_is_that_of_all_workers_with_a_reason_why_one_has_none() -> None:
    one = {"size": 8, "allocated": 6, "in_use": 4, "quarantined": 1, "why_not": ""}
    other = {"size": 0, "allocated": 0, "in_use": 0, "quarantined": 0, "why_not": "refused"}
    both = {"size": 16, "allocated": 12, "in_use": 8, "quarantined": 2, "why_not": ""}
    for memories, expected in (
        ((None, None), None),
        ((None, one), one),  # a reload, which the first has not taken yet
        ((one, one), both),
        ((one, other), {**one, "why_not": "refused"}),
    ):
        states = [endpoint(shared_memory=each) for each in memories]
        for order in (states, states[::-1]):
            assert _merged_endpoint(*order)["shared_memory"] == expected


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
    found = merge_statuses(statuses, make_store())["upstreams"]["u"]
    assert found["dialect"] == DIALECT
    assert found["inference_protocol"]["name"] == "http"
    assert (found["endpoints"][0]["models"], found["endpoints"][0]["dialect"]) == (["m"], DIALECT)


def test_endpoints_and_upstreams_that_one_worker_has_are_shown() -> None:
    """Workers find the addresses of a name, and take a reload, at different times."""
    other = _status(2, endpoint(url="http://h:2"))
    other["upstreams"]["new"] = other["upstreams"]["u"]
    merged = merge_statuses([_status(1, endpoint()), other], make_store())["upstreams"]
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
        found = merge_statuses(statuses, make_store())["upstreams"]["u"]
        assert found["unreachable_reason"] == "refused"


def test_calls_and_failures_are_those_that_all_workers_have_counted() -> None:
    store = make_store()
    for segment in range(2):
        writer = store.writer(segment)
        writer.histogram(families.SERVER_DURATION, ("u", URL)).observe(0.004)
        for kind in ("5xx", "unreachable")[: segment + 1]:
            writer.counter(families.ENDPOINT_FAILURES, ("u", URL, kind)).add(1.0)
    merged = merge_statuses([_status(1, endpoint())], store)
    (found,) = merged["upstreams"]["u"]["endpoints"]
    assert found["calls_total"] == 3  # with one that could not connect
    assert found["failures"] == {"5xx": 2, "unreachable": 1}
    assert found["failures_total"] == 3
