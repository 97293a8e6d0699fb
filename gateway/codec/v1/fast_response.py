"""Writes small, fully buffered binary responses of numbers as V1 responses in a few calls.

Unusual and invalid responses are left to PredictResponseWriter; for all others both give the same
result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from gateway.codec.json.text_search import contains
from gateway.codec.v1.nested_writer import MAX_NESTED_RANK
from gateway.codec.v2.fast_response import is_written_as_is
from gateway.codec.v2.response_reader import read_without_data
from gateway.errors import GatewayError
from gateway.protocol.messages import InferResponseHead
from gateway.protocol.v1 import V1ResponseLayout
from gateway.sizes import MAX_CACHED_DOCUMENT

_KEY = "v1"


def write_buffered_prediction(
    body: bytes, header_size: int, layout: V1ResponseLayout
) -> tuple[bytes, int] | None:
    """Write a response with one output, of numbers; return it with the number of its elements.

    Returns None if PredictResponseWriter is needed.
    """
    if header_size > MAX_CACHED_DOCUMENT:
        return None
    try:
        response = read_without_data(body[:header_size])
    except GatewayError:
        return None
    if response is None:
        return None
    written = response.head.written
    if _KEY not in written:
        written[_KEY] = _make_plan(response.head)
    plan: _Plan | None = written[_KEY]
    if plan is None or header_size + plan.size != len(body):
        return None
    shape = plan.single_shape if layout.single else plan.shape
    if not shape:
        return None
    values = np.frombuffer(body, plan.dtype, -1, header_size)
    if len(shape) > 1:
        values = values.reshape(shape)
    text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    if contains(text, b"n"):
        return None  # null for NaN or an infinity: a policy decides
    return b'{"%b":%b}' % (layout.form.response_key.encode(), text), values.size


@dataclass(frozen=True, slots=True)
class _Plan:
    """How responses with the same head are written; ``size`` counts the bytes of data.

    ``single_shape`` is that of a single instance. Shapes of too many dimensions are empty.
    """

    dtype: np.dtype[Any]
    size: int
    shape: tuple[int, ...]
    single_shape: tuple[int, ...]


def _make_plan(head: InferResponseHead) -> _Plan | None:
    if len(head.outputs) != 1:
        return None
    (output,) = head.outputs
    dtype, size = output.datatype.dtype, output.binary_size
    if not is_written_as_is(output) or dtype is None or size is None:
        return None
    return _Plan(dtype, size, _nested(output.shape), _nested((1, *output.shape)))


def _nested(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape, empty if it has too many dimensions."""
    return shape if len(shape) <= MAX_NESTED_RANK else ()
