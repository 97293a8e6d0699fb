"""What the handlers of inference convert without waiting, and what is left to the streaming path.

That both convert alike is what ``tests.end_to_end.paths`` shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from multidict import CIMultiDict

from gateway.http1.head import parse_lines
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.dialects import OPENVINO, TRITON, Dialect
from gateway.protocol.operations import parse_operation
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.proxy.calls.handler import HandlerScope, ServerRequest
from gateway.proxy.calls.infer import InferHandler, PredictHandler
from gateway.upstream.metadata_cache import MetadataCache
from tests.support.doubles.streaming import (
    LIMITS,
    EventLog,
    ScriptedEndpoint,
    client_head,
    make_destination,
)
from tests.support.inference_messages import HEADER_LENGTH, INFER, binary_header, json_request

PREDICT = "/v1/models/m:predict"
DATA = np.arange(3, dtype="<f4").tobytes()
SPEC = TensorSpec("IN", DATATYPES["FP32"], (-1,))
MODEL = ModelMetadata("m", (SPEC,), None, (TensorSpec("OUT", DATATYPES["FP32"], (-1,)),))
HEADER = binary_header(len(DATA))
LISTING = HEADER[:-1] + b',"outputs":[{"name":"OUT"}]}'
V1 = json.dumps({"instances": [0.5, 1, 2]}).encode()


class Cache(MetadataCache):
    """Metadata of the model, or none."""

    def __init__(self, model: ModelMetadata | None) -> None:
        super().__init__(60, 10, 30, lambda: 0.0)
        self._model = model

    def cached(self, *_: Any) -> ModelMetadata | None:
        return self._model


def convert(
    target: str,
    body: bytes,
    header_size: int | None = None,
    model: ModelMetadata | None = MODEL,
    dialect: Dialect = TRITON,
    headers: Mapping[str, str] | None = None,
) -> ServerRequest | None:
    """Return what becomes of a request without waiting."""
    operation = parse_operation("POST", target)
    head = client_head("POST", target, headers or {})
    scope = HandlerScope("POST", target, head.headers, operation, LIMITS)
    handler = InferHandler(scope, header_size, 10_000) if target == INFER else PredictHandler(scope)
    endpoint = ScriptedEndpoint(EventLog())
    destination = make_destination(endpoint, dialect=dialect, metadata=Cache(model))
    return handler.to_server(head, body, destination, "")


def test_requests_that_need_unknown_metadata_are_left_to_the_streaming_path() -> None:
    for model, is_converted in ((None, False), (MODEL, True)):
        for target, body, size in (
            (INFER, DATA, 0),
            (INFER, json_request(), None),
            (PREDICT, V1, None),
        ):
            found = convert(target, body, size, model, OPENVINO)
            assert (found is not None) is is_converted
    assert convert(INFER, LISTING + DATA, len(LISTING), None, OPENVINO) is not None


@pytest.mark.parametrize(("own", "sent"), [("abc", "abc"), ("", ""), ("caf\xe9", "")])
def test_v1_request_has_the_id_of_the_client_if_ids_are_off(own: str, sent: str) -> None:
    request = convert(PREDICT, V1, headers={"X-Request-Id": own} if own else {})
    assert request is not None
    size = int(CIMultiDict(parse_lines(request.lines))[HEADER_LENGTH])
    assert isinstance(request.body, list)
    assert json.loads(b"".join(request.body)[:size]).get("id") == sent
