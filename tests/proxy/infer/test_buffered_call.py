"""What is converted without waiting is what the streaming path sends and responds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, TRITON, Dialect
from gateway.protocol.operations import parse_operation
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.infer.buffered_call import (
    BufferedRequest,
    convert_buffered_predict,
    convert_buffered_request,
    convert_buffered_response,
)
from gateway.proxy.infer.handler import infer
from gateway.proxy.infer.v1_predict import predict
from gateway.proxy.interfaces import Call
from gateway.upstream.metadata_cache import MetadataCache
from tests.codec.reference import pack_bytes
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)
from tests.support.inference_messages import HEADER_LENGTH, INFER

VALUES = np.arange(3, dtype="<f4")
DATA = VALUES.tobytes()
SPEC = TensorSpec("IN", DATATYPES["FP32"], (-1,))
MODEL = ModelMetadata("m", (SPEC,), None, (TensorSpec("OUT", DATATYPES["FP32"], (-1,)),))
INPUT: dict[str, Any] = {"name": "IN", "datatype": "FP32", "shape": [3]}
BINARY_INPUT = INPUT | {"parameters": {"binary_data_size": len(DATA)}}
TEXT_INPUT = {"name": "T", "datatype": "BYTES", "shape": [2], "data": ["a", "é"]}
MIXED = [{"name": "OUT", "parameters": {"binary_data": True}}, {"name": "T"}]
AS_BASE64 = [{"name": "OUT"}, {"name": "T", "parameters": {"content_type": "base64"}}]


def with_header(data: bytes, **fields: Any) -> tuple[bytes, int]:
    header = json.dumps(fields).encode()
    return header + data, len(header)


REQUESTS: dict[str, tuple[bytes, int | None]] = {
    "JSON": (json.dumps({"inputs": [INPUT | {"data": [0, 1, 2]}]}).encode(), None),
    "strings": (json.dumps({"id": "7", "inputs": [TEXT_INPUT]}).encode(), None),
    "binary": with_header(DATA, inputs=[BINARY_INPUT], parameters={"binary_data_output": True}),
    "binary for JSON": with_header(DATA, id="a", inputs=[BINARY_INPUT]),
    "mixed": with_header(DATA, inputs=[TEXT_INPUT, BINARY_INPUT], outputs=MIXED),
    "base64": with_header(DATA, inputs=[BINARY_INPUT], outputs=AS_BASE64),
    "raw binary": (DATA, 0),
}
V1 = json.dumps({"instances": [0.5, 1, 2]}).encode()

STRINGS = pack_bytes([b"a", "é".encode()])
NUMBERS: dict[str, Any] = {"name": "OUT", "datatype": "FP32", "shape": [3]}
TEXTS: dict[str, Any] = {"name": "T", "datatype": "BYTES", "shape": [2]}
RESPONSES: dict[str, tuple[bytes, int | None]] = {
    "binary": with_header(
        DATA + STRINGS,
        model_name="m",
        id="7",
        outputs=[
            NUMBERS | {"parameters": {"binary_data_size": len(DATA)}},
            TEXTS | {"parameters": {"binary_data_size": len(STRINGS)}},
        ],
    ),
    "JSON": (
        json.dumps(
            {"outputs": [NUMBERS | {"data": [0, 1.50, 2]}, TEXTS | {"data": ["a", "é"]}]}
        ).encode(),
        None,
    ),
    "mixed": with_header(
        DATA,
        outputs=[
            TEXTS | {"data": ["a", "é"]},
            NUMBERS | {"parameters": {"binary_data_size": len(DATA)}},
        ],
    ),
    "numbers": with_header(
        DATA, outputs=[NUMBERS | {"parameters": {"binary_data_size": len(DATA)}}]
    ),
    "empty": (json.dumps({"outputs": [NUMBERS | {"shape": [0]}]}).encode(), None),
}
POLICIES = (JsonPolicies(), JsonPolicies(bytes_encoding=BytesEncoding.BASE64))


class KnownModel(MetadataCache):
    async def get(self, *_: Any) -> ModelMetadata:
        return MODEL


class Streamed:
    """A call on the streaming path: what its server got, what its client got, or the error."""

    def __init__(self, dialect: Dialect, policies: JsonPolicies, response: str) -> None:
        body, size = RESPONSES[response]
        served = ScriptedUpstreamResponse(200, headers_of(size), [body])
        self._endpoint = ScriptedEndpoint(EventLog(), served)
        metadata = KnownModel(60, 10, 30, lambda: 0.0)
        self.destination = make_destination(
            self._endpoint, dialect=dialect, policies=policies, metadata=metadata
        )
        self.error: GatewayError | None = None

    async def run(self, target: str, body: bytes, header_size: int | None = None) -> None:
        log = EventLog()
        request = ScriptedRequest(log, "POST", target, headers_of(header_size), [body])
        self._response = ScriptedClientResponse(log)
        serve = infer if target == INFER else predict
        with Deadline(9, 9) as deadline:
            operation = parse_operation("POST", target)
            try:
                await serve(Call(request, self._response, operation, self.destination, deadline))
            except GatewayError as error:
                self.error = error

    @property
    def sent(self) -> tuple[bytes, int | None] | None:
        if not self._endpoint.requests:
            return None
        return self._endpoint.bodies[-1], header_size_of(self._endpoint.requests[-1].headers)

    @property
    def got(self) -> tuple[bytes, int | None]:
        return self._response.body, header_size_of(self._response.headers)


def headers_of(header_size: int | None) -> dict[str, str]:
    return {} if header_size is None else {HEADER_LENGTH: str(header_size)}


def header_size_of(headers: Mapping[str, str]) -> int | None:
    return int(headers[HEADER_LENGTH]) if HEADER_LENGTH in headers else None


def check(streamed: Streamed, request: BufferedRequest | None, response: str) -> None:
    """Check that a request was converted as on the streaming path, and its response, too."""
    assert request is not None
    assert (request.body, request.header_size) == streamed.sent
    body, size = RESPONSES[response]
    if streamed.error is None:
        got = convert_buffered_response(body, size, request, streamed.destination)
        is_left = size is not None and not streamed.destination.upstream.dialect.binary
        assert got == (None if is_left else streamed.got)
        return
    with suppress(GatewayError):
        assert convert_buffered_response(body, size, request, streamed.destination) is None


each_dialect = pytest.mark.parametrize(
    "dialect", [TRITON, KSERVE, OPENVINO, JSON], ids=lambda each: each.name
)
each_policy = pytest.mark.parametrize("policies", POLICIES, ids=["text", "base64"])
each_response = pytest.mark.parametrize("response", RESPONSES)


@each_dialect
@each_policy
@each_response
@pytest.mark.parametrize("form", REQUESTS)
async def test_infer_call_is_converted_as_on_the_streaming_path(
    dialect: Dialect, policies: JsonPolicies, response: str, form: str
) -> None:
    body, size = REQUESTS[form]
    streamed = Streamed(dialect, policies, response)
    await streamed.run(INFER, body, size)
    assert streamed.sent is not None
    check(
        streamed, convert_buffered_request(body, size, streamed.destination, None, MODEL), response
    )


@each_dialect
@each_policy
@each_response
async def test_v1_call_is_converted_as_on_the_streaming_path(
    dialect: Dialect, policies: JsonPolicies, response: str
) -> None:
    streamed = Streamed(dialect, policies, response)
    await streamed.run("/v1/models/m:predict", V1)
    assert streamed.sent is not None
    check(streamed, convert_buffered_predict(V1, "", streamed.destination, MODEL), response)


WRONG = {
    "short": (DATA[:-1], 0),
    "no body": (b"", None),
    "long": (REQUESTS["binary"][0] + b"x", REQUESTS["binary"][1]),
    "no JSON": (b"nonsense", None),
    "missing header length": (REQUESTS["binary"][0], None),
    "header beyond the body": (b"{}", 3),
}


@each_dialect
@pytest.mark.parametrize("form", WRONG)
async def test_invalid_requests_are_left_to_the_streaming_path(dialect: Dialect, form: str) -> None:
    streamed = Streamed(dialect, JsonPolicies(), "binary")
    await streamed.run(INFER, *WRONG[form])
    assert streamed.error is not None
    assert streamed.sent is None
    destination = streamed.destination
    assert convert_buffered_request(*WRONG[form], destination, None, MODEL) is None
    assert convert_buffered_predict(WRONG[form][0], "", destination, MODEL) is None


def test_requests_that_need_unknown_metadata_are_left_to_the_streaming_path() -> None:
    destination = Streamed(OPENVINO, JsonPolicies(), "binary").destination
    assert convert_buffered_request(*REQUESTS["raw binary"], destination) is None
    assert convert_buffered_request(*REQUESTS["JSON"], destination) is None
    assert convert_buffered_request(*REQUESTS["mixed"], destination) is not None
