"""A response without all of its tensors is no success of a request that infers.

Login pages and ingresses that lead elsewhere respond with 200 and HTML to any request. The head of
a binary response may promise what its body does not hold.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.errors import ErrorKind
from gateway.observe.call_record import CallRecord
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, RunningGateway, gateway_before, running_gateway
from tests.support.grpc.client import grpc_client
from tests.support.grpc.proto_file import infer_request
from tests.support.http2_client import connect_http2
from tests.support.http_messages import (
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
    json_request,
    metadata,
)
from tests.support.servers.http2_server import answering
from tests.support.servers.scripted_server import Connection, ScriptedServer

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

GENERATE = "/v2/models/m/generate"
PREDICT = "/v1/models/m:predict"
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}
OUTPUT = {"name": "OUT", "shape": [3], "datatype": "FP32", "data": [1.5, 2, 3]}
OUTPUTS = json.dumps({"model_name": "m", "outputs": [OUTPUT]}).encode()
TENSORS = FLOATS.tobytes()
GOOD = binary_response(TENSORS)


@dataclass(frozen=True)
class Form:
    """A request, and what servers respond to it that are in order."""

    target: str
    body: bytes
    good: bytes = GOOD
    headers: dict[str, str] = field(default_factory=dict)
    dialect: str = "triton"
    inputs: bool = True
    """Whether the model's metadata lists its inputs."""

    def write(self) -> bytes:
        """Write the request for HTTP/1.1."""
        return request("POST", self.target, self.body, self.headers)


_BINARY = binary_header(12, binary_output=True)
_BODY, _LENGTH = _BINARY + TENSORS, {HEADER_LENGTH: str(len(_BINARY))}
_INSTANCES = b'{"instances":[1,2,3]}'
_TEXT = b'{"text_input":"x"}'
_PREDICTIONS = http_response(b'{"predictions":[7]}')
FORMS = {
    "JSON": Form(INFER, json_request()),
    "JSON to a JSON server": Form(INFER, json_request(), http_response(OUTPUTS), dialect="json"),
    "binary": Form(INFER, _BODY, GOOD, _LENGTH),
    "binary to a JSON server": Form(INFER, _BODY, http_response(OUTPUTS), _LENGTH, "json"),
    "binary to KServe": Form(INFER, _BODY, GOOD, _LENGTH, "kserve"),
    "raw": Form(INFER, TENSORS, GOOD, {HEADER_LENGTH: "0"}),
    "V1": Form(PREDICT, _INSTANCES),
    "V1 to a V1 server": Form(PREDICT, _INSTANCES, _PREDICTIONS, dialect="kserve", inputs=False),
    "generate": Form(GENERATE, _TEXT, http_response(b'{"text_output":"x"}')),
    "generate_stream": Form(GENERATE + "_stream", _TEXT, http_response(b"data: {}\n\n", EVENTS)),
}

on_both_paths = pytest.mark.parametrize("path", [bytes, with_long_head], ids=["fast", "streaming"])


class InferringServer:
    """Responds to requests that infer with these in turn, the last one again and again.

    The second part of a response in two parts is sent once ``going_on`` is set.
    """

    def __init__(self, *responses: bytes | tuple[bytes, bytes], inputs: bool = True) -> None:
        self._responses = [*responses]
        self._metadata = metadata(-1) if inputs else b'{"name":"m","inputs":[],"outputs":[]}'
        self.asked = 0
        self.going_on = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        """Serve a connection; see Script."""
        while True:
            received = await connection.request()
            if received.head.first.startswith("POST"):
                await self._infer(connection)
            elif received.head.target.endswith("/config"):
                await connection.send(http_response(b"{}", status="404 Not Found"))
            else:
                await connection.send(http_response(self._metadata))

    async def _infer(self, connection: Connection) -> None:
        self.asked += 1
        response = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
        if isinstance(response, bytes):
            await connection.send(response)
        else:
            await connection.send(response[0])
            await self.going_on.wait()
            await connection.send(response[1])


@asynccontextmanager
async def serving(
    server: InferringServer, dialect: str = "triton"
) -> AsyncIterator[RunningGateway]:
    """Run a gateway in front of the server."""
    async with gateway_before(server, upstream={"dialect": dialect}) as (_, gateway):
        yield gateway


# ---------------------------------------------------------------------------------- refused at once

PAGE = b"<!doctype html>\n<title>Sign in</title>"
HTML = {"Content-Type": "text/html; charset=utf-8"}
HEADER = binary_response_header(12)


def _binary(length: int | str, body: bytes, *, sized: bool = True) -> bytes:
    """Write a binary response with this size of its JSON."""
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(length)}
    if sized:
        return http_response(body, headers)
    headers["Transfer-Encoding"] = "chunked"
    return message("HTTP/1.1 200 OK", headers, chunked(body))


# The response, what its error says, and what operators read of it beside. The tests of the codec
# and of the header length have more.
NO_TENSORS: dict[str, tuple[bytes, str, str]] = {
    "page": (http_response(PAGE, HTML), "text/html; charset=utf-8", "Sign in"),
    "page without an end": (
        message("HTTP/1.1 200 OK", {**HTML, "Transfer-Encoding": "chunked"}, chunk(PAGE)),
        HTML["Content-Type"],
        "Sign in",
    ),
    "head of a page alone": (
        message("HTTP/1.1 200 OK", {**HTML, "Content-Length": "1000"}),
        HTML["Content-Type"],
        "",
    ),
    "204": (message("HTTP/1.1 204 No Content"), "status 204", "an empty body"),
    "no chunks": (
        message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}, chunk(b"")),
        "no Content-Type",
        "an empty body",
    ),
    "other JSON": (http_response(b'{"login":"please"}'), "application/json", "please"),
    "JSON larger than the chunks": (_binary(10**6, HEADER + TENSORS, sized=False), "", ""),
    "JSON of a negative size": (_binary(-1, HEADER + TENSORS), HEADER_LENGTH, "'-1'"),
    "JSON that ends after its size": (_binary(len(HEADER) - 1, HEADER + TENSORS), "", ""),
    "short tensors": (_binary(len(HEADER), HEADER + TENSORS[1:]), "", ""),
    "short tensors in chunks": (_binary(len(HEADER), HEADER + TENSORS[1:], sized=False), "", ""),
    "long tensors": (_binary(len(HEADER), HEADER + TENSORS + b"x"), "", ""),
    "two sizes of JSON": (
        _binary(5, HEADER + TENSORS).replace(
            b"Content-Type: application/octet-stream", f"{HEADER_LENGTH}: 5".encode()
        ),
        HEADER_LENGTH,
        "",
    ),
    "tensors of another shape": (
        _binary(len(HEADER), HEADER.replace(b"[3]", b"[4]") + TENSORS),
        "",
        "",
    ),
}
CASES = [
    pytest.param(FORMS[form], *NO_TENSORS[name], id=f"{form}: {name}")
    for form, names in {
        "JSON": list(NO_TENSORS),
        # Servers of V1, and generate, are free in what their JSON holds.
        "generate": ["page", "204"],
        "generate_stream": ["page"],
        "V1 to a V1 server": ["page"],
        "JSON to a JSON server": ["page", "other JSON"],
        "binary": ["other JSON", "JSON larger than the chunks", "tensors of another shape"],
        "binary to KServe": ["page", "tensors of another shape"],
        "raw": ["other JSON", "tensors of another shape"],
        "V1": ["other JSON", "tensors of another shape"],
    }.items()
    for name in names
]


@on_both_paths
@pytest.mark.parametrize(("form", "response", "says", "words"), CASES)
async def test_response_without_tensors_is_a_502(
    form: Form, response: bytes, says: str, words: str, path: type[bytes]
) -> None:
    server = InferringServer(form.good, response, form.good, inputs=form.inputs)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        data = path(form.write())
        assert (await client.ask(data)).status == 200
        refused = await client.ask(data)
        assert refused.status == 502
        assert UPSTREAM in refused.error
        assert says in refused.error
        assert "127.0.0.1" not in refused.error
        # Operators see what the endpoint did: it is the error that is logged, too.
        (state,) = gateway.pool.snapshot()
        assert state.consecutive_failures == 1
        assert state.last_error is not None
        assert state.last_error.startswith(f"{state.url}: ")
        assert words in state.last_error
        assert state.last_error.isprintable()
        # Nothing of it comes before the next response, and nothing was sent again.
        assert (await client.ask(data)).status == 200
        assert server.asked == 3


@pytest.mark.parametrize("name", ["page", "no chunks", "short tensors in chunks"])
async def test_response_without_tensors_is_an_error_over_grpc(name: str) -> None:
    response, says, _ = NO_TENSORS[name]
    server = InferringServer(response, GOOD, response, GOOD)
    async with serving(server) as gateway, grpc_client(gateway.url) as client:
        refused = await client.call("ModelInfer", infer_request())
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert (await client.call("ModelInfer", infer_request())).message
        streamed = await client.call("ModelStreamInfer", infer_request(), infer_request())
    assert streamed.code is grpc.StatusCode.OK
    first, second = map(service_pb2.ModelStreamInferResponse.FromString, streamed.messages)
    for text in (refused.text, first.error_message):
        assert UPSTREAM in text
        assert says in text
    assert second.infer_response.outputs


async def test_page_of_a_grpc_server_is_unavailable() -> None:
    script = answering(PAGE, headers=[("content-type", "text/html")])
    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url.replace("http:", "grpc:")) as gateway,
        grpc_client(gateway.url) as client,
        gateway.client() as http_client,
    ):
        error = f"{UPSTREAM} did not respond in gRPC"
        # The second call may take the fast path.
        for count, method in enumerate(["ModelInfer", "ModelInfer", "ModelStreamInfer"], 1):
            refused = await client.call(method, infer_request())
            assert (refused.code, refused.messages) == (grpc.StatusCode.UNAVAILABLE, [])
            assert error in refused.text
            assert "text/html" in refused.text
            (state,) = gateway.pool.snapshot()
            assert state.consecutive_failures == count
            assert state.last_error == refused.text.replace(UPSTREAM, state.url)
        over_http = await http_client.ask(FORMS["JSON"].write())
        assert over_http.status == 502
        assert error in over_http.error


# ---------------------------------------------------------------------------------- large responses

LARGE = 200_000
LARGE_HEADER = binary_response_header(LARGE)
_LARGE_JSON = b'{"outputs":[{"name":"o","datatype":"INT8","shape":[90000],"data":[' + b"1," * 89_999
BROKEN: dict[str, tuple[str, dict[str, str], bytes]] = {
    "short tensors": (
        "binary",
        {HEADER_LENGTH: str(len(LARGE_HEADER))},
        LARGE_HEADER + bytes(LARGE - 1),
    ),
    "JSON larger than the body": ("binary", {HEADER_LENGTH: "1000000"}, b'{"a":"' + b"x" * LARGE),
    "JSON": ("JSON to a JSON server", {}, _LARGE_JSON + b"1"),
    "JSON of Triton": ("JSON", {}, _LARGE_JSON + b"1"),
    "V1": ("V1 to a V1 server", {}, b'{"predictions":[' + b"1," * 90_000 + b"1"),
    "generate": ("generate", {}, b'{"text_output":"' + b"x" * LARGE),
}


def _cut(headers: dict[str, str], body: bytes, *, sized: bool) -> tuple[bytes, bytes]:
    """Write a response in two parts, the second of which the server sends later."""
    fields = {"Content-Type": "application/json", **headers}
    fields |= {"Content-Length": str(len(body))} if sized else {"Transfer-Encoding": "chunked"}
    start, rest = body[:100_000], body[100_000:]
    if not sized:
        start, rest = chunk(start), chunked(rest)
    return message("HTTP/1.1 200 OK", fields, start), rest


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
@on_both_paths
@pytest.mark.parametrize(("name", "headers", "body"), BROKEN.values(), ids=BROKEN)
async def test_large_response_that_is_not_complete_never_ends_well(
    name: str,
    headers: dict[str, str],
    body: bytes,
    path: type[bytes],
    sized: bool,
    call_records: list[CallRecord],
    caplog: pytest.LogCaptureFixture,
) -> None:
    form = FORMS[name]
    server = InferringServer(_cut(headers, body, sized=sized), inputs=form.inputs)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        await client.send(path(form.write()))
        # Its start and its size tell, or the gateway has to read the whole.
        if name == "JSON" or (sized and HEADER_LENGTH in headers):
            server.going_on.set()
            assert (await client.read_response()).status == 502
            return
        head = await client.head()
        assert head.status == 200
        server.going_on.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await read_body(client.reader, head)
    assert call_records[-1].error_kind is ErrorKind.BAD_RESPONSE
    assert any("response aborted" in each.getMessage() for each in caplog.records)


async def test_large_response_that_is_not_complete_is_reset_over_http2() -> None:
    form, (_, headers, body) = FORMS["binary"], BROKEN["short tensors"]
    server = InferringServer(_cut(headers, body, sized=False))
    async with serving(server, form.dialect) as gateway, connect_http2(gateway.url) as client:
        fields = [(name.lower(), value) for name, value in form.headers.items()]
        stream = await client.start("POST", form.target, form.body, fields)
        await client.until(lambda: client.replies[stream].body)
        server.going_on.set()
        reply = await client.response(stream)
        assert (reply.status, reply.ended) == (200, False)
        assert reply.reset is not None


ACCEPTED = (b"200 OK", b"203 Non-Authoritative Information")


@on_both_paths
@pytest.mark.parametrize("name", ["JSON", "JSON to a JSON server", "binary to a JSON server", "V1"])
async def test_tensors_of_any_success_are_converted(name: str, path: type[bytes]) -> None:
    form = FORMS[name]
    server = InferringServer(form.good, form.good.replace(*ACCEPTED))
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        usual, accepted = [await client.ask(path(form.write())) for _ in range(2)]
    assert (usual.status, accepted.status) == (200, 203)
    assert accepted.body == usual.body
    assert accepted.head.get(HEADER_LENGTH) == usual.head.get(HEADER_LENGTH)
