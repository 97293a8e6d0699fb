"""Same bytes, same errors, same record: on every path, however request and response are split."""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.observe.call_record import CallRecord
from tests.end_to_end.paths.generated_calls import (
    THEMES,
    GeneratedCall,
    ServerResponse,
    generated_calls,
)
from tests.end_to_end.paths.sent_calls import (
    LONG_HEAD,
    SPLIT_WAYS,
    WHOLE,
    Message,
    Outcome,
    SentCalls,
    Way,
    wait_for_arrival,
)
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import gateway_client
from tests.support.http_messages import (
    chunk,
    chunked,
    http_response,
    message,
    request,
    with_long_head,
)
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    binary_response_header,
    infer_binary,
    infer_json,
    json_request,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.scale import scaled
from tests.support.servers.scripted_server import Connection, ScriptedServer

pytestmark = pytest.mark.usefixtures("one_identity")

_BUFFERED = 64 * 1024
"""Bytes of a body that the gateway waits for, and passes on as a whole."""


def _may_stream(call: GeneratedCall, way: Way, outcome: Outcome) -> bool:
    """Tell whether a response may be passed on in the pieces in which it arrives, or is written."""
    responses = [response.data for response in call.responses]
    if way.is_impatient or any(len(data) > _BUFFERED for data in (*responses, outcome.body or b"")):
        return True
    # Only inference calls wait for chunks: events must not be delayed.
    return way.is_cut and any(b"\r\ncontent-length:" not in data.lower() for data in responses)


def _without_framing(outcome: Outcome, *, may_compress: bool) -> Outcome:
    """Drop what depends on the pieces in which a response is passed on.

    Without a size it is chunked. If it is compressed, each piece is flushed, and a small body is
    compressed only if its size is not known.
    """
    dropped = {"content-length", "transfer-encoding"}
    body, size = outcome.body, outcome.response_bytes
    if may_compress:
        dropped |= {"content-encoding", "etag"}
        size = 0
        with contextlib.suppress(zlib.error):  # not compressed, or not by the gateway
            body = zlib.decompress(body or b"", wbits=47)
    headers = tuple(line for line in outcome.headers if line[0] not in dropped)
    return replace(outcome, headers=headers, body=body, response_bytes=size)


def _has_equal_error(outcome: Outcome, other: Outcome) -> bool:
    """Tell whether outcomes of a broken response differ only as pieces of it arrive.

    An error that is found after the response has started truncates it. Of two errors, the one that
    is found first counts.
    """
    if outcome.received != other.received or not outcome.error[0]:
        return False
    breaks_off = "before the end of its response" in outcome.error[0] + other.error[0]
    is_equal = outcome.error == other.error or (
        breaks_off and outcome.error[1] == other.error[1] == "BAD_RESPONSE"
    )
    return is_equal and (other.body is None or breaks_off)


def _without_request_length(outcome: Outcome) -> Outcome:
    """Drop what says the size of a request: a server may get a chunked one, too.

    Order and spaces mean nothing in JSON: a request without tensors may keep the client's.
    """
    framing = {"content-length", "transfer-encoding", HEADER_LENGTH.lower()}

    def without(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(
            (first, tuple(line for line in headers if line[0] not in framing), _in_order(body))
            for first, headers, body in messages
        )

    received, mirrored = without(outcome.received), without(outcome.mirrored)
    return replace(outcome, received=received, mirrored=mirrored)


def _in_order(body: bytes) -> bytes:
    """Return JSON with its members in order, and other bytes as they are."""
    try:
        return json.dumps(json.loads(body), sort_keys=True).encode()
    except ValueError:
        return body


def _is_equal_refusal(outcome: Outcome, other: Outcome) -> bool:
    """Tell whether both were refused for the same kind of error.

    A wrong size is told by other words if the size of the body is not known.
    """
    is_refused = outcome.status in (400, 413) and outcome.error[1] == other.error[1] != ""
    return is_refused and outcome.status == other.status and not outcome.received


def _may_be_repeated(call: GeneratedCall) -> bool:
    """Tell whether only the chunked request can be sent again, as raw binary is buffered then."""
    return len(call.request) > _BUFFERED and "retry_on" in call.route


def differences(call: GeneratedCall, way: Way, outcome: Outcome, other: Outcome) -> Iterator[str]:
    """Yield what differs from the outcome of the whole call, each as a text for people.

    What may differ is here alone; docs/architecture.md says why ("A short wait for small
    bodies").
    """
    if _may_stream(call, way, outcome):
        if _has_equal_error(outcome, other):
            return
        may_compress = "compression" in call.route
        outcome = _without_framing(outcome, may_compress=may_compress)
        other = _without_framing(other, may_compress=may_compress)
    if way.is_chunked:
        if _is_equal_refusal(outcome, other) or _may_be_repeated(call):
            return
        outcome, other = _without_request_length(outcome), _without_request_length(other)
    for each in fields(Outcome):
        one, two = getattr(outcome, each.name), getattr(other, each.name)
        if one != two:
            yield f"{way.name}, {each.name}:\n      {one!r:.3000}\n   != {two!r:.3000}"


_LAW = settings(max_examples=scaled(30), suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("theme", THEMES)
@_LAW
@given(data=st.data(), split=st.sampled_from(SPLIT_WAYS))
async def test_call_has_the_same_outcome_on_every_path(
    data: st.DataObject,
    split: Way,
    theme: str,
    call_records: list[CallRecord],
    fast_path_requests: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = data.draw(generated_calls(theme))
    caplog.clear()
    async with SentCalls(call, call_records, fast_path_requests) as calls:
        whole = await calls.send(WHOLE)
        others = [(way, await calls.send(way)) for way in (LONG_HEAD, split)]
    found = [text for way, other in others for text in differences(call, way, whole, other)]
    found += [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert not found, "\n".join(found)


@pytest.fixture
def paths() -> Iterator[Counter[bool]]:
    """Counts the calls that took the fast path, and those that did not."""
    counted: Counter[bool] = Counter()
    yield counted
    assert counted[True] > counted.total() / 2


@_LAW
@given(call=generated_calls("plain"))
async def test_most_whole_calls_take_the_fast_path(
    call: GeneratedCall,
    call_records: list[CallRecord],
    fast_path_requests: list[str],
    paths: Counter[bool],
) -> None:
    """Else the law would compare the streaming path with itself."""
    async with SentCalls(call, call_records, fast_path_requests) as calls:
        await calls.send(WHOLE)
        paths[calls.took_fast_path] += 1


# ------------------------------------------------------------------------------------- chosen calls


class BothPaths(Protocol):
    """Sends the same call on either path, checks that it looks alike, and returns what was seen."""

    async def __call__(
        self,
        data: bytes,
        response: ServerResponse,
        route: dict[str, Any] | None = None,
        *,
        fast_path: bool,
        **limits: float,
    ) -> Outcome: ...


@pytest.fixture
def both_paths(call_records: list[CallRecord], fast_path_requests: list[str]) -> BothPaths:
    async def send(
        data: bytes,
        response: ServerResponse,
        route: dict[str, Any] | None = None,
        *,
        fast_path: bool,
        **limits: float,
    ) -> Outcome:
        call = GeneratedCall(data, (), (response,), metadata(-1), route=route or {}, limits=limits)
        async with SentCalls(call, call_records, fast_path_requests) as calls:
            whole = await calls.send(WHOLE)
            assert calls.took_fast_path is fast_path
            other = await calls.send(LONG_HEAD)
            assert not calls.took_fast_path
        assert not [*differences(call, LONG_HEAD, other, whole)]
        return whole

    return send


async def test_large_json_request_for_a_tensor_named_as_a_key_takes_the_fast_path(
    both_paths: BothPaths,
) -> None:
    for name in ("IN", "data", "id"):
        data = _tensor(name=name, shape=[10_000], data=[0.25] * 10_000)
        outcome = await both_paths(data, RESPONSES["tensors"], fast_path=True)
        ((*_, body),) = outcome.received
        assert body.endswith(np.full(10_000, 0.25, "<f4").tobytes())


def _with_headers(data: bytes, headers: bytes) -> bytes:
    first, _, rest = data.partition(b"\r\n")
    return first + b"\r\n" + headers + rest


def _tensor(**changed: object) -> bytes:
    entry = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [1, 2], **changed}
    return infer_json(json.dumps({"inputs": [entry]}).encode())


def _with(**fields: object) -> bytes:
    return infer_json(json.dumps({**json.loads(json_request()), **fields}).encode())


def _of_size(size: int) -> bytes:
    return request("POST", INFER, json_request().ljust(size))


CLOUD_TYPE = "application/vnd.sagemaker-triton.binary+json"
MANY_HEADERS = (
    b"Connection: keep-alive\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\n"
    b"Upgrade: h2c\r\nProxy-Authorization: Basic eA==\r\nX-Two: a\r\nx-two: b\r\nCookie: c=d\r\n"
    b"Accept-Encoding: gzip\r\nAccept: */*\r\nX-Latin: caf\xe9\r\nContent-Type: x/y\r\n"
)


@dataclass(frozen=True)
class Case:
    """A request, and whether it takes the fast path in one write."""

    data: bytes
    fast_path: bool = True
    limits: dict[str, Any] = field(default_factory=dict)


REQUESTS = {
    "infer": Case(infer_json()),
    "numbers that need a time slice": Case(_tensor(shape=[6_000], data=[1.25, -2.5e3] * 3_000)),
    "an id and parameters": Case(_with(id="x", parameters={"priority": 1, "x": "y"})),
    "many headers": Case(_with_headers(infer_json(), MANY_HEADERS)),
    "a header for the gateway only": Case(
        infer_json(headers={"Connection": "keep-alive, X-Hop", "X-Hop": "1"}), False
    ),
    "headers that gateways add": Case(
        infer_json(headers={"X-Forwarded-For": "192.0.2.1", "Forwarded": "for=a", "Via": "1.1 a"})
    ),
    "not compressed": Case(infer_json(headers={"Content-Encoding": "identity"}), False),
    "the last": Case(infer_json(headers={"Connection": "close"})),
    "an absolute target": Case(request("POST", f"http://x{INFER}", json_request())),
    "as much as may be buffered": Case(_of_size(2048), limits={"max_inference_header_bytes": 2048}),
    "more than may be buffered": Case(_of_size(2049), False, {"max_inference_header_bytes": 2048}),
    "all that may be sent": Case(_of_size(2048), limits={"max_request_bytes": 2048}),
    "more than may be sent": Case(_of_size(2049), False, {"max_request_bytes": 2048}),
    "more than may be forwarded": Case(
        request("POST", "/v2/x", bytes(2049)), False, {"max_request_bytes": 2048}
    ),
    "nested as deep as may be": Case(
        _tensor(shape=[1], data=[[[1]]]), limits={"max_json_depth": 6}
    ),
    "nested too deep": Case(_tensor(shape=[1], data=[[[[[[[1]]]]]]]), False, {"max_json_depth": 6}),
    "no JSON": Case(infer_json(b"what?"), False),
    "does not fit": Case(_tensor(datatype="UINT8", data=[1, 300]), False),
    "bare NaN": Case(infer_json(json_request().replace(b"1.5", b"NaN")), True),
    "BYTES": Case(_tensor(datatype="BYTES", data=["a", "\xe9"])),
    "outputs of both forms": Case(
        _with(outputs=[{"name": "OUT0", "parameters": {"binary_data": True}}, {"name": "OUT1"}]),
    ),
    "an output as base64": Case(
        _with(outputs=[{"name": "OUT0", "parameters": {"content_type": "base64"}}])
    ),
    "BYTES as base64": Case(
        _tensor(datatype="BYTES", data=["/9g=", ""], parameters={"content_type": "base64"})
    ),
    "a cloud's type": Case(infer_json(headers={"Content-Type": CLOUD_TYPE}), False),
    "a size in a cloud's type": Case(
        request(
            "POST",
            INFER,
            binary_header(12) + FLOATS.tobytes(),
            {"Content-Type": f"{CLOUD_TYPE};json-header-size={len(binary_header(12))}"},
        ),
        False,
    ),
    "binary inputs": Case(infer_binary(binary_header(12), FLOATS.tobytes())),
    "compressed": Case(infer_json(b"\x1f\x8b", {"Content-Encoding": "gzip"}), False),
    "compressed in an unknown way": Case(
        request("POST", "/v2/models/m/generate", b"x", {"Content-Encoding": "br"}), False
    ),
    "GET": Case(request("GET", "/v2/models/m/stats?x=1")),
    "GET with a body": Case(request("GET", "/v2/x", b"hello")),
    "an empty Host": Case(b"GET /v2/x HTTP/1.1\r\nHost:\r\n\r\n"),
    "GET, the last": Case(request("GET", "/v2/x", headers={"Connection": "close"})),
    "POST": Case(request("POST", "/v2/x", b"hello")),
    "POST with an empty body": Case(request("POST", "/v2/x", b"")),
    "POST without a length": Case(request("POST", "/v2/x"), False),
    "server metadata": Case(request("GET", "/v2"), False),
    "a target with a fragment": Case(request("POST", "/v2/x#y", b"hello"), False),
    "a target without a path": Case(request("OPTIONS", "*"), False),
    "HTTP/1.0": Case(request("GET", "/v2/x").replace(b"/1.1", b"/1.0"), False),
    "a large head": Case(request("GET", "/v2/x", headers={"X": "x" * 2048}), False),
}


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
async def test_request_is_the_same_on_both_paths(both_paths: BothPaths, asked: Case) -> None:
    response = ServerResponse(binary_response(bytes(8), FLOATS.tobytes()))
    await both_paths(asked.data, response, fast_path=asked.fast_path, **asked.limits)


# ---------------------------------------------------------------------------------------- responses


def _inconsistent(**headers: str) -> bytes:
    return http_response(binary_response_header(8) + bytes(8), headers)


CHUNKED = {"Transfer-Encoding": "chunked"}
EMPTY = binary_response_header(0)
WITH_TENSORS = binary_response_header(12) + FLOATS.tobytes()
SIZED = {HEADER_LENGTH: str(len(binary_response_header(12)))}
INTERIM = message("HTTP/1.1 103 Early Hints", {"Link": "</x>"})
RESPONSE_HEADERS = (
    b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: triton\r\nConnection: X-Hop\r\nX-Hop: 1\r\n"
    b"Keep-Alive: timeout=5\r\nX-Latin: caf\xe9\r\nUpgrade: h2c\r\n"
)

_OPEN = {
    "tensors": binary_response(FLOATS.tobytes()),
    "NaN": binary_response(np.array([1, np.nan, np.inf, -np.inf], "<f4").tobytes()),
    "empty outputs": http_response(EMPTY),
    "JSON": http_response(b'{"outputs": [{"name":"O","shape":[1],"data":[ 1.50 ]}]}'),
    "nothing": http_response(b""),
    "compressed": http_response(b"\x1f\x8b", {"Content-Encoding": "gzip"}),
    "headers": _with_headers(http_response(b"{}"), RESPONSE_HEADERS),
    "tensors with headers": _with_headers(binary_response(bytes(4)), RESPONSE_HEADERS),
    "a reason of its own": http_response(b"{}", status="200 Fine"),
    "204": message("HTTP/1.1 204 No Content"),
    "204 with a length": message("HTTP/1.1 204 No Content", {"Content-Length": "5"}),
    "304": message("HTTP/1.1 304 Not Modified", {"ETag": '"x"'}),
    "500": http_response(WITH_TENSORS, SIZED, "500 Oh"),
    "a length beyond the body": _inconsistent(**{HEADER_LENGTH: "999"}),
    "tensors too long": http_response(WITH_TENSORS + b"x", SIZED),
    "chunked": message("HTTP/1.1 200 OK", CHUNKED, chunked(b'{"a":', b"1}")),
    "chunked tensors": message("HTTP/1.1 200 OK", {**CHUNKED, **SIZED}, chunked(WITH_TENSORS)),
    "chunked and empty": message("HTTP/1.1 200 OK", CHUNKED, chunked()),
    "a broken chunk": message("HTTP/1.1 200 OK", CHUNKED, chunk(b"a") + b"what\r\n"),
    "a large body": http_response(b"x" * 70_000),
    "many tensors": binary_response(bytes(40_000), bytes(40_000)),
    "an interim response": INTERIM + http_response(b"{}"),
    "no HTTP": b"what?\r\n\r\n",
}
_CLOSED = {
    "503 and closes": http_response(b"", {"Connection": "close"}, "503 Busy"),
    "the last": http_response(b"{}", {"Connection": "close"}),
    "closes behind it": http_response(b"{}"),
    "HTTP/1.0": http_response(b"{}").replace(b"/1.1", b"/1.0"),
    "until close": message("HTTP/1.1 200 OK", {}, b"{}"),
    "tensors until close": message("HTTP/1.1 200 OK", SIZED, WITH_TENSORS),
    "no response": b"",
    "half a body": http_response(b"abc")[:-1],
    "half of the tensors": binary_response(bytes(8))[:-4],
    "half of many tensors": binary_response(bytes(80_000))[:-4],
    "half of a chunk": message("HTTP/1.1 200 OK", CHUNKED, chunk(b"abc")[:-3]),
}
RESPONSES = {name: ServerResponse(data) for name, data in _OPEN.items()}
RESPONSES |= {name: ServerResponse(data, closes=True) for name, data in _CLOSED.items()}
ASKING = {
    "infer": infer_json(),
    "GET": request("GET", "/v2/x"),
    "POST": request("POST", "/v2/x", b"hello"),
    "binary": infer_binary(binary_header(12), FLOATS.tobytes()),
}


TENSORS = tuple(
    name
    for name in RESPONSES
    if name.startswith(("tensors", "half of", "a length", "empty outputs", "chunked tensors"))
)
OF_TENSORS_ALONE = (*TENSORS, "NaN")
ASKED = [
    *(("infer", name) for name in RESPONSES),
    *(("binary", name) for name in (*TENSORS, "JSON", "nothing", "500")),
    *(("GET", name) for name in RESPONSES if name not in OF_TENSORS_ALONE),
    *(("POST", name) for name in ("headers", "chunked", "half a body", "503 and closes")),
]


@pytest.mark.parametrize(("kind", "name"), ASKED)
async def test_response_is_the_same_on_both_paths(
    both_paths: BothPaths, kind: str, name: str
) -> None:
    await both_paths(ASKING[kind], RESPONSES[name], fast_path=True)


GZIP = {"compression": "gzip"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("infer", "tensors"),
        ("infer", "500"),
        ("infer", "compressed"),
        ("infer", "chunked tensors"),
        ("infer", "half a body"),
        ("GET", "headers"),
        ("GET", "204"),
    ],
)
async def test_response_of_a_route_with_compression_is_the_same_on_both_paths(
    both_paths: BothPaths, kind: str, name: str
) -> None:
    """A client that accepts no coding still takes the fast path, and its response has Vary."""
    outcome = await both_paths(ASKING[kind], RESPONSES[name], GZIP, fast_path=True)
    if outcome.body is not None:
        assert ("vary", "Accept-Encoding") in outcome.headers
    assert ("content-encoding", "gzip") not in outcome.headers or outcome.body == b"\x1f\x8b"


@pytest.mark.parametrize("data", ASKING.values(), ids=ASKING)
async def test_response_to_be_compressed_takes_the_streaming_path(
    both_paths: BothPaths, data: bytes
) -> None:
    asked = _with_headers(data, b"Accept-Encoding: gzip\r\n")
    response = ServerResponse(http_response(b'{"outputs":[]}'.ljust(2000)))
    outcome = await both_paths(asked, response, GZIP, fast_path=False)
    assert ("content-encoding", "gzip") in outcome.headers


@pytest.mark.parametrize("size", [2047, 2048, 2049])
@pytest.mark.parametrize("body", [EMPTY, b"{}"])
async def test_response_near_the_buffer_cap_is_the_same_on_both_paths(
    both_paths: BothPaths, body: bytes, size: int
) -> None:
    response = ServerResponse(http_response(body.ljust(size)))
    outcome = await both_paths(
        infer_json(), response, fast_path=True, max_inference_header_bytes=2048
    )
    assert outcome.body is not None
    assert (b'"data":[]' in outcome.body) is (body is EMPTY and size <= 2048)


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (ASKING["infer"], _with_headers(binary_response(FLOATS.tobytes()), RESPONSE_HEADERS)),
        (ASKING["infer"], http_response(EMPTY)),
        (ASKING["infer"], http_response(b"no", status="404 No")),
        (ASKING["GET"], INTERIM + http_response(b"hello", {"X": "y"})),
        (ASKING["POST"], message("HTTP/1.1 200 OK", CHUNKED, chunked(b"hel", b"lo"))),
    ],
    ids=["tensors", "empty outputs", "an error", "an interim response", "chunked"],
)
async def test_response_may_be_cut_at_every_byte(
    data: bytes, whole: bytes, fast_path_requests: list[str]
) -> None:
    at = 0

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(whole[:at])
            await wait_for_arrival()
            await connection.send(whole[at:])

    async def ask(client: RawClient, sent: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
        reply = await client.ask(sent)
        headers = [each for each in reply.head.headers if each[0] not in ("date", "x-request-id")]
        return reply.head.first, sorted(headers), reply.body

    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        expected = await ask(client, with_long_head(data))
        fast_path_requests.clear()
        for place in range(1, len(whole)):
            at = place
            assert await ask(client, data) == expected
        assert len(fast_path_requests) == len(whole) - 1


# ----------------------------------------------------------------------------------------- timeouts

SHORT = 1.0  # enough for half a response on a busy machine
STALLS = {
    "silent": b"",
    "half a head": INTERIM + b"HTTP/1.1 200 OK\r\nX:",
    "half a body": http_response(b"abc")[:-1],
    "half of the tensors": binary_response(bytes(8))[:-4],
    "half of many tensors": binary_response(bytes(80_000))[:-4],
    "a chunk": message("HTTP/1.1 200 OK", CHUNKED, chunk(b"{")),
}
LIMITED = [
    *(("infer", "idle_timeout", stall) for stall in STALLS),
    ("infer", "request_timeout", "silent"),
    ("binary", "idle_timeout", "silent"),
    ("GET", "idle_timeout", "silent"),
    ("GET", "request_timeout", "half a body"),
]


@pytest.mark.asyncio(loop_factories=["uvloop"])  # on one loop only: these tests wait
@pytest.mark.parametrize(("kind", "limit", "stall"), LIMITED)
async def test_stalled_server_is_the_same_on_both_paths(
    both_paths: BothPaths, kind: str, stall: str, limit: str
) -> None:
    response = ServerResponse(STALLS[stall], hangs=True)
    limits: dict[str, Any] = {limit: SHORT}
    outcome = await both_paths(ASKING[kind], response, fast_path=True, **limits)
    if outcome.body is not None:
        assert " 504 " in outcome.first
        assert f"limits.{limit}".encode() in outcome.body
        assert b"waiting for upstream 'servers': " in outcome.body
    else:
        assert stall not in ("silent", "half a head")


# --------------------------------------------------------------------------------- several requests
