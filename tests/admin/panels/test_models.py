"""The models: where each is ready, how it is called, and what conversion saves."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from gateway.admin.panels.models import (
    FailedModels,
    Measurement,
    Savings,
    describe_model,
    describe_models,
)
from gateway.observe import families
from gateway.observe.metric_store import OTHER, MetricStore
from tests.admin.site import endpoint, make_store, sampled, state_of, upstream, worker_status

STATUS = worker_status(
    {
        "u": upstream(
            endpoint(url="http://one:1", models=["a", "b"]),
            endpoint(url="http://two:1", models=["b"]),
            endpoint(url="http://three:1", models=None),
        ),
        "v": upstream(endpoint(url="http://four:1", models=["b", "c"])),
    }
)


def _called(
    store: MetricStore, model: str, times: int, form: str = "json", status: str = "2xx"
) -> None:
    labels = "r", "infer", model, "u", form, status
    histogram = store.writer(0).histogram(families.DURATION, labels)
    latency = store.writer(0).histogram(families.CALL_LATENCY, (model,))
    for _ in range(times):
        histogram.observe(0.003)
        latency.observe(0.003)


def _models(
    count: Callable[[MetricStore], None] | None = None,
    query: dict[str, str] | None = None,
    status: dict[str, Any] = STATUS,
) -> dict[str, Any]:
    store = make_store()
    history = sampled(store, lambda: count(store) if count is not None else None)
    return describe_models(state_of(status, store, history), query or {}, {})


def _names(**query: str) -> list[str]:
    def count(store: MetricStore) -> None:
        _called(store, "c", 10)
        _called(store, "d", 20)
        _called(store, OTHER, 99)
        _called(store, "", 99)

    return [each["name"] for each in _models(count, query)["models"]]


def test_models_in_use_come_first() -> None:
    """Also those that no server tells of; calls of others are not of one model."""
    assert _names() == ["d", "c", "a", "b"]


def test_rates_of_all_rows_add_up() -> None:
    def count(store: MetricStore) -> None:
        _called(store, "c", 10)
        _called(store, OTHER, 30, status="4xx")
        _called(store, "", 20)

    document = _models(count)
    assert document["others"]["calls_per_second"] == 3
    assert document["others"]["client_error_ratio"] == 1
    assert document["no_model"]["calls_per_second"] == 2
    rates = [each.get("calls_per_second", 0) for each in document["models"]]
    assert sum(rates) == 1


def _call(model: str, status: int, at: float = 1000.0, **fields: Any) -> bytes:
    return orjson.dumps({"model": model, "status": status, "time": at, **fields})


def test_model_that_only_fails_is_listed_with_its_last_failure() -> None:
    failed = FailedModels()
    failed.note([_call("broken", 404, 990.0), _call("a", 200), _call("", 404)])
    failed.note([_call("broken", 503, 999.0, reason="no such model"), _call("old", 404, 100.0)])
    state = state_of(STATUS, make_store(), at=1000.0)
    document = describe_models(state, {}, failed.recent(state.time))
    found = {each["name"]: each["last_failure"] for each in document["models"]}
    assert found == {
        "broken": {"time": 999.0, "status": 503, "reason": "no such model"},
        "a": None,
        "b": None,
        "c": None,
    }


def test_names_of_failed_models_are_bounded_and_the_last_ones_stay() -> None:
    """Clients may call any name."""
    failed = FailedModels()
    failed.note(_call(f"m{number}", 404) for number in range(5000))
    names = list(failed.recent(1000.0))
    assert len(names) == 200
    assert names[-1] == "m4999"
    failed.note([_call("m4800", 404), _call("new", 404)])
    names = list(failed.recent(1000.0))
    assert ("m4800" in names, "m4801" in names) == (True, False)


def test_models_are_searched_and_come_in_pages() -> None:
    assert _names(limit="2") == ["d", "c"]
    assert _names(limit="2", offset="2") == ["a", "b"]
    assert _names(offset="9") == []
    assert _names(search="A") == ["a"]
    assert _names(search="none") == []
    assert _models(query={"limit": "1"})["total"] == 3


def test_places_where_a_model_is_ready_are_counted() -> None:
    ready = {each["name"]: each["ready"] for each in _models()["models"]}
    assert ready == {
        "a": [{"upstream": "u", "endpoints": 1, "of": 3}],
        "b": [
            {"upstream": "u", "endpoints": 2, "of": 3},
            {"upstream": "v", "endpoints": 1, "of": 1},
        ],
        "c": [{"upstream": "v", "endpoints": 1, "of": 1}],
    }


def test_model_has_rates_by_form_and_status() -> None:
    def count(store: MetricStore) -> None:
        _called(store, "a", 30)
        _called(store, "a", 10, "binary")
        _called(store, "a", 10, "json", "5xx")

    first, *others = _models(count)["models"]
    assert (first["name"], first["calls_per_second"], first["error_ratio"]) == ("a", 5, 0.2)
    assert first["forms_per_second"] == {"json": 4, "binary": 1}
    assert first["statuses_per_second"] == {"2xx": 4, "5xx": 1}
    assert first["p50_ms"] == pytest.approx(3, rel=0.02)
    assert all("calls_per_second" not in each for each in others)


def _model(store: MetricStore, name: str) -> dict[str, Any]:
    return describe_model(state_of(STATUS, store), store, Savings(), name)


def test_model_has_its_endpoints_and_what_conversion_saved() -> None:
    store = make_store()
    for slot in range(2):
        writer = store.writer(slot)
        writer.counter(families.MODEL_ELEMENTS, ("b",)).add(10)
        writer.counter(families.MODEL_BYTES, ("b", "client")).add(1000)
        writer.counter(families.MODEL_BYTES, ("b", "server")).add(200 + slot)
    model = _model(store, "b")
    assert [each["endpoint"] for each in model["endpoints"]] == [
        "http://one:1",
        "http://two:1",
        "http://four:1",
    ]
    assert model["conversion"] == {
        "elements": 20,
        "client_bytes": 2000,
        "server_bytes": 401,
        "saved_bytes": 1599,
        "measured": None,
        "saved_ms_estimate": None,
    }
    assert "calls_per_second" not in model


def test_model_whose_bytes_have_no_series_is_described() -> None:
    """The store is full, or a worker was killed between the two."""
    store = make_store()
    store.writer(0).counter(families.MODEL_ELEMENTS, ("b",)).add(10)
    conversion = _model(store, "b")["conversion"]
    assert (conversion["elements"], conversion["saved_bytes"]) == (10, 0)


def test_savings_are_scaled_to_all_elements_that_were_converted() -> None:
    savings = Savings()
    assert savings.describe("m", 10.0) == {"measured": None, "saved_ms_estimate": None}
    savings.add("m", Measurement(converted_ms=10, untouched_ms=40, elements=100, at=5.0))
    assert savings.describe("m", 1000.0) == {
        "measured": {"converted_ms": 10, "untouched_ms": 40, "elements": 100, "at": 5.0},
        "saved_ms_estimate": 300.0,
    }
    savings.add("m", Measurement(3.0, 1.0, 0))  # it took longer
    assert savings.describe("m", 10.0)["saved_ms_estimate"] == -20.0
