"""A client form from start to end, as CONTRIBUTING.md tells it: rows of numbers as plain text.

It takes the place of V1 for a test: a reader, a writer, a handler and a row.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from multidict import CIMultiDict

from gateway.errors import GatewayError, bad_request
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import ALL_JSON, InferRequest, InferRequestHead, InputTensor
from gateway.protocol.operations import OperationKind, infer_path
from gateway.proxy.body_io import ClientBody, ResponseRelay
from gateway.proxy.calls import kinds
from gateway.proxy.calls.handler import ClientMessage, HandlerScope, ServerRequest, ServerResponse
from gateway.proxy.calls.infer import InferHandler
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.interfaces import Call, ClientResponse
from tests.support.compiled import needs_source
from tests.support.gateway import running_gateway
from tests.support.http2_client import connect_http2
from tests.support.inference_messages import binary_response
from tests.support.servers.scripted_server import ScriptedServer, always_respond

pytestmark = needs_source  # a handler of compiled code has no subclass in Python


def read_rows(text: bytes) -> ReceivedRequest:
    """Read rows of numbers as the input IN; raises GatewayError (400)."""
    try:
        rows = np.array([line.split() for line in text.splitlines()], "<f4")
    except ValueError as error:
        raise bad_request(f"the request has no rows of numbers: {error}") from None
    tensor = InputTensor("IN", DATATYPES["FP32"], rows.shape, rows.nbytes)
    head = InferRequestHead((tensor,), output_encoding=ALL_JSON)
    return ReceivedRequest(InferRequest(head, None, ((rows.tobytes(),),)), [rows.tobytes()])


def write_numbers(document: bytes) -> bytes:
    """Write the first output of a JSON response; errors stay."""
    outputs = json.loads(document).get("outputs")
    return " ".join(map(str, outputs[0]["data"])).encode() if outputs else document


class NumbersResponse(ClientResponse):
    """Collects a JSON response, and sends it as numbers."""

    def __init__(self, response: ClientResponse) -> None:
        self.record, self._response, self._body = response.record, response, bytearray()

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        self._head = status, reason, headers

    async def write(self, data: bytes | memoryview) -> None:
        self._body += data

    async def finish(self, trailers: Any = ()) -> None:
        await self._response.send(*self._head, write_numbers(bytes(self._body)))

    def abort(self) -> None:
        self._response.abort()


class RowsHandler(InferHandler):
    """Serves calls in this form, small ones without a task."""

    def __init__(self, scope: HandlerScope) -> None:
        as_infer = replace(scope, method="POST", target=infer_path(scope.operation))
        super().__init__(as_infer, None, 32_768)

    async def serve(self, call: Call) -> None:
        body = ClientBody(call.request, call.destination.limits.max_request_bytes, call.deadline)
        with call.reserve() as reservation:
            await self.send(call, read_rows(await body.read_all(reservation)))

    def to_server(self, head: Any, body: Any, destination: Any, _: str) -> ServerRequest | None:
        return self._write(head, read_rows(bytes(body)), destination)

    def to_client(self, response: ServerResponse) -> ClientMessage | None:
        message = super().to_client(response)
        if message is None:
            return None
        template, lines, body, trailers = message
        return template, lines, write_numbers(bytes(body)), trailers

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        await super().relay(request, replace(relay, response=NumbersResponse(relay.response)))


@pytest.mark.parametrize("headers", [[], [("x-long", "l" * 3000)]], ids=["small", "streamed"])
async def test_toy_form_is_served(
    headers: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = kinds.from_one(RowsHandler)
    monkeypatch.setitem(kinds.KINDS, OperationKind.PREDICT, row)
    output = np.array([1.5, -2], "<f4").tobytes()
    async with (
        ScriptedServer(always_respond(binary_response(output))) as server,
        running_gateway(server.url) as gateway,
        connect_http2(gateway.url) as client,
    ):
        for _ in range(2):  # the first one connects
            reply = await client.call("POST", "/v1/models/m:predict", b"1 2\n3 4\n", headers)
            assert (reply.status, reply.body) == (200, b"1.5 -2.0")
        wrong = await client.call("POST", "/v1/models/m:predict", b"1 2\n3\n", headers)
        assert wrong.status == 400
        assert "no rows of numbers" in wrong.json["error"]
    header, sent = server.requests[-1].body[:-16], server.requests[-1].body[-16:]
    assert json.loads(header)["inputs"][0]["shape"] == [2, 2]
    assert sent == np.array([1, 2, 3, 4], "<f4").tobytes()


def test_toy_reader_names_what_is_wrong() -> None:
    with pytest.raises(GatewayError, match="no rows of numbers"):
        read_rows(b"1 x")
