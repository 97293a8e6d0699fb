"""Both paths go by one list of filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.operations import Operation, OperationKind
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters import body_filters
from gateway.proxy.filters.body_filters import BodyFilter, FilteredHead, WrappedResponse
from gateway.proxy.interfaces import Call, ClientResponse
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from tests.proxy.calls.scene import plan_of
from tests.support.doubles.fast_path import ReadyEndpoint
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    client_head,
    make_destination,
    single_destination,
)
from tests.support.inference_messages import INFER

FILTERED = {"Content-Type": "x/filtered"}
OTHER = {"Content-Type": "x/other"}


class _RecordingHeaders:
    """Headers that record the names that are looked up."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = CIMultiDictProxy(CIMultiDict(headers))
        self.seen: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self.seen.add(name.lower())
        return name in self._headers

    def getall(self, name: str, default: Any = ()) -> Any:
        self.seen.add(name.lower())
        return self._headers.getall(name, default)


APPLYING = {"Accept-Encoding": "gzip", "Content-Encoding": "gzip"} | {
    "Content-Type": "application/vnd.vertex-ai-triton.binary+json"
}


@pytest.mark.parametrize("body_filter", body_filters.BODY_FILTERS)
@pytest.mark.parametrize(("headers", "applies"), [(APPLYING, True), ({}, False)])
def test_filter_looks_only_at_the_headers_that_it_names(
    body_filter: BodyFilter, headers: dict[str, str], applies: bool
) -> None:
    """Plans of the fast path are cached by these headers."""
    recording = _RecordingHeaders(headers)
    operation = Operation(OperationKind.INFER, "m")
    seen = cast("CIMultiDictProxy[str]", recording)
    assert body_filter.applies(FilteredHead("POST", seen, operation, ("gzip",))) is applies
    assert recording.seen == body_filter.header_names


async def test_plans_are_cached_by_the_headers_of_all_filters() -> None:
    fast_path = Planner(single_destination(make_destination(ReadyEndpoint())))
    headers = dict.fromkeys(body_filters.FILTERED_HEADERS, "x")
    head = client_head("POST", INFER, headers, fast_path.head_parser)
    assert {name.lower() for name, _ in head.keyed_headers} >= body_filters.FILTERED_HEADERS


@pytest.mark.parametrize(
    ("target", "on_fast_path"),
    [(INFER, False), ("/v1/models/m:predict", True), ("/v2/models/m/generate", True)],
)
async def test_content_type_of_a_cloud_matters_to_inference_alone(
    target: str, on_fast_path: bool
) -> None:
    fast_path = Planner(single_destination(make_destination(ReadyEndpoint())))
    headers = {"Content-Type": APPLYING["Content-Type"]}
    assert (plan_of(fast_path, "POST", target, headers) is not None) is on_fast_path


class _MarkedResponse(WrappedResponse):
    """Adds a header to a response."""

    def change_head(self, status: int, headers: CIMultiDict[str], size: int | None) -> None:
        headers["X-Filtered"] = "1"


def _wrap(response: ClientResponse, _: FilteredHead, __: ConversionScheduler) -> ClientResponse:
    return _MarkedResponse(response)


async def _change(call: Call, _: Reservation) -> Call:
    log = EventLog()
    headers = dict(call.request.headers)
    return replace(call, request=ScriptedRequest(log, "POST", "/v2/changed", headers, [b"new"]))


@pytest.fixture
def invented_filter() -> Iterator[None]:
    """A filter that is in the list, and nowhere else."""
    added = BodyFilter(
        frozenset(("content-type",)),
        lambda head: head.headers.get("Content-Type") == FILTERED["Content-Type"],
        wrap_response=_wrap,
        change_call=_change,
    )
    with mock.patch.object(body_filters, "BODY_FILTERS", (*body_filters.BODY_FILTERS, added)):
        yield


@pytest.mark.usefixtures("invented_filter")
@pytest.mark.parametrize("target", [INFER, "/v2/x", "/v2/models/m/generate"])
async def test_fast_path_leaves_calls_to_a_filter_in_the_list(target: str) -> None:
    fast_path = Planner(single_destination(make_destination(ReadyEndpoint())))
    assert plan_of(fast_path, "POST", target, FILTERED) is None
    assert plan_of(fast_path, "POST", target, OTHER) is not None


async def _served(headers: dict[str, str]) -> tuple[ScriptedEndpoint, ScriptedClientResponse]:
    log = EventLog()
    endpoint = ScriptedEndpoint(log, ScriptedUpstreamResponse(200, {}, [b"done"]))
    planner = Planner(Router([Route(Match(), (make_destination(endpoint),))]))
    response = ScriptedClientResponse(log)
    request = ScriptedRequest(log, "POST", "/v2/x", headers, [b"old"])
    await handle_request(request, response, planner)
    return endpoint, response


@pytest.mark.usefixtures("invented_filter")
async def test_streaming_path_applies_a_filter_in_the_list_if_it_applies() -> None:
    endpoint, response = await _served(FILTERED)
    assert endpoint.bodies == [b"new"]
    assert endpoint.requests[0].target == "/v2/changed"
    assert (response.headers["X-Filtered"], response.body) == ("1", b"done")
    endpoint, response = await _served(OTHER)
    assert endpoint.bodies == [b"old"]
    assert endpoint.requests[0].target == "/v2/x"
    assert "X-Filtered" not in response.headers
