"""Converts V1 requests for tests, and checks what every result has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.codec.json import text_reader
from gateway.codec.v1.request import PredictRequestReader
from gateway.errors import GatewayError
from gateway.protocol.messages import InferRequest
from gateway.protocol.v1 import V1ResponseLayout
from tests.codec import strategies
from tests.codec.reference_v1 import Declared, PlainPredict
from tests.codec.strategies_v1 import model

WINDOW = text_reader.WINDOW
PredictRequest = tuple[InferRequest, V1ResponseLayout]
X: Declared = {"x": ("FP32", [-1])}
TEXT: Declared = {"t": ("BYTES", [-1])}
TWO: Declared = {"a": ("FP32", [-1, -1]), "b": ("INT64", [-1])}


def convert(
    pieces: list[bytes],
    declared: Declared,
    *,
    batching: bool = False,
    header_cap: int = 10_000,
    depth_cap: int = 64,
) -> PredictRequest:
    codec = PredictRequestReader(model(declared, batching), header_cap, depth_cap)
    for piece in (*pieces, None):
        codec.feed(piece or b"", last=piece is None)
        while codec.step():
            pass
    return codec.finish("7")


def as_plain(predict: PredictRequest, declared: Declared) -> PlainPredict:
    """Return a request as the reference does; checks what every request has."""
    request, predicted = predict
    assert request.id == "7"
    assert request.head.output_encoding.all_binary
    parameters = request.head.parameters
    rest = b"".join(request.chunks)
    inputs = {}
    for tensor, (name, (datatype, _)) in zip(request.head.inputs, declared.items(), strict=True):
        size = tensor.binary_size or 0
        assert (tensor.name, tensor.datatype.name) == (name, datatype)
        inputs[name] = ([*tensor.shape], rest[:size])
        rest = rest[size:]
    assert not rest
    return PlainPredict(inputs, predicted.form.value, predicted.single, parameters)


def refusal(body: bytes | dict[str, Any], declared: Declared, **caps: Any) -> GatewayError:
    """Return the error of a request; it must be the same however the body is split."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    errors = []
    for pieces in ([text], strategies.bytewise(text), strategies.cut(text, 1)):
        with pytest.raises(GatewayError) as caught:
            convert(pieces, declared, **caps)
        errors.append(caught.value)
    assert len({(error.kind, error.message) for error in errors}) == 1
    return errors[0]
