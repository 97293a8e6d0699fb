"""A server that closes a reused connection after it has read a request may have executed it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from tests.support.gateway import UPSTREAM, gateway_before, served
from tests.support.grpc.client import grpc_client
from tests.support.grpc.proto_file import ModelInferRequest, infer_request
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
from tests.support.servers.scripted_server import Connection

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SENT = (
    " closed the connection after the request was sent, without a response; it may have executed "
    "the request"
)
OUTPUT = {"name": "OUT", "datatype": "FP32", "shape": [3], "data": FLOATS.tolist()}
OUTPUTS = json.dumps({"model_name": "m", "outputs": [OUTPUT]}).encode()
NO_INPUTS = b'{"name":"m","platform":"","inputs":[],"outputs":[]}'
PREDICT = "/v1/models/m:predict"


class Server:
    """Serves every request; once it ``closes``, it reads the next one and closes without a byte."""

    def __init__(self, metadata_of_model: bytes) -> None:
        self._metadata = metadata_of_model
        self.received: list[str] = []
        """The requests, by method and target."""
        self.closes = False

    async def __call__(self, connection: Connection) -> None:
        """Serve a connection; see Script."""
        while True:
            head = (await connection.request()).head
            self.received.append(head.first.removesuffix(" HTTP/1.1"))
            if self.closes:
                self.closes = False
                return
            if head.target == INFER and head.get(HEADER_LENGTH) is not None:
                await connection.send(binary_response(FLOATS.tobytes()))
            elif head.target == "/v2/models/m":
                await connection.send(http_response(self._metadata))
            else:
                await connection.send(http_response(OUTPUTS if head.target == INFER else b"{}"))


@dataclass(frozen=True)
class Case:
    """A request, and whether it is sent again under a policy, which is that by default."""

    method: str
    target: str
    body: bytes | None = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    again: bool = False
    policy: str = "infer"
    dialect: str = "triton"
    metadata: bytes = metadata(-1)


def _binary(**parameters: Any) -> tuple[bytes, dict[str, str]]:
    fields = json.loads(binary_header(12))
    fields["parameters"] = {"binary_data_output": True, **parameters}
    header = json.dumps(fields).encode()
    return header + FLOATS.tobytes(), {HEADER_LENGTH: str(len(header))}


# Parsers do not see a member that comes again.
_HIDDEN = b'{"parameters":{"sequence_id":7},' + json_request()[1:-1] + b',"parameters":{}}'
_ESCAPED = b'{"instances":[1],"\\u0073equence_id":7}'
_V1_SERVER: dict[str, Any] = {"dialect": "kserve", "metadata": NO_INPUTS}
CASES = {
    "get": Case("GET", "/v2/models/m/config", None, again=True),
    "json infer": Case("POST", INFER, json_request(), again=True),
    "json infer, safe": Case("POST", INFER, json_request(), policy="safe"),
    "binary infer": Case("POST", INFER, *_binary(), again=True),
    "v1": Case("POST", PREDICT, b'{"instances":[1]}', again=True),
    "binary sequence": Case("POST", INFER, *_binary(sequence_id=7)),
    "hidden sequence": Case("POST", INFER, _HIDDEN),
    "escaped sequence": Case("POST", INFER, _HIDDEN.replace(b"sequence", b"sequenc\\u0065")),
    "repository index": Case("POST", "/v2/repository/index", again=True),
    "generate": Case("POST", "/v2/models/m/generate"),
    "load, all": Case("POST", "/v2/repository/models/m/load", again=True, policy="all"),
    "unknown post": Case("POST", "/v2/x"),
    # The gateway does not parse V1 for a server that speaks it.
    "v1 as it is": Case("POST", PREDICT, b'{"instances":[1]}', again=True, **_V1_SERVER),
    "v1 sequence as it is": Case("POST", PREDICT, _ESCAPED, **_V1_SERVER),
    "binary to JSON": Case("POST", INFER, *_binary(), again=True, dialect="json"),
    "sequence to JSON": Case("POST", INFER, *_binary(sequence_id=7), dialect="json"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("streams", [False, True], ids=["fast path", "streaming path"])
async def test_request_over_http1_is_executed_again_only_if_it_has_no_effect(
    case: Case, streams: bool
) -> None:
    warm_up = request(case.method, case.target, case.body, case.headers)
    data = with_long_head(warm_up) if streams else warm_up
    server = Server(case.metadata)
    upstream = {"dialect": case.dialect, "retry_stale": case.policy}
    async with served(server, upstream=upstream) as (_, _, client):
        assert (await client.ask(warm_up)).status == 200
        server.closes = True
        server.received.clear()
        reply = await client.ask(data)
    if case.again:
        assert (reply.status, len(server.received)) == (200, 2)
        assert server.received[0] == server.received[1]
    else:
        assert (reply.status, len(server.received)) == (502, 1)
        assert re.search(f"({UPSTREAM}|http://[0-9.:]+){SENT}", reply.body.decode())
        assert "sent again" not in reply.error  # another endpoint may get it


@pytest.mark.parametrize("again", [True, False], ids=["infer", "sequence"])
async def test_call_over_grpc_is_executed_again_only_if_it_has_no_effect(again: bool) -> None:
    message = ModelInferRequest.FromString(infer_request())
    if not again:
        message.parameters["sequence_id"].int64_param = 7
    server = Server(metadata(-1))
    async with gateway_before(server) as (_, gateway), grpc_client(gateway.url) as client:
        reply = await client.call("ModelInfer", message.SerializeToString())
        assert reply.code is grpc.StatusCode.OK, reply.text
        server.closes = True
        server.received.clear()
        reply = await client.call("ModelInfer", message.SerializeToString())
    if again:
        assert (reply.code, len(server.received)) == (grpc.StatusCode.OK, 2)
    else:
        assert (reply.code, len(server.received)) == (grpc.StatusCode.UNAVAILABLE, 1)
        assert SENT in reply.text
