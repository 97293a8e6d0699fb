"""The curves of endpoints and routes, and what flows from routes."""

from typing import Any

import pytest

from gateway.admin.panels.curves import add_flows, describe_curves
from gateway.observe.call_metrics import DURATION
from gateway.observe.gateway_metrics import MIRROR_REQUESTS
from tests.admin.site import make_store, sampled


def _route(name: str, calls: float = 0.0, percent: float | None = None) -> dict[str, Any]:
    mirror = None if percent is None else {"upstream": "m", "percent": percent}
    return {"name": name, "calls_per_second": calls, "mirror": mirror}


def _with_flows(*routes: dict[str, Any]) -> list[dict[str, Any]]:
    """Add the flows of ten seconds to routes."""
    store = make_store()
    writer = store.writer(0)

    def count() -> None:
        for status, times in (("2xx", 6), ("4xx", 3), ("5xx", 1)):
            histogram = writer.histogram(DURATION, ("r", "infer", "", "u", "json", status))
            for _ in range(times):
                histogram.observe(0.003)
        for result, copies in (("ok", 60), ("failed", 20), ("skipped", 10)):
            writer.counter(MIRROR_REQUESTS, ("m", result)).add(copies)

    history = sampled(store, count)
    add_flows(routes, history.now, history)
    return list(routes)


def test_route_has_its_share_of_refused_calls_and_its_curves() -> None:
    route, idle = _with_flows(_route("r"), _route("idle"))
    assert route["client_error_ratio"] == 0.3
    assert route["recent"]["calls_per_second"] == [1]
    assert route["recent"]["errors_per_second"] == [0.1]
    assert idle["client_error_ratio"] is None


def test_mirror_has_the_rates_of_its_copies() -> None:
    (route,) = _with_flows(_route("r", 10, 90))
    names = "ok_per_second", "failed_per_second", "skipped_per_second"
    assert [route["mirror"][name] for name in names] == [6, 2, 1]


def test_copies_that_several_routes_send_are_shared_by_what_they_ask_for() -> None:
    routes = _with_flows(_route("r", 10, 60), _route("s", 20, 10), _route("t", 0, 100))
    assert [each["mirror"]["ok_per_second"] for each in routes] == [4.5, 1.5, 0]


def test_nothing_is_known_before_the_second_sample() -> None:
    store = make_store()
    history = sampled(store, lambda: None)
    route = _route("r", 0, 50)
    add_flows([route], None, history)
    assert (route["client_error_ratio"], route["mirror"]["ok_per_second"]) == (None, 0)


def test_curves_need_an_endpoint_or_a_route() -> None:
    history = sampled(make_store(), lambda: None)
    for query in ({"route": "r"}, {"upstream": "u", "endpoint": "http://h"}):
        assert describe_curves(history, query)["step_seconds"] == 10
    for query in ({}, {"upstream": "u"}, {"endpoint": "http://h"}):
        with pytest.raises(ValueError, match=r"^expected \?route=, or \?upstream= and endpoint=$"):
            describe_curves(history, query)
