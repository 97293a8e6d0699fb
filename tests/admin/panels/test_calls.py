"""Which of the recent calls and of the events are shown, and how a query is read."""

from typing import Any

import orjson
import pytest

from gateway.admin.panels.calls import (
    describe_journal,
    matching_calls,
    parse_count,
    parse_filter,
    parse_number,
    parse_text,
)

CALLS: list[dict[str, Any]] = [
    {"id": "a", "time": 1.0, "status": 200, "duration_ms": 1.0, "model": "m", "upstream": "u"},
    {"id": "b", "time": 5.0, "status": 302, "duration_ms": 2.0, "model": "m", "route": "r"},
    {"id": "c", "time": 3.0, "status": 404, "duration_ms": 3.0, "request_id": "q-1"},
    {"id": "d", "time": 4.0, "status": 503, "duration_ms": 4.0, "reason": "no Endpoint"},
    {"id": "e", "time": 2.0, "status": 0, "duration_ms": 5.0, "operation": "infer"},
    {"id": "f", "time": 6.0, "status": 200, "duration_ms": 600.5, "reason": "cut off"},
    {
        "id": "g",
        "time": 7.0,
        "status": 200,
        "duration_ms": 0.0,
        "model": 'a"b\\<\n',
        "trace_id": "t",
    },
    {
        "id": "h",
        "time": 8.0,
        "status": 200,
        "duration_ms": 0.0,
        "endpoint": "http://two:1",
        "timeline": [{"name": "prepare", "label": "Read and convert the request"}],
        "other_attempts": [{"upstream": "u", "endpoint": "http://one:1"}],
    },
]


def _shown(**query: str) -> str:
    found = matching_calls(map(orjson.dumps, CALLS), *parse_filter(query))
    return "".join(each["id"] for each in found)


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ({}, "hgfbdcea"),
        ({"limit": "0"}, ""),
        ({"model": ""}, "hgfbdcea"),
        ({"model": 'a"b\\<\n'}, "g"),
        ({"model": "m", "upstream": "u"}, "a"),
        ({"trace_id": "t"}, "g"),
        ({"status": "aborted"}, "e"),
        ({"errors": "1"}, "fdce"),
        ({"errors": "0"}, "hgfbdcea"),
        ({"min_ms": "600.5"}, "f"),
        ({"errors": "1", "status": "2xx"}, "f"),
        ({"search": "no Endpoint"}, "d"),
        ({"search": "http://one"}, "h"),
        ({"search": "503"}, "d"),
        # what each call has
        ({"search": "duration_ms"}, ""),
        ({"search": "prepare"}, ""),
    ],
)
def test_calls_are_filtered_and_the_newest_comes_first(query: dict[str, str], shown: str) -> None:
    assert _shown(**query) == shown


NOW = 1000.0
EVENTS: list[dict[str, Any]] = [
    {"id": "c", "time": 999.0, "kind": "worker_ended", "level": "error", "why": "SIGKILL"},
    {"id": "b", "time": 500.0, "kind": "reload_refused", "level": "error", "why": "No such file"},
    {"id": "a", "time": 10.0, "kind": "endpoint_ejected", "level": "error", "upstream": "u"},
    {"id": "0", "time": 9.0, "kind": "gateway_started", "level": "info"},
]


def _events(**query: str) -> str:
    events = [{"upstream": "", "endpoint": "", **each} for each in EVENTS]
    return "".join(each["id"] for each in describe_journal(NOW, events, query)["events"])


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ({}, "cba0"),
        ({"seconds": "600"}, "cb"),
        ({"kind": "reload_refused"}, "b"),
        ({"level": "info"}, "0"),
        ({"upstream": "u"}, "a"),
        ({"endpoint": "http://h"}, ""),
        ({"search": "no SUCH"}, "b"),
        ({"limit": "2"}, "cb"),
    ],
)
def test_events_that_fit_are_shown(query: dict[str, str], shown: str) -> None:
    assert _events(**query) == shown


def test_document_tells_how_many_events_there_are_and_fit() -> None:
    events = [{"upstream": "", "endpoint": "", **each} for each in EVENTS]
    document = describe_journal(NOW, events, {"level": "error", "limit": "1"})
    assert (document["kept"], document["fitting"], len(document["events"])) == (4, 3, 1)


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("007", 7), ("999", 100), ("", 5), (None, 5)]
)
def test_count_is_bounded(text: str | None, number: int) -> None:
    query = {} if text is None else {"limit": text}
    assert parse_count(query, "limit", 5, 100) == number


@pytest.mark.parametrize("text", ["-1", "1.0", "1_0", " 1", "x", "١", "²", "9" * 5000])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^limit: expected a number, got ") as caught:
        parse_count({"limit": text}, "limit", 5)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("text", "number"), [("1.5", 1.5), ("-2e3", -2000), ("", None)])
def test_number_may_have_a_fraction(text: str, number: float | None) -> None:
    assert parse_number({"min_ms": text}, "min_ms") == number
    assert parse_number({}, "min_ms") is None


@pytest.mark.parametrize("text", ["nan", "-inf", "1e999", "1,5", "x" * 5000])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^min_ms: expected a number, got ") as caught:
        parse_number({"min_ms": text}, "min_ms")
    assert len(str(caught.value)) < 200


def test_texts_and_limits_have_a_bound() -> None:
    assert parse_text({"search": "x" * 5000}, "search") == "x" * 500
    assert parse_text({}, "search") == ""
    assert parse_filter({"limit": "1000000"})[1] == 2000
