"""Which events of the journal are shown."""

from typing import Any

import pytest

from gateway.admin.panels.calls import describe_journal

NOW = 1000.0
EVENTS: list[dict[str, Any]] = [
    {"id": "c", "time": 999.0, "kind": "worker_ended", "level": "error", "why": "SIGKILL"},
    {"id": "b", "time": 500.0, "kind": "reload_refused", "level": "error", "why": "No such file"},
    {"id": "a", "time": 10.0, "kind": "endpoint_ejected", "level": "error", "upstream": "u"},
    {"id": "0", "time": 9.0, "kind": "gateway_started", "level": "info"},
]


def _shown(**query: str) -> str:
    events = [{"upstream": "", "endpoint": "", **each} for each in EVENTS]
    return "".join(each["id"] for each in describe_journal(NOW, events, query)["events"])


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ({}, "cba0"),
        ({"seconds": "600"}, "cb"),
        ({"seconds": "0"}, ""),
        ({"kind": "reload_refused"}, "b"),
        ({"level": "info"}, "0"),
        ({"upstream": "u"}, "a"),
        ({"endpoint": "http://h"}, ""),
        ({"search": "sigkill"}, "c"),
        ({"search": "no SUCH"}, "b"),
        ({"limit": "2"}, "cb"),
        ({"limit": "0"}, ""),
        ({"limit": "99999"}, "cba0"),
    ],
)
def test_events_that_fit_are_shown(query: dict[str, str], shown: str) -> None:
    assert _shown(**query) == shown


def test_document_tells_how_many_events_there_are_and_fit() -> None:
    events = [{"upstream": "", "endpoint": "", **each} for each in EVENTS]
    document = describe_journal(NOW, events, {"level": "error", "limit": "1"})
    assert (document["kept"], document["fitting"], len(document["events"])) == (4, 3, 1)


@pytest.mark.parametrize("name", ["seconds", "limit"])
def test_invalid_query_names_the_parameter(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a number"):
        _shown(**{name: "x"})
