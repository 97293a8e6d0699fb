"""Routes, upstreams and endpoints, with the rates between them."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.admin.panels.topology import describe_topology, parse_choice
from gateway.observe import families
from gateway.observe.metric_store import MetricStore
from tests.admin.site import (
    endpoint,
    make_settings,
    make_store,
    sampled,
    state_of,
    upstream,
    worker_status,
)

ROUTES = [
    {
        "name": "split",
        "match": {"model": "a*"},
        "upstream": [{"name": "u", "weight": 3}, {"name": "v", "weight": 1}],
        "mirror": {"upstream": "v", "percent": 5},
    },
    {"match": {"model": "b"}, "upstream": "u"},
    {"name": "n" * 300, "upstream": "u"},
]


def _settings() -> Any:
    upstreams = {name: {"endpoints": [f"http://{name}:1"]} for name in "uv"}
    return make_settings(upstreams=upstreams, routes=ROUTES)


def _topology(
    status: dict[str, Any] | None = None,
    count: Callable[[MetricStore], None] | None = None,
    query: dict[str, str] | None = None,
) -> dict[str, Any]:
    store = make_store()
    history = sampled(store, lambda: count(store) if count is not None else None)
    status = status or worker_status({"u": upstream(endpoint()), "v": upstream()})
    chosen = parse_choice(query or {})
    return describe_topology(state_of(status, store, history), history, _settings(), chosen)


def _calls(store: MetricStore, route: str, upstream: str, status: str, times: int) -> None:
    labels = route, "infer", "m", upstream, "json", status
    histogram = store.writer(0).histogram(families.DURATION, labels)
    for _ in range(times):
        histogram.observe(0.01)


def test_routes_have_their_rates_to_each_upstream() -> None:
    def count(store: MetricStore) -> None:
        _calls(store, "split", "u", "2xx", 60)
        _calls(store, "split", "u", "5xx", 20)
        _calls(store, "split", "v", "2xx", 20)
        _calls(store, "split", "u,v", "4xx", 10)
        _calls(store, "n" * 300, "u", "2xx", 10)
        for result, copies in (("ok", 1), ("rejected", 1), ("failed", 2), ("skipped", 9)):
            store.writer(0).counter(families.MIRROR_REQUESTS, ("split", "v", result)).add(copies)

    split, second, long = _topology(count=count)["routes"]
    assert (split["name"], second["name"]) == ("split", "2")
    matches = [each["match"] for each in (split, second, long)]
    assert matches == ["model a*", "model b", "every request"]
    rates = ("calls_per_second", "error_ratio", "client_error_ratio")
    mirror = [split["mirror"][name] for name in ("upstream", "percent", *rates)]
    assert mirror == ["v", 5, 0.4, 0.5, 0.25]
    assert second["mirror"] is None
    assert (split["calls_per_second"], split["client_error_ratio"]) == (11, 0.09091)
    assert split["recent"]["calls_per_second"] == [11]
    assert split["recent"]["errors_per_second"] == [2]
    assert [[each[name] for name in ("name", "weight", *rates)] for each in split["upstreams"]] == [
        ["u", 3, 9, 0.2222, 0.1111],
        ["v", 1, 3, 0, 0.3333],
    ]
    assert (second["calls_per_second"], second["error_ratio"]) == (0, None)
    assert second["client_error_ratio"] is None
    assert long["calls_per_second"] == 1


def test_endpoint_has_rates_times_and_points() -> None:
    def count(store: MetricStore) -> None:
        writer, labels = store.writer(0), ("u", "http://h:1")
        for model in ("m", "") * 10:
            writer.histogram(families.SERVER_DURATION, labels).observe(0.003)
            writer.histogram(families.ENDPOINT_LATENCY, (*labels, model)).observe(0.003)
        writer.counter(families.SENT_BYTES, labels).add(1000)
        writer.counter(families.RECEIVED_BYTES, labels).add(50)
        writer.counter(families.ENDPOINT_FAILURES, (*labels, "connect")).add(5)
        writer.counter(families.ENDPOINT_FAILURES, (*labels, "5xx")).add(1)
        writer.counter(families.RESPONSES, (*labels, "2xx")).add(19)
        writer.counter(families.RESPONSES, (*labels, "5xx")).add(1)

    topology = _topology(count=count)
    first, second = topology["upstreams"]
    (found,) = first["endpoints"]
    assert found["url"] == "http://h:1"
    assert (found["calls_per_second"], found["failures_per_second"]) == (2, 0.6)
    assert found["failures_by_kind_per_second"] == {"connect": 0.5, "5xx": 0.1}
    assert found["statuses_per_second"] == {"2xx": 1.9, "5xx": 0.1}
    assert found["p50_ms"] == found["p99_ms"] == pytest.approx(3, rel=0.02)
    assert found["recent"]["p99_ms"] == [found["p99_ms"]]
    assert (found["sent_bytes_per_second"], found["received_bytes_per_second"]) == (100, 5)
    assert found["recent"]["calls_per_second"] == [2]
    assert (first["calls_per_second"], first["failures_per_second"]) == (2, 0.6)
    assert (second["calls_per_second"], second["endpoints"]) == (0, [])


def test_calls_that_could_not_connect_are_calls_of_their_endpoint() -> None:
    def count(store: MetricStore) -> None:
        labels = ("u", "http://h:1", "unreachable")
        store.writer(0).counter(families.ENDPOINT_FAILURES, labels).add(30)

    (upstream, _) = _topology(count=count)["upstreams"]
    (found,) = upstream["endpoints"]
    assert upstream["calls_per_second"] == 3
    assert (found["calls_per_second"], found["failures_per_second"]) == (3, 3)
    assert found["failures_by_kind_per_second"] == {"unreachable": 3}
    assert found["recent"]["calls_per_second"] == found["recent"]["errors_per_second"] == [3]


def test_nothing_but_the_state_is_known_before_the_second_sample() -> None:
    store = make_store()
    history = sampled(store, lambda: None)
    state = state_of(worker_status(), store)
    topology = describe_topology(state, history, _settings(), parse_choice({}))
    (found,) = topology["upstreams"][0]["endpoints"]
    assert (found["calls_per_second"], found["recent"]) == (0, None)
    assert topology["routes"][0]["client_error_ratio"] is None


def _many() -> dict[str, Any]:
    return worker_status(
        {
            name: upstream(*(endpoint(url=f"http://{name}:{port}") for port in range(1, count + 1)))
            for name, count in (("u", 5), ("v", 3), ("w", 4))
        }
    )


def _urls(**query: str) -> list[list[str]]:
    return [
        [each["url"].removeprefix("http://") for each in upstream["endpoints"]]
        for upstream in _topology(_many(), query=query)["upstreams"]
    ]


def test_pages_of_endpoints_go_on_over_upstreams() -> None:
    everything = [url for urls in _urls() for url in urls]
    assert len(everything) == 12
    for limit in (1, 2, 5, 7, 12):
        pages = [
            url
            for offset in range(0, 14, limit)
            for urls in _urls(limit=f"{limit}", offset=f"{offset}")
            for url in urls
        ]
        assert pages == everything
    assert _urls(limit="3", offset="4") == [["u:5"], ["v:1", "v:2"], []]
    assert _urls(limit="0") == [[], [], []]
    assert _urls(offset="1000") == [[], [], []]


def test_endpoints_are_searched_by_name_state_and_reason() -> None:
    assert _urls(search="V:2") == [[], ["v:2"], []]
    assert _urls(upstream="w", limit="2") == [[], [], ["w:1", "w:2"]]
    assert _urls(upstream="w", search=":1") == [[], [], ["w:1"]]
    assert _urls(upstream="none") == [[], [], []]
    ill = endpoint(url="http://ill:1", state="unhealthy", state_text="GET / returned 503")
    status = worker_status({"u": upstream(endpoint(), ill)})
    for search in ("unhealthy", "returned 503"):
        (found,) = _topology(status, query={"search": search})["upstreams"]
        assert [each["url"] for each in found["endpoints"]] == ["http://ill:1"]
        assert (found["endpoints_total"], found["endpoints_fitting"]) == (2, 1)


def test_worst_endpoints_come_first_and_the_others_in_the_order_of_the_settings() -> None:
    status = worker_status(
        {
            "u": upstream(
                endpoint(url="fine"),
                endpoint(url="fails", consecutive_failures=2),
                endpoint(url="drained", state="drained"),
                endpoint(url="slow", state="slow"),
                endpoint(url="failing", state="failing"),
                endpoint(url="unhealthy", state="unhealthy"),
                endpoint(url="ejected", state="ejected"),
            )
        }
    )
    (found,) = _topology(status)["upstreams"]
    urls = [each["url"] for each in found["endpoints"]]
    assert urls == ["ejected", "unhealthy", "failing", "slow", "fine", "fails", "drained"]
    states = found["endpoint_states"]
    assert (states["ejected"], states["unhealthy"], states["in_use"]) == (1, 1, 2)


def test_names_of_models_are_bounded() -> None:
    models = [f"m{number}" for number in range(150)]
    status = worker_status({"u": upstream(endpoint(models=models), endpoint(url="http://h:2"))})
    (found,) = _topology(status)["upstreams"]
    one, other = found["endpoints"]
    assert (one["models"], one["models_total"]) == (models[:10], 150)
    assert (other["models"], other["models_total"]) == (None, None)


@pytest.mark.parametrize(
    "name", ['"><script>', "a,b", "x" * 300, "模型", "a\nb", "other"], ids=range(6)
)
def test_upstreams_of_any_name_have_their_rates(name: str) -> None:
    url = f"http://{name}"

    def count(store: MetricStore) -> None:
        store.writer(0).histogram(families.SERVER_DURATION, (name, url)).observe(0.01)

    status = worker_status({name: upstream(endpoint(url=url))})
    (found,) = _topology(status, count)["upstreams"]
    assert (found["name"], found["calls_per_second"]) == (name, 0.1)
    assert found["endpoints"][0]["calls_per_second"] == 0.1
