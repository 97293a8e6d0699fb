"""A server that closes a reused connection after it has read a request may have executed it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from tests.support.gateway import (
    UPSTREAM,
    RunningGateway,
    gateway_before,
    running_gateway,
)
from tests.support.grpc.client import grpc_client
from tests.support.grpc.proto_file import message_class
from tests.support.http_messages import http_response, request, with_long_head
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, ScriptedServer
from tests.support.servers.served import served

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SENT = (
    " closed the connection after the request was sent, without a response; it may have executed "
    "the request"
)
METADATA = metadata(-1)
OUTPUT = {"name": "OUT", "datatype": "FP32", "shape": [3], "data": FLOATS.tolist()}
OUTPUTS = json.dumps({"model_name": "m", "outputs": [OUTPUT]}).encode()
NO_INPUTS = b'{"name":"m","platform":"","inputs":[],"outputs":[]}'
PREDICT = "/v1/models/m:predict"
INDEX = "/v2/repository/index"


class Server:
    """Serves every request; once told to, it reads the next one and closes without a byte."""

    def __init__(self, metadata_of_model: bytes = METADATA) -> None:
        self._metadata = metadata_of_model
        self.received: list[str] = []
        """The requests, by method and target."""
        self.closes = False

    async def __call__(self, connection: Connection) -> None:
        """Serve a connection; see Script."""
        while True:
            head = (await connection.request()).head
            method, target, _ = head.first.split(" ")
            self.received.append(f"{method} {target}")
            if self.closes:
                self.closes = False
                return
            if target == INFER and head.get(HEADER_LENGTH) is not None:
                await connection.send(binary_response(FLOATS.tobytes()))
            elif target == "/v2/models/m":
                await connection.send(http_response(self._metadata))
            elif target == INDEX:
                await connection.send(http_response(b"[]"))
            else:
                await connection.send(http_response(OUTPUTS if target == INFER else b"{}"))

    def close_at_the_next(self) -> None:
        """Close at the next request, and count from there on."""
        self.closes = True
        self.received.clear()


@dataclass(frozen=True)
class Case:
    """A request, and which values of ``retry_stale`` let it be sent again."""

    method: str
    target: str
    body: bytes | None = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    again: str = "all"

    def write(self, method: str = "", *, streams: bool = False) -> bytes:
        """Write the request for HTTP/1.1, for the streaming path where it ``streams``."""
        data = request(method or self.method, self.target, self.body, self.headers)
        return with_long_head(data) if streams else data

    @property
    def called(self) -> str:
        """The method and target that the server gets."""
        return f"{self.method} {INFER if self.target == PREDICT else self.target}"

    @property
    def warm_up_method(self) -> str:
        """The method after which the connection is kept: that of HEAD is not."""
        return "GET" if self.method == "HEAD" else self.method


def _json(**parameters: Any) -> bytes:
    fields = json.loads(json_request())
    return json.dumps({**fields, **({"parameters": parameters} if parameters else {})}).encode()


def _binary(**parameters: Any) -> tuple[bytes, dict[str, str]]:
    fields = json.loads(binary_header(12))
    fields["parameters"] = {"binary_data_output": True, **parameters}
    header = json.dumps(fields).encode()
    return header + FLOATS.tobytes(), {HEADER_LENGTH: str(len(header))}


def _escaped() -> bytes:
    return _json(sequence_id=7).replace(b"sequence_id", b"sequenc\\u0065_id")


def _duplicated(text: bytes) -> bytes:
    """Put parameters of a sequence before those that parsers see."""
    return b'{"parameters":{"sequence_id":7},' + text[1:]


_HEADER = _duplicated(json.dumps(json.loads(binary_header(12, binary_output=True))).encode())
SAFE, INFER_TOO, ALL = "safe infer all", "infer all", "all"
CASES = {
    "get": Case("GET", "/v2/models/m/config", None, again=SAFE),
    "head": Case("HEAD", "/v2/models/m/config", None, again=SAFE),
    "unknown get": Case("GET", "/v2/x", None, again=SAFE),
    "json infer": Case("POST", INFER, _json(), again=INFER_TOO),
    "binary infer": Case("POST", INFER, *_binary(), again=INFER_TOO),
    "v1": Case("POST", PREDICT, json.dumps({"instances": FLOATS.tolist()}).encode(), {}, INFER_TOO),
    "repository index": Case("POST", INDEX, again=INFER_TOO),
    "index of a repository": Case("POST", "/v2/repository/r/index"),
    "json sequence": Case("POST", INFER, _json(sequence_id=7, sequence_start=True)),
    "json sequence with an escape": Case("POST", INFER, _escaped()),
    "binary sequence": Case("POST", INFER, *_binary(sequence_id=7)),
    "json sequence in a duplicate": Case("POST", INFER, _duplicated(_json(priority=1))),
    "binary sequence in a duplicate": Case(
        "POST", INFER, _HEADER + FLOATS.tobytes(), {HEADER_LENGTH: str(len(_HEADER))}
    ),
    "generate": Case("POST", "/v2/models/m/generate"),
    "load": Case("POST", "/v2/repository/models/m/load"),
    "logging": Case("POST", "/v2/logging"),
    "unknown post": Case("POST", "/v2/x"),
    "delete": Case("DELETE", "/v2/x", None),
}
SOME_CASES = ("get", "head", "json infer", "v1", "binary sequence", "generate", "unknown post")


@asynccontextmanager
async def _running(
    policy: str = "infer", dialect: str = "triton", metadata_of_model: bytes = METADATA
) -> AsyncIterator[tuple[Server, RunningGateway]]:
    server = Server(metadata_of_model)
    upstream = {"dialect": dialect} | ({} if policy == "infer" else {"retry_stale": policy})
    async with gateway_before(server, upstream=upstream) as (_, gateway):
        yield server, gateway


def _check(server: Server, case: Case, policy: str, status: int, text: str) -> None:
    """Check what the client got of the call on which the server closed."""
    if policy in case.again.split():
        assert (status, server.received) == (200, [case.called] * 2)
        return
    assert (status, server.received) == (502, [case.called])
    assert re.search(f"({UPSTREAM}|http://[0-9.:]+){SENT}", text)
    assert "sent again" not in text  # another endpoint may get it


DEFAULT_AND_OTHER_POLICIES = [
    *((name, "infer") for name in CASES),
    *((name, each) for name in SOME_CASES for each in ("safe", "all")),
]


@pytest.mark.parametrize(("name", "policy"), DEFAULT_AND_OTHER_POLICIES)
@pytest.mark.parametrize("streams", [False, True], ids=["fast path", "streaming path"])
async def test_request_over_http1_is_executed_again_only_if_it_has_no_effect(
    name: str, streams: bool, policy: str, fast_path_requests: list[str]
) -> None:
    case = CASES[name]
    data, warm_up = case.write(streams=streams), case.write(case.warm_up_method)
    async with _running(policy) as (server, gateway), gateway.client() as client:
        assert (await client.ask(warm_up)).status == 200
        server.close_at_the_next()
        fast_path_requests.clear()
        await client.send(data)
        head = await client.head()
        body = b""
        if case.method != "HEAD":
            body = await client.reader.readexactly(int(head.get("Content-Length") or 0))
        _check(server, case, policy, head.status, body.decode("latin-1"))
        if case.target == INFER:
            assert bool(fast_path_requests) is not streams


@pytest.mark.parametrize("streams", [False, True], ids=["fast path", "streaming path"])
@pytest.mark.parametrize("name", SOME_CASES)
async def test_close_before_the_request_is_not_noticed_by_clients(name: str, streams: bool) -> None:
    """The event loop gets the request before the close: that stands behind it in the kernel."""
    case = CASES[name]
    data, warm_up = case.write(streams=streams), case.write(case.warm_up_method)
    server = Server()
    async with served(server) as (scripted, _, client):
        assert (await client.ask(warm_up)).status == 200
        server.received.clear()
        (*_, kept) = scripted.connections
        client.send_nowait(data)
        kept.shutdown_write_below_tls()
        assert (await client.head()).status == 200
        assert server.received == [case.called]


def _infer_message(**parameters: int) -> bytes:
    made = message_class("ModelInferRequest")(model_name="m")
    made.inputs.add(name="IN", datatype="FP32", shape=[FLOATS.size])
    made.raw_input_contents.append(FLOATS.tobytes())
    for name, value in parameters.items():
        made.parameters[name].int64_param = value
    return bytes(made.SerializeToString())


def _message(rpc: str, **fields: Any) -> bytes:
    return bytes(message_class(f"{rpc}Request")(**fields).SerializeToString())


RPCS = {
    "config": ("ModelConfig", _message("ModelConfig", name="m"), True),
    "infer": ("ModelInfer", _infer_message(), True),
    "sequence": ("ModelInfer", _infer_message(sequence_id=7), False),
    "load": ("RepositoryModelLoad", _message("RepositoryModelLoad", model_name="m"), False),
}


@pytest.mark.parametrize(("rpc", "message", "again"), RPCS.values(), ids=RPCS)
async def test_call_over_grpc_is_executed_again_only_if_it_has_no_effect(
    rpc: str, message: bytes, again: bool
) -> None:
    async with _running() as (server, gateway), grpc_client(gateway.url) as client:
        reply = await client.call(rpc, message)
        assert reply.code is grpc.StatusCode.OK, reply.text
        server.close_at_the_next()
        reply = await client.call(rpc, message)
        if again:
            assert (reply.code, len(server.received)) == (grpc.StatusCode.OK, 2)
        else:
            assert (reply.code, len(server.received)) == (grpc.StatusCode.UNAVAILABLE, 1)
            assert SENT in reply.text


@pytest.mark.parametrize(
    ("dialect", "target", "body", "headers", "again"),
    [
        ("kserve", PREDICT, b'{"instances":[1]}', {}, True),
        ("kserve", PREDICT, b'{"instances":[1],"\\u0073equence_id":7}', {}, False),
        ("json", INFER, *_binary(), True),
        ("json", INFER, *_binary(sequence_id=7), False),
    ],
    ids=["V1", "V1 with an escape", "to JSON", "sequence to JSON"],
)
async def test_infer_in_other_forms_is_executed_again_unless_it_may_be_in_a_sequence(
    dialect: str, target: str, body: bytes, headers: dict[str, str], again: bool
) -> None:
    """The gateway does not parse V1 for a server that speaks it."""
    known = NO_INPUTS if dialect == "kserve" else METADATA
    async with _running(dialect=dialect, metadata_of_model=known) as (server, gateway):
        async with gateway.client() as client:
            assert (await client.call("POST", target, body, headers)).status == 200
            server.close_at_the_next()
            reply = await client.call("POST", target, body, headers)
        assert (reply.status, len(server.received)) == ((200, 2) if again else (502, 1))


@pytest.mark.parametrize("streams", [False, True], ids=["fast path", "streaming path"])
@pytest.mark.parametrize("allows", [True, False], ids=["no_response", "default"])
async def test_request_with_an_effect_goes_to_another_endpoint_only_if_the_route_says_so(
    allows: bool, streams: bool
) -> None:
    server, other = Server(), Server()
    data = request("POST", "/v2/x", b"{}")
    data = with_long_head(data) if streams else data
    route = {"retry_on": ["no_response"] if allows else []}
    async with (
        ScriptedServer(server) as first,
        ScriptedServer(other) as second,
        running_gateway(first.url, second.url, route=route) as gateway,
        gateway.client() as client,
    ):
        for _ in range(2):
            assert (await client.ask(data)).status == 200
        server.close_at_the_next()
        other.received.clear()
        replies = [await client.ask(data) for _ in range(2)]
        statuses = sorted(reply.status for reply in replies)
        executed = len(server.received) + len(other.received)
        assert (statuses, executed) == (([200, 200], 3) if allows else ([200, 502], 2))
