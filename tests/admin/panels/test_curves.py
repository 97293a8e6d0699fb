"""The curves of endpoints and routes."""

from typing import Any

import pytest

from gateway.admin.panels.curves import add_curves, describe_curves
from gateway.observe.call_metrics import DURATION
from tests.admin.site import make_store, sampled


def test_route_has_its_share_of_refused_calls_and_its_curves() -> None:
    store = make_store()

    def count() -> None:
        for status, times in (("2xx", 6), ("4xx", 3), ("5xx", 1)):
            labels = "r", "infer", "", "u", "json", status
            histogram = store.writer(0).histogram(DURATION, labels)
            for _ in range(times):
                histogram.observe(0.003)

    history = sampled(store, count)
    route: dict[str, Any] = {"name": "r"}
    idle: dict[str, Any] = {"name": "idle"}
    add_curves([route, idle], history.now, history)
    assert route["client_error_ratio"] == 0.3
    assert route["recent"]["calls_per_second"] == [1]
    assert route["recent"]["errors_per_second"] == [0.1]
    assert idle["client_error_ratio"] is None


def test_nothing_is_known_before_the_second_sample() -> None:
    history = sampled(make_store(), lambda: None)
    route = {"name": "r"}
    add_curves([route], None, history)
    assert route["client_error_ratio"] is None


def test_curves_need_an_endpoint_or_a_route() -> None:
    history = sampled(make_store(), lambda: None)
    for query in ({"route": "r"}, {"upstream": "u", "endpoint": "http://h"}):
        assert describe_curves(history, query)["step_seconds"] == 10
    for query in ({}, {"upstream": "u"}, {"endpoint": "http://h"}):
        with pytest.raises(ValueError, match=r"^route: a route is required, or"):
            describe_curves(history, query)
