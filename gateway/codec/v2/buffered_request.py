"""Reads infer requests that are fully buffered, within one time slice."""

from __future__ import annotations

from typing import Final

from gateway.codec.v2.fast_request import MAX_FAST_REQUEST, read_buffered_request
from gateway.codec.v2.request import MAX_CACHED_HEADER, InferRequestReader, read_without_data
from gateway.protocol.messages import InferRequest, TensorData
from gateway.sizes import MAX_UNSCHEDULED

_MAX_OBJECTS: Final = 64
"""Each may be a tensor, which takes some 20 us, however short its text."""


def read_buffered_json(
    body: bytes, header_cap: int, depth_cap: int, tensor_cap: int
) -> InferRequest | None:
    """Read a request that is all JSON; None if that takes more than one time slice.

    ``header_cap`` limits its JSON in bytes, ``depth_cap`` the nesting, ``tensor_cap`` the tensors.
    Raises GatewayError (400).
    """
    if not 0 < len(body) <= min(MAX_FAST_REQUEST, header_cap):
        return None
    request = read_buffered_request(body, depth_cap, tensor_cap)
    request = request or _read_small(body, header_cap, depth_cap, tensor_cap)
    return None if request is None or request.missing_size else request


def read_buffered_binary(
    body: bytes, header_size: int, header_cap: int, depth_cap: int, tensor_cap: int
) -> InferRequest | None:
    """Read a request of which ``header_size`` bytes are JSON; as ``read_buffered_json``."""
    if header_size > min(len(body), header_cap):
        return None
    text = body[:header_size]
    request = None
    if header_size <= MAX_CACHED_HEADER:
        request = read_without_data(text, depth_cap, tensor_cap)
    request = request or _read_small(text, header_cap, depth_cap, tensor_cap)
    if request is None or request.missing_size != len(body) - header_size:
        return None
    return with_data(request, body, header_size)


def _read_small(
    text: bytes, header_cap: int, depth_cap: int, tensor_cap: int
) -> InferRequest | None:
    """Read the JSON of a request that fits into a time slice; raises GatewayError."""
    if len(text) > MAX_UNSCHEDULED or text.count(b"{") > _MAX_OBJECTS:
        return None
    reader = InferRequestReader(header_cap, depth_cap, tensor_cap=tensor_cap)
    reader.feed(text, last=True)
    while reader.step():
        pass
    return reader.finish()


def with_data(request: InferRequest, body: bytes, start: int) -> InferRequest:
    """Return a request with its data, of which those still to come begin at ``start``."""
    tensors: list[TensorData] = []
    data = memoryview(body)
    for part in request.tensors:
        if isinstance(part, int):
            tensors.append((data[start : start + part],))
            start += part
        else:
            tensors.append(part)
    return InferRequest(request.head, request.id, tuple(tensors), request.text)
