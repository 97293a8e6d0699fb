"""The curves of endpoints and routes."""

import pytest

from gateway.admin.panels.curves import describe_curves
from tests.admin.site import make_store, sampled


def test_curves_need_an_endpoint_or_a_route() -> None:
    history = sampled(make_store(), lambda: None)
    for query in ({"route": "r"}, {"upstream": "u", "endpoint": "http://h"}):
        assert describe_curves(history, query)["step_seconds"] == 10
    for query in ({}, {"upstream": "u"}, {"endpoint": "http://h"}):
        with pytest.raises(ValueError, match=r"^route: a route is required, or"):
            describe_curves(history, query)
