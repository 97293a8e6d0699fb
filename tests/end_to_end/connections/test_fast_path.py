"""Client and server cannot tell whether a call takes the fast path or the streaming path.

A plain request in one write takes the fast path if there is an idle connection to the server. A
request whose body arrives later, or that needs a new connection, takes the streaming path.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gateway.observe.call_record import CallRecord
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import gateway_client, running_gateway
from tests.support.http_messages import (
    Head,
    chunk,
    chunked,
    http_response,
    message,
    read_body,
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
)
from tests.support.raw_client import TIMEOUT, RawClient
from tests.support.servers.scripted_server import (
    Connection,
    ReceivedRequest,
    Script,
    ScriptedServer,
    always_respond,
)

pytestmark = pytest.mark.usefixtures("one_identity")

WARM = "/v2/warm"
CLOUD_TYPE = "application/vnd.sagemaker-triton.binary+json"
LEFT = (asyncio.IncompleteReadError, ConnectionResetError)


@pytest.mark.parametrize("name", ["IN", "data", "id"])
async def test_large_json_request_for_a_tensor_named_as_a_key_takes_the_fast_path(
    name: str, fast_path_requests: list[str]
) -> None:
    tensor = {"name": name, "shape": [10_000], "datatype": "FP32", "data": [0.25] * 10_000}
    body = json.dumps({"id": "1", "inputs": [tensor]}).encode()
    async with (
        ScriptedServer(always_respond(binary_response(FLOATS.tobytes()))) as server,
        gateway_client(server.url) as client,
    ):
        assert (await client.call("GET", WARM)).status == 200
        assert (await client.call("POST", INFER, body)).status == 200
    assert fast_path_requests == [INFER]
    assert server.requests[-1].body.endswith(np.full(10_000, 0.25, "<f4").tobytes())


@dataclass(frozen=True)
class ServerScript:
    """What the server sends, part by part, and whether it then continues, closes or hangs."""

    parts: Sequence[bytes]
    then: str = "goes on"

    @property
    def script(self) -> Script:
        async def script(connection: Connection) -> None:
            while True:
                received = await connection.request()
                if received.head.target == WARM:
                    await connection.send(http_response())
                    continue
                for part in self.parts:
                    await connection.send(part)
                    await _wait_for_arrival()
                if self.then == "closes":
                    return
                if self.then == "hangs":
                    await connection.wait_for_close()

        return script


async def _wait_for_arrival() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class Outcome:
    """What client and server see of a call, and what observers do."""

    first: str
    headers: tuple[tuple[str, str], ...]
    body: bytes | None
    """None if it was truncated."""
    goes_on: bool
    """Whether the client may reuse its connection."""
    received: tuple[tuple[str, tuple[tuple[str, str], ...], bytes], ...]
    observed: tuple[object, ...]


async def _reply(client: RawClient) -> tuple[Head, bytes | None]:
    try:
        head = await client.head()
    except LEFT:
        return Head("", ()), None
    if head.status in (204, 304):
        return head, b""
    try:
        async with asyncio.timeout(TIMEOUT):
            return head, await read_body(client.reader, head)
    except LEFT:
        return head, None


async def _goes_on(client: RawClient) -> bool:
    try:
        await client.call("GET", WARM)
    except (*LEFT, ConnectionError):
        return False
    return True


def _seen(received: ReceivedRequest) -> tuple[str, tuple[tuple[str, str], ...], bytes]:
    return received.head.first, tuple(sorted(_comparable(received.head))), received.body


def _comparable(head: Head) -> Iterator[tuple[str, str]]:
    """Return the headers that are the same for equal calls."""
    for name, value in head.headers:
        if name == "x-request-id":
            assert re.fullmatch("[0-9a-f]{32}", value)
        elif name not in ("date", "x-long"):
            yield name, value


class BothPaths:
    """Sends the same call on either path, to the same server."""

    def __init__(self, call_records: list[CallRecord], fast_path_requests: list[str]) -> None:
        self._call_records = call_records
        self._fast_path_requests = fast_path_requests

    async def fast_path(
        self, data: bytes, server: ScriptedServer, settings: dict[str, Any]
    ) -> tuple[Outcome, bool]:
        """Send a request in one write; tell also whether it took the fast path."""
        return await self._outcome(data, server, settings)

    async def streaming_path(
        self, data: bytes, server: ScriptedServer, settings: dict[str, Any]
    ) -> Outcome:
        """Send a request with a long head."""
        outcome, fast_path = await self._outcome(with_long_head(data), server, settings)
        assert not fast_path
        return outcome

    async def both(
        self,
        data: bytes,
        step: ServerScript,
        settings: dict[str, Any] | None = None,
        *,
        fast_path: bool,
    ) -> Outcome:
        """Send a request on both paths, check that they look alike, and return what was seen."""
        async with ScriptedServer(step.script) as server:
            one, fast_path_requests = await self.fast_path(data, server, settings or {})
            assert fast_path_requests is fast_path
            other = await self.streaming_path(data, server, settings or {})
        assert one == other
        return one

    async def _outcome(
        self, data: bytes, server: ScriptedServer, settings: dict[str, Any]
    ) -> tuple[Outcome, bool]:
        asked = len(server.requests)
        observed = len(self._call_records)
        before = len(self._fast_path_requests)
        async with running_gateway(server.url, **settings) as gateway, gateway.client() as client:
            await client.send(data)
            head, body = await _reply(client)
            fast_path = len(self._fast_path_requests) > before
            goes_on = body is not None and await _goes_on(client)
        received = [each for each in server.requests[asked:] if each.head.target != WARM]
        if body is None:
            head = Head("", ())  # the head of a truncated response may arrive or not
        outcome = Outcome(
            head.first,
            tuple(sorted(_comparable(head))),
            body,
            goes_on,
            # Once: a request that crossed the close of an idle connection is retried.
            tuple(dict.fromkeys(map(_seen, received))),
            self._observed(observed, with_size=body is not None),
        )
        return outcome, fast_path

    def _observed(self, start: int, *, with_size: bool) -> tuple[object, ...]:
        return tuple(
            (
                (record.method, record.target, record.status, record.upstream, record.endpoint),
                (record.attempts, record.error, record.server_error, record.error_kind),
                record.response_bytes if with_size else None,
            )
            for record in self._call_records[start:]
            if record.target != WARM
        )


@pytest.fixture
def both_paths(call_records: list[CallRecord], fast_path_requests: list[str]) -> BothPaths:
    return BothPaths(call_records, fast_path_requests)


# ----------------------------------------------------------------------------------------- requests


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
    settings: dict[str, Any] = field(default_factory=dict)


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
    "as much as may be buffered": Case(
        _of_size(2048), settings={"max_inference_header_bytes": 2048}
    ),
    "more than may be buffered": Case(_of_size(2049), False, {"max_inference_header_bytes": 2048}),
    "all that may be sent": Case(_of_size(2048), settings={"max_request_bytes": 2048}),
    "more than may be sent": Case(_of_size(2049), False, {"max_request_bytes": 2048}),
    "more than may be forwarded": Case(
        request("POST", "/v2/x", bytes(2049)), False, {"max_request_bytes": 2048}
    ),
    "nested as deep as may be": Case(
        _tensor(shape=[1], data=[[[1]]]), settings={"max_json_depth": 6}
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
    step = ServerScript([binary_response(bytes(8), FLOATS.tobytes())])
    await both_paths.both(asked.data, step, asked.settings, fast_path=asked.fast_path)


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

SERVER_SCRIPTS = {
    "tensors": ServerScript([binary_response(FLOATS.tobytes())]),
    "NaN": ServerScript([binary_response(np.array([1, np.nan, np.inf, -np.inf], "<f4").tobytes())]),
    "empty outputs": ServerScript([http_response(EMPTY)]),
    "JSON": ServerScript(
        [http_response(b'{"outputs": [{"name":"O","shape":[1],"data":[ 1.50 ]}]}')]
    ),
    "nothing": ServerScript([http_response(b"")]),
    "compressed": ServerScript([http_response(b"\x1f\x8b", {"Content-Encoding": "gzip"})]),
    "headers": ServerScript([_with_headers(http_response(b"{}"), RESPONSE_HEADERS)]),
    "tensors with headers": ServerScript(
        [_with_headers(binary_response(bytes(4)), RESPONSE_HEADERS)]
    ),
    "a reason of its own": ServerScript([http_response(b"{}", status="200 Fine")]),
    "204": ServerScript([message("HTTP/1.1 204 No Content")]),
    "204 with a length": ServerScript(
        [message("HTTP/1.1 204 No Content", {"Content-Length": "5"})]
    ),
    "304": ServerScript([message("HTTP/1.1 304 Not Modified", {"ETag": '"x"'})]),
    "500": ServerScript([http_response(WITH_TENSORS, SIZED, "500 Oh")]),
    "503 and closes": ServerScript(
        [http_response(b"", {"Connection": "close"}, "503 Busy")], "closes"
    ),
    "the last": ServerScript([http_response(b"{}", {"Connection": "close"})], "closes"),
    "closes behind it": ServerScript([http_response(b"{}")], "closes"),
    "HTTP/1.0": ServerScript([http_response(b"{}").replace(b"/1.1", b"/1.0")], "closes"),
    "a length beyond the body": ServerScript([_inconsistent(**{HEADER_LENGTH: "999"})]),
    "tensors too long": ServerScript([http_response(WITH_TENSORS + b"x", SIZED)]),
    "chunked": ServerScript([message("HTTP/1.1 200 OK", CHUNKED, chunked(b'{"a":', b"1}"))]),
    "chunked tensors": ServerScript(
        [message("HTTP/1.1 200 OK", {**CHUNKED, **SIZED}, chunked(WITH_TENSORS))]
    ),
    "chunked and empty": ServerScript([message("HTTP/1.1 200 OK", CHUNKED, chunked())]),
    "a broken chunk": ServerScript(
        [message("HTTP/1.1 200 OK", CHUNKED, chunk(b"a") + b"what\r\n")]
    ),
    "until close": ServerScript([message("HTTP/1.1 200 OK", {}, b"{}")], "closes"),
    "tensors until close": ServerScript(
        [message("HTTP/1.1 200 OK", SIZED, WITH_TENSORS)], "closes"
    ),
    "a large body": ServerScript([http_response(b"x" * 70_000)]),
    "many tensors": ServerScript([binary_response(bytes(40_000), bytes(40_000))]),
    "an interim response": ServerScript([INTERIM + http_response(b"{}")]),
    "an interim response before it": ServerScript([INTERIM, binary_response(bytes(4))]),
    "no HTTP": ServerScript([b"what?\r\n\r\n"]),
    "no response": ServerScript([], "closes"),
    "half a body": ServerScript([http_response(b"abc")[:-1]], "closes"),
    "half of the tensors": ServerScript([binary_response(bytes(8))[:-4]], "closes"),
    "half of many tensors": ServerScript([binary_response(bytes(80_000))[:-4]], "closes"),
    "half of a chunk": ServerScript(
        [message("HTTP/1.1 200 OK", CHUNKED, chunk(b"abc")[:-3])], "closes"
    ),
}
ASKING = {
    "infer": infer_json(),
    "GET": request("GET", "/v2/x"),
    "POST": request("POST", "/v2/x", b"hello"),
    "binary": infer_binary(binary_header(12), FLOATS.tobytes()),
}


TENSORS = tuple(
    name
    for name in SERVER_SCRIPTS
    if name.startswith(("tensors", "half of", "a length", "empty outputs", "chunked tensors"))
)
OF_TENSORS_ALONE = (*TENSORS, "NaN")
ASKED = [
    *(("infer", name) for name in SERVER_SCRIPTS),
    *(("binary", name) for name in (*TENSORS, "JSON", "nothing", "500")),
    *(("GET", name) for name in SERVER_SCRIPTS if name not in OF_TENSORS_ALONE),
    *(("POST", name) for name in ("headers", "chunked", "half a body", "503 and closes")),
]


@pytest.mark.parametrize(("kind", "name"), ASKED)
async def test_response_is_the_same_on_both_paths(
    both_paths: BothPaths, kind: str, name: str
) -> None:
    await both_paths.both(ASKING[kind], SERVER_SCRIPTS[name], fast_path=True)


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
    settings = {"route": {"compression": "gzip"}}
    outcome = await both_paths.both(ASKING[kind], SERVER_SCRIPTS[name], settings, fast_path=True)
    if outcome.body is not None:
        assert ("vary", "Accept-Encoding") in outcome.headers
    assert ("content-encoding", "gzip") not in outcome.headers or outcome.body == b"\x1f\x8b"


@pytest.mark.parametrize("data", ASKING.values(), ids=ASKING)
async def test_response_to_be_compressed_takes_the_streaming_path(
    both_paths: BothPaths, data: bytes
) -> None:
    asked = _with_headers(data, b"Accept-Encoding: gzip\r\n")
    step = ServerScript([http_response(b'{"outputs":[]}'.ljust(2000))])
    outcome = await both_paths.both(
        asked, step, {"route": {"compression": "gzip"}}, fast_path=False
    )
    assert ("content-encoding", "gzip") in outcome.headers


@pytest.mark.parametrize("nonfinite", ["literal", "null", "string", "error"])
async def test_json_policies_are_the_same_on_both_paths(
    both_paths: BothPaths, nonfinite: str
) -> None:
    route = {"route": {"nonfinite": nonfinite}}
    outcome = await both_paths.both(infer_json(), SERVER_SCRIPTS["NaN"], route, fast_path=True)
    assert (" 406 " in outcome.first) is (nonfinite == "error")


@pytest.mark.parametrize("size", [2047, 2048, 2049])
@pytest.mark.parametrize("body", [EMPTY, b"{}"])
async def test_response_near_the_buffer_cap_is_the_same_on_both_paths(
    both_paths: BothPaths, body: bytes, size: int
) -> None:
    step = ServerScript([http_response(body.ljust(size))])
    outcome = await both_paths.both(
        infer_json(), step, {"max_inference_header_bytes": 2048}, fast_path=True
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
    both_paths: BothPaths, data: bytes, whole: bytes, fast_path_requests: list[str]
) -> None:
    at = 0

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(whole[:at])
            await _wait_for_arrival()
            await connection.send(whole[at:])

    async with ScriptedServer(script) as server:
        expected = await both_paths.streaming_path(data, server, {})
        async with gateway_client(server.url) as client:
            await client.ask(data)
            fast_path_requests.clear()
            for place in range(1, len(whole)):
                at = place
                reply = await client.ask(data)
                assert reply.head.first == expected.first
                assert tuple(sorted(_comparable(reply.head))) == expected.headers
                assert reply.body == expected.body
            assert len(fast_path_requests) == len(whole) - 1


# ----------------------------------------------------------------------------------------- timeouts

SHORT = 1.0  # enough for half a response on a busy machine
STALLS = {
    "silent": ServerScript([], "hangs"),
    "half a head": ServerScript([INTERIM + b"HTTP/1.1 200 OK\r\nX:"], "hangs"),
    "half a body": ServerScript([http_response(b"abc")[:-1]], "hangs"),
    "half of the tensors": ServerScript([binary_response(bytes(8))[:-4]], "hangs"),
    "half of many tensors": ServerScript([binary_response(bytes(80_000))[:-4]], "hangs"),
    "a chunk": ServerScript([message("HTTP/1.1 200 OK", CHUNKED, chunk(b"{"))], "hangs"),
}
LIMITED = [
    *(("infer", "idle_timeout", stall) for stall in STALLS),
    ("infer", "request_timeout", "silent"),
    ("GET", "idle_timeout", "silent"),
    ("GET", "request_timeout", "half a body"),
]


@pytest.mark.asyncio(loop_factories=["uvloop"])  # on one loop only: these tests wait
@pytest.mark.parametrize(("kind", "limit", "stall"), LIMITED)
async def test_stalled_server_is_the_same_on_both_paths(
    both_paths: BothPaths, kind: str, stall: str, limit: str
) -> None:
    outcome = await both_paths.both(ASKING[kind], STALLS[stall], {limit: SHORT}, fast_path=True)
    if outcome.body is not None:
        assert " 504 " in outcome.first
        assert f"limits.{limit}".encode() in outcome.body
        assert b"waiting for upstream 'servers': " in outcome.body
    else:
        assert stall not in ("silent", "half a head")


# --------------------------------------------------------------------------------- several requests


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("connection", ["Content-Length", "keep-alive, content-length"])
async def test_body_is_never_taken_for_a_request(
    both_paths: BothPaths, method: str, connection: str
) -> None:
    """A client must not smuggle a request past the gateway."""
    hidden = request("GET", "/v2/hidden")
    data = request(method, "/v2/x", hidden, {"Connection": connection})
    async with ScriptedServer() as server:
        outcomes = [await both_paths.streaming_path(data, server, {})]
        outcomes.append((await both_paths.fast_path(data, server, {}))[0])
        for outcome in outcomes:
            ((first, _, body),) = outcome.received
            assert first == f"{method} /v2/x HTTP/1.1"
            assert body == hidden
