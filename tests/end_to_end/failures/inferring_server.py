"""Requests that infer in every form, and a server that responds to them as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.support.gateway import RunningGateway, gateway_before
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

GENERATE = "/v2/models/m/generate"
PREDICT = "/v1/models/m:predict"
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}
OUTPUT = {"name": "OUT", "shape": [3], "datatype": "FP32", "data": [1.5, 2, 3]}
OUTPUTS = json.dumps({"model_name": "m", "outputs": [OUTPUT]}).encode()
TENSORS = binary_response(FLOATS.tobytes())


@dataclass(frozen=True)
class Form:
    """A request, and what servers respond to it that are in order."""

    target: str
    body: bytes
    good: bytes = TENSORS
    headers: dict[str, str] = field(default_factory=dict)
    dialect: str = "triton"
    inputs: bool = True
    """Whether the model's metadata lists its inputs."""

    def write(self) -> bytes:
        """Write the request for HTTP/1.1."""
        return request("POST", self.target, self.body, self.headers)

    def http2_fields(self, *more: tuple[str, str]) -> list[tuple[str, str]]:
        """Return its headers for HTTP/2."""
        return [*((name.lower(), value) for name, value in self.headers.items()), *more]


_HEADER = binary_header(12, binary_output=True)
_BODY = _HEADER + FLOATS.tobytes()
_LENGTH = {HEADER_LENGTH: str(len(_HEADER))}
_INSTANCES = b'{"instances":[1,2,3]}'
_TEXT = b'{"text_input":"x"}'
FORMS = {
    "JSON": Form(INFER, json_request()),
    "JSON to a JSON server": Form(INFER, json_request(), http_response(OUTPUTS), dialect="json"),
    "JSON to KServe": Form(INFER, json_request(), dialect="kserve"),
    "binary": Form(INFER, _BODY, TENSORS, _LENGTH),
    "binary to a JSON server": Form(INFER, _BODY, http_response(OUTPUTS), _LENGTH, "json"),
    "binary to KServe": Form(INFER, _BODY, TENSORS, _LENGTH, "kserve"),
    "binary to OpenVINO": Form(INFER, _BODY, TENSORS, _LENGTH, "openvino"),
    "raw": Form(INFER, FLOATS.tobytes(), TENSORS, {HEADER_LENGTH: "0"}),
    "V1": Form(PREDICT, _INSTANCES),
    "V1 to a V1 server": Form(
        PREDICT, _INSTANCES, http_response(b'{"predictions":[7]}'), dialect="kserve", inputs=False
    ),
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
        self._inputs = inputs
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
            elif self._inputs:
                await connection.send(http_response(metadata(-1)))
            else:
                await connection.send(http_response(b'{"name":"m","inputs":[],"outputs":[]}'))

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
