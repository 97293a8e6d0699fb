"""Converts small, fully buffered JSON requests to binary tensors in a few calls.

Requests for a model look alike but for their numbers. The JSON around the data is parsed once, and
the plan made of it is cached. Unusual and invalid requests are left to InferRequestConverter; for
all others both give the same result.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import orjson

from gateway.codec.elements.fast_decode import has_c_decoder
from gateway.codec.elements.rounding import may_decide_ties, needs_rounding
from gateway.codec.elements.run_job import run_job
from gateway.codec.json.array_scanner import WINDOW, end_of_numbers, max_depth
from gateway.codec.json.data_extractor import placeholder
from gateway.codec.offload_interface import ConversionJob
from gateway.errors import GatewayError
from gateway.protocol.request_features import RequestFeatures, read_features
from gateway.protocol.request_header import (
    DataSource,
    InputTensor,
    OutputEncoding,
    parse_request_header,
    read_inputs,
    read_output_encoding,
    request_binary_outputs,
    set_binary_size,
)
from gateway.protocol.tensors import MAX_TENSORS, element_count
from gateway.sizes import CACHED_DOCUMENTS, MAX_CACHED_DOCUMENT

MAX_FAST_REQUEST = WINDOW
"""The most bytes of a request on the fast path."""


_STRUCT_MAX_BYTES = 2 * 1024
"""From this size of an array on, simdjson and numpy are faster than struct; C always is."""

_MAX_ARRAYS = 256
_KEY = b'"data"'

_SPACE = b" \t\r\n"
_NUMERIC_BYTES = b"0123456789+-.eE, \t\r\n[]"


@dataclass(frozen=True, slots=True)
class FastRequest:
    """A request for the server: ``body`` begins with ``header_size`` bytes of JSON."""

    body: bytes
    header_size: int
    output_encoding: OutputEncoding
    features: RequestFeatures


def fast_convert_request(
    text: bytes, depth_cap: int, tensor_cap: int = MAX_TENSORS
) -> FastRequest | None:
    """Convert a JSON request; ``depth_cap`` limits its nesting, ``tensor_cap`` its tensors.

    Returns None if the streaming path is needed.
    """
    surroundings, arrays = _extract_arrays(text)
    if len(surroundings) > MAX_CACHED_DOCUMENT or len(arrays) > _MAX_ARRAYS:
        return None
    plan = _make_plan(surroundings, len(arrays), depth_cap, tensor_cap)
    if plan is None:
        return None
    parts = [plan.header]
    try:
        for tensor, array in zip(plan.tensors, arrays, strict=True):
            parts.append(_pack(tensor, array, depth_cap))
    except (ValueError, TypeError, OverflowError, struct.error):
        return None  # an invalid element, or a number of elements that does not match the shape
    return FastRequest(b"".join(parts), len(plan.header), plan.output_encoding, plan.features)


def _extract_arrays(text: bytes) -> tuple[bytes, list[bytes]]:
    """Return the request with placeholders, and the arrays that they replace."""
    surroundings: list[bytes] = []
    arrays: list[bytes] = []
    position = 0
    while len(arrays) <= _MAX_ARRAYS and (at := text.find(_KEY, position)) >= 0:
        opening = text.find(b"[", at)
        stop = end_of_numbers(text, opening, len(text))
        close = text.rfind(b"]", opening, stop) + 1
        if opening < 0 or not close or text[at + len(_KEY) : opening].strip(_SPACE) != b":":
            break
        surroundings += text[position:at], b'"data":', orjson.dumps(placeholder(len(arrays)))
        arrays.append(text[opening:close])
        position = close
    surroundings.append(text[position:])
    return b"".join(surroundings), arrays


def _pack(tensor: _Tensor, array: bytes, depth_cap: int) -> bytes:
    """Return the bytes of an array; raises what struct, orjson and ``_parse_numbers`` raise."""
    if len(array) < tensor.struct_max_bytes and not (
        tensor.needs_rounding and may_decide_ties(array)
    ):
        return tensor.layout.pack(*_parse_numbers(array, depth_cap))
    if array.find(b"[", 1) > 0 and max_depth(array) > depth_cap:
        raise ValueError("nested too deep")
    data = run_job(tensor.job, array)
    if data is None or len(data) != tensor.layout.size:
        raise ValueError("something to be said about the numbers")
    return bytes(data)


def _parse_numbers(array: bytes, depth_cap: int) -> list[Any]:
    """Parse an array, nested or flat; raises ValueError or TypeError unless all are numbers."""
    if array.translate(None, _NUMERIC_BYTES):
        raise ValueError("other things than numbers")
    numbers: list[Any] = orjson.loads(array)
    depth = 1
    while numbers and type(numbers[0]) is list:
        numbers = list(chain.from_iterable(numbers))
        depth += 1
    if depth > depth_cap:
        raise ValueError("nested too deep")
    return numbers


@dataclass(frozen=True, slots=True)
class _Tensor:
    """How an input is converted: by struct below ``struct_max_bytes``, else by the job."""

    layout: struct.Struct
    job: ConversionJob
    struct_max_bytes: int
    needs_rounding: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a request becomes, apart from its numbers."""

    header: bytes
    tensors: tuple[_Tensor, ...]
    output_encoding: OutputEncoding
    features: RequestFeatures


@lru_cache(maxsize=CACHED_DOCUMENTS)
def _make_plan(surroundings: bytes, arrays: int, depth_cap: int, tensor_cap: int) -> _Plan | None:
    # Escapes could hide a second key of the same name. Arrays contain no quotes, so no keys.
    if b"\\" in surroundings or surroundings.count(_KEY) != arrays:
        return None
    try:
        fields = parse_request_header(surroundings, depth_cap)
        inputs = read_inputs(fields, tensor_cap)
        output_encoding = read_output_encoding(fields, tensor_cap)
    except GatewayError:
        return None
    features = read_features(fields, inputs)
    if not features.is_plain:
        return None
    entries = [entry for entry in fields["inputs"] if "data" in entry]
    if [entry["data"] for entry in entries] != [placeholder(number) for number in range(arrays)]:
        return None
    if surroundings.count(b'"datatype"') != len(inputs):
        return None
    tensors = []
    for entry, declared in zip(fields["inputs"], inputs, strict=True):
        if declared.source is DataSource.DATA:
            layout = _struct_layout(declared)
            if layout is None:
                return None
            job = ConversionJob(to_json=False, datatype=declared.datatype)
            struct_max_bytes = 0 if has_c_decoder(declared.datatype) else _STRUCT_MAX_BYTES
            tensors.append(
                _Tensor(layout, job, struct_max_bytes, needs_rounding(declared.datatype))
            )
            set_binary_size(entry, layout.size)
        elif declared.source is DataSource.BINARY:
            return None
    request_binary_outputs(fields)
    return _Plan(orjson.dumps(fields), tuple(tensors), output_encoding, features)


def _struct_layout(declared: InputTensor) -> struct.Struct | None:
    code = declared.datatype.struct_code
    count = element_count(declared.shape)
    return None if code is None or count > MAX_FAST_REQUEST else struct.Struct(f"<{count}{code}")
