"""Filters of bodies: both paths go by one list, which compresses and translates for clouds."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import bad_response
from gateway.protocol.operations import Operation, OperationKind
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters import body_filters
from gateway.proxy.filters.compression import MIN_SIZE, CompressedResponse
from gateway.proxy.filters.interfaces import BodyFilter, FilteredHead, WrappedResponse
from gateway.proxy.interfaces import Call, ClientResponse
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from tests.proxy.calls.scene import plan_of
from tests.support.checks.time_slices import others
from tests.support.doubles.cluster import ServerStep, one_upstream
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
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    json_request,
)

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
    planner = Planner(single_destination(make_destination(ReadyEndpoint())))
    headers = dict.fromkeys(body_filters.FILTERED_HEADERS, "x")
    head = client_head("POST", INFER, headers, planner.head_parser)
    assert {name.lower() for name, _ in head.keyed_headers} >= body_filters.FILTERED_HEADERS


@pytest.mark.parametrize(
    ("target", "on_fast_path"),
    [(INFER, False), ("/v1/models/m:predict", True), ("/v2/models/m/generate", True)],
)
async def test_content_type_of_a_cloud_matters_to_inference_alone(
    target: str, on_fast_path: bool
) -> None:
    planner = Planner(single_destination(make_destination(ReadyEndpoint())))
    headers = {"Content-Type": APPLYING["Content-Type"]}
    assert (plan_of(planner, "POST", target, headers) is not None) is on_fast_path


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
    planner = Planner(single_destination(make_destination(ReadyEndpoint())))
    assert plan_of(planner, "POST", target, FILTERED) is None
    assert plan_of(planner, "POST", target, OTHER) is not None


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


BOTH = ("gzip", "deflate")
TEXT = json.dumps({"models": [{"name": f"m{number}"} for number in range(200)]}).encode()
NOISE = random.Random(7).randbytes(300_000)
ACCEPT = {"Accept-Encoding": "gzip, deflate"}


def unpacked(coding: str | None, body: bytes) -> bytes:
    """Decompress what a client got, which must be complete."""
    if coding is None:
        return body
    return gzip.decompress(body) if coding == "gzip" else zlib.decompress(body)


class Scene:
    """A client of a route with compression, and its server."""

    def __init__(
        self, step: ScriptedUpstreamResponse | BaseException, compress: tuple[str, ...] = BOTH
    ) -> None:
        self.cluster = one_upstream(codings=compress, a=step)
        self.log = self.cluster.log

    async def ask(
        self, method: str = "GET", headers: dict[str, str] | None = None
    ) -> ScriptedClientResponse:
        asked = ACCEPT | (headers or {})
        return await self.cluster.ask(method, "/v2/models/m", headers=asked)


def sized(body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> Scene:
    made = {"Content-Length": str(len(body)), **(headers or {})}
    return Scene(ScriptedUpstreamResponse(status, made, [body]))


# ------------------------------------------------------------------------------- what is compressed


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("length", [{"Content-Length": str(len(TEXT))}, {}])
async def test_response_body_is_compressed(status: int, length: dict[str, str]) -> None:
    scene = Scene(
        ScriptedUpstreamResponse(status, {"X-A": "1", **length}, [TEXT[:100], TEXT[100:]])
    )
    response = await scene.ask()
    assert response.status == status
    assert dict(response.headers) == {
        "X-A": "1",
        "Vary": "Accept-Encoding",
        "Content-Encoding": "gzip",
    }
    assert gzip.decompress(response.body) == TEXT
    assert len(response.body) < len(TEXT) / 2


@pytest.mark.parametrize(
    ("accepted", "offered", "coding"),
    [
        ("gzip, deflate", BOTH, "gzip"),
        ("gzip, deflate", ("deflate", "gzip"), "deflate"),
        ("gzip;q=0.1, deflate", BOTH, "deflate"),
        ("*", BOTH, "gzip"),
        ("br", BOTH, None),
        ("", BOTH, None),
    ],
)
async def test_coding_is_one_that_the_client_accepts(
    accepted: str, offered: tuple[str, ...], coding: str | None
) -> None:
    scene = Scene(
        ScriptedUpstreamResponse(200, {"Content-Length": str(len(TEXT))}, [TEXT]), offered
    )
    response = await scene.ask(headers={"Accept-Encoding": accepted})
    assert response.headers.get("Content-Encoding") == coding
    assert response.headers["Vary"] == "Accept-Encoding"
    assert unpacked(coding, response.body) == TEXT
    if coding is None:
        assert response.headers["Content-Length"] == str(len(TEXT))


AS_THEY_ARE: dict[str, tuple[int, dict[str, str], bytes]] = {
    "small": (200, {}, TEXT[: MIN_SIZE - 1]),
    "without a body": (204, {}, b""),
    "a part that says another status": (200, {"Content-Range": "bytes 0-9/99"}, TEXT),
    "encoded": (200, {"Content-Encoding": "br"}, TEXT),
    "not to be transformed": (200, {"Cache-Control": "public, No-Transform"}, TEXT),
    "events": (200, {"Content-Type": "Text/Event-Stream ; charset=utf-8"}, TEXT),
}


@pytest.mark.parametrize(("status", "headers", "body"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
async def test_response_that_must_not_be_transformed_is_not_compressed(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    response = await sized(body, headers, status).ask()
    assert response.body == body
    assert dict(response.headers) == {
        "Content-Length": str(len(body)),
        **headers,
        "Vary": "Accept-Encoding",
    }


async def test_body_of_the_minimum_size_is_compressed() -> None:
    body = TEXT[:MIN_SIZE]
    response = await sized(body, {"Content-Encoding": "identity"}).ask()
    assert response.headers.getall("Content-Encoding") == ["gzip"]
    assert gzip.decompress(response.body) == body


async def test_head_response_is_that_of_the_server() -> None:
    response = await sized(TEXT).ask("HEAD")
    assert dict(response.headers) == {"Content-Length": str(len(TEXT)), "Vary": "Accept-Encoding"}


@pytest.mark.parametrize(("etag", "weak"), [('"x"', 'W/"x"'), ('W/"x"', 'W/"x"')])
async def test_strong_etag_becomes_weak(etag: str, weak: str) -> None:
    assert (await sized(TEXT, {"ETag": etag}).ask()).headers["ETag"] == weak


async def test_error_of_the_gateway_is_compressed() -> None:
    scene = Scene(bad_response("it fell over" * 200))
    response = await scene.ask()
    assert response.status == 502
    assert response.headers["Content-Length"] == str(len(response.body))
    assert "it fell over" in json.loads(gzip.decompress(response.body))["error"]
    response = await Scene(bad_response("it fell over")).ask()
    assert response.body == b'{"error":"it fell over"}'
    assert response.headers["Vary"] == "Accept-Encoding"


# ----------------------------------------------------------------------------- how it is compressed


@given(st.data())
def test_body_is_the_same_however_it_is_written(data: st.DataObject) -> None:
    runs = st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 2000))
    writes = [run * times for run, times in data.draw(st.lists(runs, max_size=6))]
    coding = data.draw(st.sampled_from(BOTH))
    headers: CIMultiDict[str] = CIMultiDict()
    if data.draw(st.booleans()):
        headers["Content-Length"] = str(MIN_SIZE + sum(map(len, writes)))
    if data.draw(st.booleans()):
        headers[HEADER_LENGTH] = "1"

    async def run() -> bytes:
        inner = ScriptedClientResponse(EventLog())
        response = CompressedResponse(inner, coding, ConversionScheduler())
        await response.start(200, "", headers)
        for each in writes:
            await response.write(memoryview(each) if data.draw(st.booleans()) else each)
        await response.finish()
        return inner.body

    assert unpacked(coding, asyncio.run(run())) == b"".join(writes)


@pytest.mark.parametrize("coding", BOTH)
async def test_chunk_of_a_response_without_length_goes_out_at_once(coding: str) -> None:
    inner = ScriptedClientResponse(EventLog())
    response = CompressedResponse(inner, coding, ConversionScheduler())
    await response.start(200, "", CIMultiDict({"Content-Type": "application/x-ndjson"}))
    for number in range(5):
        await response.write(b'{"token": %d}\n' % number)
        unpack = zlib.decompressobj(47)  # of either coding
        assert unpack.decompress(inner.body).endswith(b" %d}\n" % number)
    await response.finish()
    assert unpacked(coding, inner.body).count(b"\n") == 5


@pytest.mark.parametrize("is_whole", [False, True])
async def test_large_response_is_compressed_in_bounded_steps(is_whole: bool) -> None:
    with others() as waiting:
        inner = ScriptedClientResponse(log := EventLog())
        response = CompressedResponse(inner, "gzip", ConversionScheduler())
        if is_whole:
            await response.send(200, "", CIMultiDict(), NOISE)
        else:
            await response.start(200, "", CIMultiDict({"Content-Length": str(len(NOISE))}))
            await response.write(NOISE)
            await response.finish()
    assert gzip.decompress(inner.body) == NOISE
    written = [int(entry.rpartition(" ")[2]) for entry in log if entry.startswith("client gets ")]
    assert is_whole or max(written[1:]) <= 64 * 1024
    assert waiting.turns >= len(NOISE) // (16 * 1024)


SAGEMAKER = "application/vnd.sagemaker-triton.binary+json"
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json"

TENSOR = FLOATS.tobytes()
ALL_BINARY = binary_header(12, binary_output=True)
BODY = ALL_BINARY + TENSOR
ANSWER_HEADER = binary_response_header(12)


def binary(header: bytes, *tensors: bytes) -> ServerStep:
    """Return a server's response, with the type that Triton sends."""
    body = b"".join((header, *tensors))
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return ScriptedUpstreamResponse(200, {**headers, "Content-Length": str(len(body))}, [body])


ANSWER = binary(ANSWER_HEADER, TENSOR)


def of_type(content_type: str, size: object) -> dict[str, str]:
    return {"Content-Type": f"{content_type};json-header-size={size}"}


async def ask(
    *steps: ServerStep, body: bytes = BODY, headers: dict[str, str]
) -> tuple[ScriptedClientResponse, ScriptedEndpoint]:
    """Ask a server, which must get the protocol's own header if it is asked."""
    cluster = one_upstream(a=steps)
    response = await cluster.ask("POST", INFER, body, headers=headers)
    (endpoint,) = cluster.endpoints
    for request in endpoint.requests[-1:]:
        assert request.headers.getall("Content-Type") == ["application/octet-stream"]
        assert len(request.headers.getall(HEADER_LENGTH)) == 1
    return response, endpoint


async def test_vertex_client_gets_the_header_length_in_a_header() -> None:
    # Triton's endpoint sends the header.
    response, _ = await ask(ANSWER, headers=of_type(VERTEX_AI, len(ALL_BINARY)))
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers[HEADER_LENGTH] == str(len(ANSWER_HEADER))
    assert response.body == ANSWER_HEADER + TENSOR


async def test_mixed_response_has_its_header_length_in_the_content_type() -> None:
    fields = json.loads(json_request())
    fields["outputs"] = [{"name": "OUT0", "parameters": {"binary_data": True}}, {"name": "OUT1"}]
    body = json.dumps(fields).encode()
    # The whole request is JSON: the size is that of the body, or missing.
    for headers in (of_type(SAGEMAKER, len(body)), {"Content-Type": SAGEMAKER}):
        answer = binary(binary_response_header(12, 4), TENSOR, bytes(4))
        response, _ = await ask(answer, body=body, headers=headers)
        start, _, size = response.headers["Content-Type"].partition(";json-header-size=")
        assert start == SAGEMAKER
        header, tensors = response.body[: int(size)], response.body[int(size) :]
        assert tensors == TENSOR
        assert json.loads(header)["outputs"][1]["data"] == [0]
        assert HEADER_LENGTH not in response.headers


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            {**of_type(SAGEMAKER, 5), HEADER_LENGTH: "6"},
            f"{HEADER_LENGTH} is 6, but json-header-size of the Content-Type 5",
        ),
        (
            of_type(SAGEMAKER, len(BODY) + 1),
            f"json-header-size of the Content-Type is {len(BODY) + 1}, the body has "
            f"{len(BODY)} bytes",
        ),
        (
            {**of_type(SAGEMAKER, len(BODY) + 1), "Transfer-Encoding": "chunked"},
            "the body is 1 bytes shorter than",
        ),
    ],
)
async def test_invalid_header_length_is_refused(headers: dict[str, str], message: str) -> None:
    response, endpoint = await ask(headers=headers)
    assert response.status == 400
    assert message in json.loads(response.body)["error"]
    assert endpoint.requests == []
