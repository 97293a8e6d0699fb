"""Writes small, fully buffered binary responses of numbers as V1 responses in a few calls.

Unusual and invalid responses are left to PredictResponseWriter; for all others both give the same
result.
"""

from __future__ import annotations

import numpy as np
import orjson

from gateway.codec.v1.nested_writer import check_rank
from gateway.codec.v2.fast_response import is_written_as_is
from gateway.codec.v2.response_reader import read_without_data
from gateway.errors import GatewayError
from gateway.protocol.v1 import V1ResponseLayout
from gateway.sizes import MAX_CACHED_DOCUMENT


def write_buffered_prediction(
    body: bytes, header_size: int, layout: V1ResponseLayout
) -> bytes | None:
    """Write a response with one output, of numbers; None if PredictResponseWriter is needed."""
    if header_size > MAX_CACHED_DOCUMENT:
        return None
    try:
        response = read_without_data(body[:header_size])
        if response is None or len(response.head.outputs) != 1:
            return None
        (output,) = response.head.outputs
        shape = (1, *output.shape) if layout.single else output.shape
        check_rank("the output", shape)
    except GatewayError:
        return None
    if not shape or not is_written_as_is(output) or output.binary_size is None:
        return None
    if header_size + output.binary_size != len(body):
        return None
    values = np.frombuffer(body, output.datatype.dtype, offset=header_size).reshape(shape)
    text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"n" in text:
        return None  # null for NaN or an infinity: a policy decides
    return b'{"%b":%b}' % (layout.form.response_key.encode(), text)
