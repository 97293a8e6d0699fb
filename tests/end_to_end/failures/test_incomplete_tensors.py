"""A response that does not hold all of its tensors is no success, whatever its head says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.errors import ErrorKind
from gateway.observe.call_record import CallRecord
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, RunningGateway, running_gateway
from tests.support.grpc.client import grpc_client
from tests.support.http2_client import connect_http2
from tests.support.http_messages import (
    chunk,
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
from tests.support.servers.scripted_server import Connection, ScriptedServer

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

ASKED = binary_header(12, binary_output=True)
GENERATE = "/v2/models/m/generate"
PREDICT = "/v1/models/m:predict"


@dataclass(frozen=True)
class Form:
    """A request; ``inputs`` tells whether the model's metadata lists its inputs."""

    target: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    dialect: str = "triton"
    inputs: bool = True

    def write(self) -> bytes:
        return request("POST", self.target, self.body, self.headers)


LENGTH = {HEADER_LENGTH: str(len(ASKED))}
FORMS = {
    "JSON": Form(INFER, json_request()),
    "binary": Form(INFER, ASKED + FLOATS.tobytes(), LENGTH),
    "binary to KServe": Form(INFER, ASKED + FLOATS.tobytes(), LENGTH, "kserve"),
    "binary to OpenVINO": Form(INFER, ASKED + FLOATS.tobytes(), LENGTH, "openvino"),
    "raw": Form(INFER, FLOATS.tobytes(), {HEADER_LENGTH: "0"}),
    "V1": Form(PREDICT, b'{"instances":[1,2,3]}'),
    "V1 to a V1 server": Form(PREDICT, b'{"instances":[1,2,3]}', {}, "kserve", inputs=False),
    "generate": Form(GENERATE, b'{"text_input":"x"}'),
    "JSON to a JSON server": Form(INFER, json_request(), {}, "json"),
}

HEADER = binary_response_header(12)
TENSORS = FLOATS.tobytes()


def _response(length: int | str, body: bytes, *, sized: bool = True) -> bytes:
    """Write a response with this size of its JSON."""
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(length)}
    if sized:
        return http_response(body, headers)
    headers["Transfer-Encoding"] = "chunked"
    return message("HTTP/1.1 200 OK", headers, chunk(body) + chunk(b""))


FALSE: dict[str, bytes] = {
    "JSON larger than the body": _response(10**6, HEADER + TENSORS),
    "JSON one byte larger than the body": _response(len(HEADER + TENSORS) + 1, HEADER + TENSORS),
    "JSON larger than the chunks": _response(10**6, HEADER + TENSORS, sized=False),
    "JSON of a negative size": _response(-1, HEADER + TENSORS),
    "JSON of no size": _response("x", HEADER + TENSORS),
    "JSON of size 0": _response(0, HEADER + TENSORS),
    "JSON of size 0 alone": _response(0, b""),
    "JSON that ends before its size": _response(len(HEADER) + 1, HEADER + TENSORS),
    "JSON that ends after its size": _response(len(HEADER) - 1, HEADER + TENSORS),
    "short tensors": _response(len(HEADER), HEADER + TENSORS[1:]),
    "long tensors": _response(len(HEADER), HEADER + TENSORS + b"x"),
    "short tensors in chunks": _response(len(HEADER), HEADER + TENSORS[1:], sized=False),
    "tensors of another shape": _response(len(HEADER), HEADER.replace(b"[3]", b"[4]") + TENSORS),
    "no outputs": _response(2, b"{}" + TENSORS),
    "page": _response(len(HEADER), b"<html>".ljust(200)),
}
BINARY_FORMS = [name for name in FORMS if name.startswith(("JSON", "binary", "raw"))][:-1]


class Server:
    """Responds with these in turn to requests that infer; ``going_on`` lets it send the rest."""

    def __init__(self, form: Form, *responses: bytes | tuple[bytes, bytes]) -> None:
        self._form = form
        self._responses = [*responses]
        self.going_on = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.first.startswith("POST"):
                response = self._responses.pop(0)
                if isinstance(response, tuple):
                    await connection.send(response[0])
                    await self.going_on.wait()
                    await connection.send(response[1])
                else:
                    await connection.send(response)
            elif received.head.target.endswith("/config"):
                await connection.send(http_response(b"{}", status="404 Not Found"))
            elif self._form.inputs:
                await connection.send(http_response(metadata(-1)))
            else:
                await connection.send(http_response(b'{"name":"m","inputs":[],"outputs":[]}'))


@asynccontextmanager
async def _serving(server: Server, dialect: str) -> AsyncIterator[RunningGateway]:
    async with (
        ScriptedServer(server) as scripted,
        running_gateway(scripted.url, upstream={"dialect": dialect}) as gateway,
    ):
        yield gateway


def _check_counted(gateway: RunningGateway) -> None:
    (state,) = gateway.pool.snapshot()
    assert state.consecutive_failures == 1
    assert state.last_error is not None
    assert state.last_error.startswith(f"{state.url}: ")


@pytest.mark.parametrize("path", [bytes, with_long_head], ids=["fast", "streaming"])
@pytest.mark.parametrize("response", FALSE.values(), ids=FALSE)
@pytest.mark.parametrize("name", [*BINARY_FORMS, "V1"])
async def test_false_binary_response_is_a_502(
    name: str, response: bytes, path: type[bytes]
) -> None:
    form, good = FORMS[name], binary_response(TENSORS)
    server = Server(form, good, response, good)
    async with _serving(server, form.dialect) as gateway, gateway.client() as client:
        data = path(form.write())
        assert (await client.ask(data)).status == 200
        refused = await client.ask(data)
        assert refused.status == 502
        assert UPSTREAM in refused.error
        _check_counted(gateway)
        assert (await client.ask(data)).status == 200


@pytest.mark.parametrize("extra", [(), (("x-long", "l" * 3000),)], ids=["fast", "streaming"])
@pytest.mark.parametrize("response", FALSE.values(), ids=FALSE)
async def test_false_binary_response_is_a_502_over_http2(
    response: bytes, extra: tuple[tuple[str, str], ...]
) -> None:
    form, good = FORMS["binary"], binary_response(TENSORS)
    fields = [*((name.lower(), value) for name, value in form.headers.items()), *extra]
    server = Server(form, good, response, good)
    async with _serving(server, "triton") as gateway, connect_http2(gateway.url) as client:
        assert (await client.call("POST", INFER, form.body, fields)).status == 200
        refused = await client.call("POST", INFER, form.body, fields)
        assert refused.status == 502
        assert UPSTREAM in refused.json["error"]
        _check_counted(gateway)
        assert (await client.call("POST", INFER, form.body, fields)).status == 200


@pytest.mark.parametrize("response", FALSE.values(), ids=FALSE)
async def test_false_binary_response_is_unavailable_over_grpc(response: bytes) -> None:
    asked = service_pb2.ModelInferRequest(model_name="m", id="r")
    asked.inputs.add(name="IN", datatype="FP32", shape=[3])
    asked.raw_input_contents.append(TENSORS)
    server = Server(FORMS["binary"], response, binary_response(TENSORS))
    async with _serving(server, "triton") as gateway, grpc_client(gateway.url) as client:
        refused = await client.call("ModelInfer", asked.SerializeToString())
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert UPSTREAM in refused.text
        assert (await client.call("ModelInfer", asked.SerializeToString())).message


# ------------------------------------------------------------------------------- large responses

LARGE = 200_000
LARGE_HEADER = binary_response_header(LARGE)
_LARGE_JSON = b'{"outputs":[{"name":"o","datatype":"INT8","shape":[90000],"data":[' + b"1," * 89_999
BROKEN: dict[str, tuple[str, dict[str, str], bytes]] = {
    "short tensors": (
        "binary",
        {HEADER_LENGTH: str(len(LARGE_HEADER))},
        LARGE_HEADER + bytes(LARGE - 1),
    ),
    "short tensors of KServe": (
        "binary to KServe",
        {HEADER_LENGTH: str(len(LARGE_HEADER))},
        LARGE_HEADER + bytes(LARGE - 1),
    ),
    "JSON larger than the body": (
        "binary",
        {HEADER_LENGTH: str(10**6)},
        b'{"a":"' + b"x" * LARGE,
    ),
    "JSON": ("JSON to a JSON server", {}, _LARGE_JSON + b"1"),
    "JSON of Triton": ("JSON", {}, _LARGE_JSON + b"1"),
    "V1": ("V1 to a V1 server", {}, b'{"predictions":[' + b"1," * 90_000 + b"1"),
    "generate": ("generate", {}, b'{"text_output":"' + b"x" * LARGE),
}
_CASES = pytest.mark.parametrize(("name", "headers", "body"), BROKEN.values(), ids=BROKEN)


def _cut(headers: dict[str, str], body: bytes, *, sized: bool) -> tuple[bytes, bytes]:
    """Write a response in two parts, the second of which the server sends later."""
    fields = {"Content-Type": "application/json", **headers}
    fields |= {"Content-Length": str(len(body))} if sized else {"Transfer-Encoding": "chunked"}
    start, rest = body[:100_000], body[100_000:]
    if not sized:
        start, rest = chunk(start), chunk(rest) + chunk(b"")
    return message("HTTP/1.1 200 OK", fields, start), rest


def _check_broken_off(record: CallRecord, caplog: pytest.LogCaptureFixture) -> None:
    """Check that operators see a response that broke off."""
    assert record.error_kind is ErrorKind.BAD_RESPONSE
    assert any("response aborted" in each.getMessage() for each in caplog.records)


def _is_refused_at_once(name: str, headers: dict[str, str], *, sized: bool) -> bool:
    """Whether its start and its size tell, or the gateway has to read the whole."""
    return name == "JSON" or (sized and HEADER_LENGTH in headers)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
@pytest.mark.parametrize("path", [bytes, with_long_head], ids=["fast", "streaming"])
@_CASES
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
    server = Server(form, _cut(headers, body, sized=sized))
    async with _serving(server, form.dialect) as gateway, gateway.client() as client:
        await client.send(path(form.write()))
        if _is_refused_at_once(name, headers, sized=sized):
            server.going_on.set()
            assert (await client.read_response()).status == 502
            return
        head = await client.head()
        assert head.status == 200
        server.going_on.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await read_body(client.reader, head)
    _check_broken_off(call_records[-1], caplog)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
@_CASES
async def test_large_response_that_is_not_complete_is_reset_over_http2(
    name: str,
    headers: dict[str, str],
    body: bytes,
    sized: bool,
    call_records: list[CallRecord],
    caplog: pytest.LogCaptureFixture,
) -> None:
    form = FORMS[name]
    fields = [(name.lower(), value) for name, value in form.headers.items()]
    server = Server(form, _cut(headers, body, sized=sized))
    async with _serving(server, form.dialect) as gateway, connect_http2(gateway.url) as client:
        stream = await client.start("POST", form.target, form.body, fields)
        if _is_refused_at_once(name, headers, sized=sized):
            server.going_on.set()
            assert (await client.response(stream)).status == 502
            return
        await client.until(lambda: client.replies[stream].body)
        server.going_on.set()
        reply = await client.response(stream)
        assert reply.status == 200
        assert not reply.ended
        assert reply.reset is not None
    _check_broken_off(call_records[-1], caplog)


@pytest.mark.parametrize("path", [bytes, with_long_head], ids=["fast", "streaming"])
@_CASES
async def test_large_response_that_is_not_complete_is_a_502_where_it_comes_at_once(
    name: str, headers: dict[str, str], body: bytes, path: type[bytes]
) -> None:
    """Or it breaks off, where the gateway has passed on its start."""
    form = FORMS[name]
    server = Server(form, http_response(body, headers))
    async with _serving(server, form.dialect) as gateway, gateway.client() as client:
        try:
            refused = await client.ask(path(form.write()))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        assert refused.status == 502
        assert UPSTREAM in refused.error


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
@_CASES
async def test_large_response_that_is_complete_passes(
    name: str, headers: dict[str, str], body: bytes, sized: bool
) -> None:
    form = FORMS[name]
    size = int(headers.get(HEADER_LENGTH, "0"))
    if size > len(body):
        body = body[:-1] + b'"' + b" " * (size - len(body) - 1) + b"}"
    elif size:
        body += b"x"
    else:
        body += b'"}' if name == "generate" else b"]}" if form.target == PREDICT else b"]}]}"
    server = Server(form, _cut(headers, body + b" " * (not size), sized=sized))
    server.going_on.set()
    async with _serving(server, form.dialect) as gateway, gateway.client() as client:
        passed = await client.ask(form.write())
        assert passed.status == 200
        assert passed.body == body + b" " * (not size)
