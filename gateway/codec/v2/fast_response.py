"""Converts small, fully buffered binary responses to JSON text in a few calls.

Responses of a model look alike but for their numbers. The header is parsed once, and the plan made
of it is cached. Unusual and invalid responses are left to JsonResponseConverter; for all others
both give the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from gateway.codec.elements.encode import json_dtype
from gateway.codec.v2.json_writer import split_around_data
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.response_header import OutputTensor, parse_response_header, read_outputs
from gateway.sizes import CACHED_DOCUMENTS, MAX_CACHED_DOCUMENT


def fast_convert_response(body: bytes, header_size: int) -> bytes | None:
    """Write a binary response as JSON; return None if the streaming path is needed."""
    if header_size > MAX_CACHED_DOCUMENT:
        return None
    plan = _make_plan(body[:header_size])
    if plan is None or header_size + plan.size != len(body):
        return None
    text = [plan.split_around_data[0]]
    for number, tensor in enumerate(plan.tensors, 1):
        values = np.frombuffer(body, tensor.dtype, tensor.count, header_size + tensor.start)
        data = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
        if b"n" in data:
            return None  # null for NaN or an infinity: a policy decides
        text += data[1:-1], plan.split_around_data[number]
    return b"".join(text)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The offset of a tensor behind the header, its number of elements, and their type."""

    start: int
    count: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a response becomes, apart from its numbers; ``size`` counts the bytes of all tensors."""

    split_around_data: tuple[bytes, ...]
    tensors: tuple[_Tensor, ...]
    size: int


@lru_cache(maxsize=CACHED_DOCUMENTS)
def _make_plan(header: bytes) -> _Plan | None:
    try:
        fields = parse_response_header(header)
        outputs = read_outputs(fields)
    except GatewayError:
        return None
    tensors: list[_Tensor] = []
    size = 0
    for output in outputs:
        if output.binary_size is None:
            if output.datatype.family is Family.TEXT:
                return None  # it may have to become base64
            continue
        if not _is_written_as_is(output):
            return None
        dtype = output.datatype.dtype
        assert dtype is not None
        tensors.append(_Tensor(size, output.binary_size // dtype.itemsize, dtype))
        size += output.binary_size
    follows = [output.binary_size is not None for output in outputs]
    pieces = split_around_data(fields, RESPONSE.tensors, follows)
    return _Plan(tuple(pieces), tuple(tensors), size)


def _is_written_as_is(output: OutputTensor) -> bool:
    """Tell whether orjson writes the elements as the protocol requires."""
    datatype = output.datatype
    if datatype.family not in (Family.INTEGER, Family.FLOAT) or not output.binary_size:
        return False
    return json_dtype(datatype) == datatype.dtype
