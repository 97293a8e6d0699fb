"""Converts small, fully buffered binary responses to JSON text in a few calls.

Responses of a model look alike but for their numbers and their id. The header is read once, and the
text made of it is kept with the head. Unusual and invalid responses are left to InferResponseReader
and JsonResponseWriter; for all others both give the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from gateway.codec.elements.encode import TextChunk, fast_encode_numbers
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.json_writer import split_around_data
from gateway.codec.v2.response import response_fields
from gateway.codec.v2.response_reader import read_without_data
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Datatype
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.messages import InferResponse, InferResponseHead
from gateway.sizes import MAX_CACHED_DOCUMENT

_KEY = "json"
_POLICIES = JsonPolicies()


def fast_convert_response(body: bytes, header_size: int) -> tuple[bytes, int] | None:
    """Write a binary response as JSON; return it with the number of its elements.

    Returns None if the streaming path is needed.
    """
    if header_size > MAX_CACHED_DOCUMENT:
        return None
    try:
        response = read_without_data(body[:header_size])
    except GatewayError:
        return None
    return None if response is None else write_buffered(response, body, header_size)


def write_buffered(response: InferResponse, data: bytes, start: int) -> tuple[bytes, int] | None:
    """Write a response as JSON, whose data begin at ``start``; None if JsonResponseWriter must.

    Returns it with the number of its elements.
    """
    written = response.head.written
    if _KEY not in written:
        written[_KEY] = _make_text(response.head)
    around: _TextAroundData | None = written[_KEY]
    if around is None or start + around.size != len(data):
        return None
    text: list[TextChunk] = [around.split_around_data[0]]
    count = 0
    if response.id is not None:
        text = [b'{"id":', orjson.dumps(response.id), b",", around.split_around_data[0][1:]]
    tensors = memoryview(data)[start:]
    for number, tensor in enumerate(around.tensors, 1):
        elements = fast_encode_numbers(tensors[tensor.start : tensor.end], tensor.datatype)
        if elements is None:
            return None
        text += elements, around.split_around_data[number]
        count += tensor.count
    return b"".join(text), count


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor begins and ends in the data, its number of elements, and their type."""

    start: int
    end: int
    count: int
    datatype: Datatype


@dataclass(frozen=True, slots=True)
class _TextAroundData:
    """What a response becomes, apart from its id and numbers; ``size`` counts the bytes of data."""

    split_around_data: tuple[bytes, ...]
    tensors: tuple[_Tensor, ...]
    size: int


def _make_text(head: InferResponseHead) -> _TextAroundData | None:
    if not head.outputs:
        return None
    tensors: list[_Tensor] = []
    size = 0
    for output in head.outputs:
        if output.binary_size is None:
            continue  # it is in shared memory
        datatype, start = output.datatype, size
        if not output.binary_size or datatype.size is None:
            return None
        size += output.binary_size
        tensors.append(_Tensor(start, size, output.binary_size // datatype.size, datatype))
    follows = [output.binary_size is not None for output in head.outputs]
    fields = response_fields(InferResponse(head), _POLICIES)
    return _TextAroundData(
        tuple(split_around_data(fields, RESPONSE.tensors, follows)), tuple(tensors), size
    )
