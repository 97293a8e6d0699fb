"""Reads small, fully buffered V1 requests of numbers in a few calls.

Unusual and invalid requests are left to PredictRequestReader; for all others both give the same
result.
"""

from __future__ import annotations

import re
import struct
from itertools import chain
from typing import Any

import orjson

from gateway.codec.elements.fast_decode import native_code
from gateway.codec.elements.rounding import may_decide_ties, needs_rounding
from gateway.codec.elements.run_job import run_job
from gateway.codec.native import decode_numbers
from gateway.codec.offload_interface import ConversionJob
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES, Datatype
from gateway.protocol.messages import InferRequest, InferRequestHead, InputTensor
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1Format, V1ResponseLayout, check_shape
from gateway.sizes import CACHED_DOCUMENTS, ENCODE_CHUNK
from gateway.system.bounded_cache import cached

_START = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"(instances|inputs)"[ \t\r\n]*:[ \t\r\n]*\[')
_END = re.compile(rb"\][ \t\r\n]*\}[ \t\r\n]*\Z")
_FORMATS = {form.value.encode(): form for form in V1Format}
_NUMERIC_BYTES = b"0123456789+-.eE, \t\r\n[]"


def read_buffered_predict(
    text: bytes, model: ModelMetadata, depth_cap: int, request_id: str
) -> tuple[InferRequest, V1ResponseLayout] | None:
    """Read a request that has nothing but numbers for the model's only input.

    ``depth_cap`` limits its nesting. Returns None if PredictRequestReader is needed.
    """
    start = _START.match(text)
    end = text.rfind(b"]") + 1
    if start is None or not _END.match(text, end - 1) or len(text) > ENCODE_CHUNK:
        return None
    array = text[start.end() - 1 : end]
    if len(model.inputs) != 1:
        return None
    (declared,) = model.inputs
    datatype = declared.datatype
    if datatype.struct_code is None:
        return None
    try:
        shape, data = _read_array(array, datatype)
        layout = check_shape(model, declared, shape, _FORMATS[start[1]])
    except (ValueError, TypeError, OverflowError, struct.error, GatewayError):
        return None
    if len(shape) >= depth_cap:
        return None
    head = _make_head(declared.name, datatype.name, shape[layout.single :], len(data))
    return InferRequest(head, request_id, ((data,),)), layout


def _read_array(array: bytes, datatype: Datatype) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the bytes of an array of numbers; raises as ``_pack`` does."""
    if array.translate(None, _NUMERIC_BYTES):
        raise ValueError("other things than numbers")
    code = native_code(datatype)
    if decode_numbers is not None and code is not None and array.find(b"[", 1) < 0:
        elements = decode_numbers(array, code)
        if elements:
            assert datatype.size is not None
            return (len(elements) // datatype.size,), elements
    shape, numbers = _flatten(orjson.loads(array))
    return shape, _pack(datatype, array, numbers)


def _pack(datatype: Datatype, array: bytes, numbers: list[Any]) -> bytes:
    """Return the bytes of an array's elements; raises what struct raises, and ValueError."""
    if not needs_rounding(datatype) or not may_decide_ties(array):
        return struct.pack(f"<{len(numbers)}{datatype.struct_code}", *numbers)
    data = run_job(ConversionJob(to_json=False, datatype=datatype), array)
    if data is None:
        raise ValueError("something to be said about the numbers")
    return bytes(data)


def _flatten(numbers: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and the elements of an array; raises ValueError if it has no shape."""
    shape = [len(numbers)]
    while numbers and type(numbers[0]) is list:
        size = len(numbers[0])
        if any(type(each) is not list or len(each) != size for each in numbers):
            raise ValueError("ragged")
        shape.append(size)
        numbers = list(chain.from_iterable(numbers))
    if not numbers:
        raise ValueError("empty")
    return tuple(shape), numbers


@cached(CACHED_DOCUMENTS)
def _make_head(name: str, datatype: str, shape: tuple[int, ...], size: int) -> InferRequestHead:
    return InferRequestHead((InputTensor(name, DATATYPES[datatype], shape, size),))
