"""What is converted without waiting is what the streaming path sends and responds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from multidict import CIMultiDict

from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.errors import GatewayError
from gateway.http1.head import parse_lines
from gateway.observe.call_record import CallRecord
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, TRITON, Dialect
from gateway.protocol.operations import parse_operation
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.calls.handler import HandlerScope, ServerRequest, ServerResponse
from gateway.proxy.calls.infer import InferHandler
from gateway.proxy.calls.predict import PredictHandler
from gateway.proxy.interfaces import Call
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.transport import Body
from tests.codec.reference import pack_bytes
from tests.support.doubles.fast_path import client_head, response_head
from tests.support.doubles.scripted_call import serve
from tests.support.doubles.streaming import (
    LIMITS,
    SERVER,
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

    def cached(self, *_: Any) -> ModelMetadata:
        return MODEL


class Streamed:
    """A call on the streaming path: what its server got, what its client got, or the error.

    Its bodies have no length, so that they are converted as they arrive.
    """

    def __init__(
        self,
        dialect: Dialect,
        policies: JsonPolicies,
        response: str,
        metadata_cache: type[KnownModel] = KnownModel,
    ) -> None:
        body, size = RESPONSES[response]
        served = ScriptedUpstreamResponse(200, headers_of(size), split(body))
        self._endpoint = ScriptedEndpoint(EventLog(), served)
        metadata = metadata_cache(60, 10, 30, lambda: 0.0)
        self.destination = make_destination(
            self._endpoint, dialect=dialect, policies=policies, metadata=metadata
        )
        self.error: GatewayError | None = None

    async def run(self, target: str, body: bytes, header_size: int | None = None) -> None:
        log = EventLog()
        headers = {**headers_of(header_size), "Transfer-Encoding": "chunked"}
        request = ScriptedRequest(log, "POST", target, headers, split(body))
        self._response = ScriptedClientResponse(log)
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


def joined(body: Body) -> bytes:
    assert isinstance(body, list)
    return b"".join(body)


def split(body: bytes) -> list[bytes]:
    return [body[:5], body[5:40], body[40:]]


def convert(
    streamed: Streamed, target: str, body: bytes, header_size: int | None = None
) -> tuple[InferHandler, ServerRequest | None]:
    """Return what the fast path makes of a request."""
    operation = parse_operation("POST", target)
    head = client_head("POST", target, {"Content-Length": str(len(body))})
    scope = HandlerScope("POST", target, head.headers, operation, LIMITS)
    is_infer = target == INFER
    handler = InferHandler(scope, header_size, 10_000) if is_infer else PredictHandler(scope)
    return handler, handler.to_server(head, body, streamed.destination, "")


def check(streamed: Streamed, target: str, response: str, *request: Any) -> None:
    """Check that a call is converted as on the streaming path, both ways."""
    handler, converted = convert(streamed, target, *request)
    assert converted is not None
    lines = CIMultiDict(parse_lines(converted.lines))
    assert (joined(converted.body), header_size_of(lines)) == streamed.sent
    body, size = RESPONSES[response]
    head = response_head(headers=headers_of(size))
    answer = ServerResponse(converted, head, body, ())
    arguments = answer, streamed.destination, SERVER, None, CallRecord("", "")
    if streamed.error is not None:
        with pytest.raises(GatewayError, match=re.escape(streamed.error.message)):
            handler.to_client(*arguments)
        return
    message = handler.to_client(*arguments)
    assert message is not None
    template, passed, got, _ = message
    headers = CIMultiDict([*template.headers, *parse_lines(passed)])
    assert (got, header_size_of(headers)) == streamed.got


each_dialect = pytest.mark.parametrize(
    "dialect", [TRITON, KSERVE, OPENVINO, JSON], ids=lambda each: each.name
)


@each_dialect
@pytest.mark.parametrize("form", REQUESTS)
async def test_infer_call_is_converted_as_on_the_streaming_path(
    dialect: Dialect, form: str
) -> None:
    for policies, response in itertools.product(POLICIES, RESPONSES):
        streamed = Streamed(dialect, policies, response)
        await streamed.run(INFER, *REQUESTS[form])
        assert streamed.sent is not None
        check(streamed, INFER, response, *REQUESTS[form])


@each_dialect
async def test_v1_call_is_converted_as_on_the_streaming_path(
    dialect: Dialect,
) -> None:
    for policies, response in itertools.product(POLICIES, RESPONSES):
        streamed = Streamed(dialect, policies, response)
        await streamed.run("/v1/models/m:predict", V1)
        assert streamed.sent is not None
        check(streamed, "/v1/models/m:predict", response, V1)


WRONG = {
    "short": (DATA[:-1], 0),
    "no body": (b"", None),
    "long": (REQUESTS["binary"][0] + b"x", REQUESTS["binary"][1]),
    "no JSON": (b"nonsense", None),
    "missing header length": (REQUESTS["binary"][0], None),
    "header beyond the body": (b"{}", 3),
}


@each_dialect
async def test_invalid_requests_are_left_to_the_streaming_path(dialect: Dialect) -> None:
    for form in WRONG:
        streamed = Streamed(dialect, JsonPolicies(), "binary")
        await streamed.run(INFER, *WRONG[form])
        assert streamed.error is not None, form
        assert streamed.sent is None, form
        assert convert(streamed, INFER, *WRONG[form])[1] is None, form
        assert convert(streamed, "/v1/models/m:predict", WRONG[form][0])[1] is None, form


class _NothingCached(KnownModel):
    def cached(self, *_: Any) -> None:  # type: ignore[override]
        return None


def test_requests_that_need_unknown_metadata_are_left_to_the_streaming_path() -> None:
    streamed = Streamed(OPENVINO, JsonPolicies(), "binary", _NothingCached)
    assert convert(streamed, INFER, *REQUESTS["raw binary"])[1] is None
    assert convert(streamed, INFER, *REQUESTS["JSON"])[1] is None
    assert convert(streamed, INFER, *REQUESTS["mixed"])[1] is not None
    assert convert(streamed, "/v1/models/m:predict", V1)[1] is None


@pytest.mark.parametrize(("own", "sent"), [("abc", "abc"), ("", ""), ("caf\xe9", "")])
async def test_v1_request_has_the_id_of_the_client_if_ids_are_off(own: str, sent: str) -> None:
    target = "/v1/models/m:predict"
    streamed = Streamed(TRITON, JsonPolicies(), "numbers")
    head = client_head("POST", target, {"X-Request-Id": own} if own else {})
    operation = parse_operation("POST", target)
    scope = HandlerScope("POST", target, head.headers, operation, LIMITS)
    handler = PredictHandler(scope)
    request = handler.to_server(head, V1, streamed.destination, "")
    assert request is not None
    size = header_size_of(CIMultiDict(parse_lines(request.lines)))
    assert json.loads(joined(request.body)[:size]).get("id") == sent
