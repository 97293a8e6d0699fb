"""Reads V1 predictions that are fully buffered, within one time slice.

Those of numbers alone take a few calls. Unusual and invalid requests are left to
PredictRequestReader; for all others both give the same result.
"""

from __future__ import annotations

from contextlib import closing
from itertools import chain
from typing import Any

import orjson

from gateway.codec import native
from gateway.codec.elements.decode import decode_numbers
from gateway.codec.v1.request import PredictRequestReader
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import InferRequest, InferRequestHead, InputTensor
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1Format, V1ResponseLayout, check_shape
from gateway.sizes import CACHED_DOCUMENTS, ENCODE_CHUNK
from gateway.system.bounded_cache import cached


def read_prediction(
    body: bytes,
    model: ModelMetadata,
    header_cap: int,
    depth_cap: int,
    tensor_cap: int,
    request_id: str,
) -> tuple[InferRequest, V1ResponseLayout]:
    """Read a V1 prediction that fits into a time slice; raises GatewayError."""
    read = read_prediction_fast(body, model, depth_cap, request_id)
    if read is not None:
        return read
    with closing(PredictRequestReader(model, header_cap, depth_cap, tensor_cap)) as reader:
        reader.feed(body, last=True)
        while reader.step():
            pass
        return reader.finish(request_id)


def read_prediction_fast(
    text: bytes, model: ModelMetadata, depth_cap: int, request_id: str
) -> tuple[InferRequest, V1ResponseLayout] | None:
    """Read a request that has nothing but numbers for the model's only input.

    ``depth_cap`` limits its nesting. Returns None if PredictRequestReader is needed.
    """
    split = native.split_prediction(text) if len(text) <= ENCODE_CHUNK else None
    if split is None:
        return None
    is_rows, array, is_nested = split
    if len(model.inputs) != 1:
        return None
    (declared,) = model.inputs
    datatype = declared.datatype
    if datatype.size is None:
        return None
    try:
        data = decode_numbers(array, datatype)
        if not data:
            return None  # something is to be said about the numbers
        shape = _find_shape(orjson.loads(array)) if is_nested else (len(data) // datatype.size,)
        layout = check_shape(model, declared, shape, V1Format.ROWS if is_rows else V1Format.COLUMNS)
    except (ValueError, GatewayError):
        return None
    if len(shape) >= depth_cap:
        return None
    head = _make_head(declared.name, datatype.name, shape[layout.single :], len(data))
    return InferRequest(head, request_id, ((data,),)), layout


def _find_shape(items: list[Any]) -> tuple[int, ...]:
    """Return the shape of nested arrays; raises ValueError if they have none."""
    shape = [len(items)]
    while list in (kinds := set(map(type, items))):
        if len(kinds) > 1 or len(lengths := set(map(len, items))) > 1:
            raise ValueError("ragged")
        shape += lengths
        items = list(chain.from_iterable(items))
    return tuple(shape)


@cached(CACHED_DOCUMENTS)
def _make_head(name: str, datatype: str, shape: tuple[int, ...], size: int) -> InferRequestHead:
    return InferRequestHead((InputTensor(name, DATATYPES[datatype], shape, size),))
