"""Which of the recent calls are shown."""

from typing import Any

import orjson
import pytest

from gateway.admin.panels.calls import CallFilter, matching_calls

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
    found = matching_calls(map(orjson.dumps, CALLS), CallFilter.parse(query))
    return "".join(each["id"] for each in found)


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ({}, "hgfbdcea"),
        ({"limit": "2"}, "hg"),
        ({"limit": "0"}, ""),
        ({"model": "m"}, "ba"),
        ({"model": "M"}, ""),
        ({"model": ""}, "hgfbdcea"),
        ({"model": 'a"b\\<\n'}, "g"),
        ({"model": "m", "upstream": "u"}, "a"),
        ({"route": "r"}, "b"),
        ({"operation": "infer"}, "e"),
        ({"request_id": "q-1"}, "c"),
        ({"trace_id": "t"}, "g"),
        ({"endpoint": "http://two:1"}, "h"),
        ({"status": "2xx"}, "hgfa"),
        ({"status": "3xx"}, "b"),
        ({"status": "4xx"}, "c"),
        ({"status": "aborted"}, "e"),
        ({"status": "1xx"}, ""),
        ({"errors": "1"}, "fdce"),
        ({"errors": "true"}, "fdce"),
        ({"errors": "0"}, "hgfbdcea"),
        ({"errors": "false"}, "hgfbdcea"),
        ({"min_ms": "4"}, "fde"),
        ({"min_ms": "600.5"}, "f"),
        ({"min_ms": "601"}, ""),
        ({"errors": "1", "status": "2xx"}, "f"),
        ({"search": "ENDPOINT"}, "d"),
        ({"search": "no endpoint"}, "d"),
        ({"search": 'a"B\\<\n'}, "g"),
        ({"search": "http://one"}, "h"),
        ({"search": "503"}, "d"),
    ],
)
def test_calls_are_filtered_and_the_newest_comes_first(query: dict[str, str], shown: str) -> None:
    assert _shown(**query) == shown


@pytest.mark.parametrize("search", ["duration_ms", "timeline", "prepare", "other_attempts", "{"])
def test_search_is_not_for_what_each_call_has(search: str) -> None:
    assert _shown(search=search) == ""


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ({"status": "200"}, "status"),
        ({"status": "\udcff"}, "status"),
        ({"limit": "x"}, "limit"),
        ({"min_ms": "x"}, "min_ms"),
    ],
)
def test_invalid_query_names_the_parameter(query: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        CallFilter.parse(query)


def test_limit_has_a_bound() -> None:
    assert CallFilter.parse({"limit": "1000000"}).limit == 2000
