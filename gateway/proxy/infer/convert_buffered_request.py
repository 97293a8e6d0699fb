"""Reads infer requests that are fully buffered: at once, without waiting for anything.

Where that is not possible, the result is None: the model's metadata is not cached, the body takes
more than one time slice, or the request is invalid. The streaming path then waits, or sends the
error. For all other requests both give the same result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Final

from gateway.codec.v1.fast_request import read_buffered_predict
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.fast_request import MAX_FAST_REQUEST, read_buffered_request
from gateway.codec.v2.request import MAX_CACHED_HEADER, InferRequestReader, read_without_data
from gateway.errors import GatewayError
from gateway.protocol.declared_model import complete_metadata
from gateway.protocol.messages import InferRequest, InferRequestHead, TensorData
from gateway.protocol.operations import Operation
from gateway.protocol.raw_binary import read_raw_binary
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1ResponseLayout
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.body_io import Chunks
from gateway.proxy.destination import Destination, Limits
from gateway.sizes import CACHED_DOCUMENTS


class ReceivedRequest:
    """A request that was read; ``body`` has the data of all its tensors, in order.

    ``uses_metadata`` tells whether it was read by the model's metadata. Raw binary is read by those
    of the server, which precede the declared ones.
    """

    def __init__(
        self,
        request: InferRequest,
        body: Sequence[bytes | memoryview] | Chunks,
        uses_metadata: bool = False,
        is_raw_binary: bool = False,
    ) -> None:
        self.request: Final = request
        self.body: Final = body
        self.uses_metadata: Final = uses_metadata
        self.is_raw_binary: Final = is_raw_binary

    @property
    def buffered_size(self) -> int:
        """Return the bytes that are buffered."""
        head = self.request.head.memory
        return head if isinstance(self.body, AsyncIterator) else head + self.request.data_size


def read_buffered(
    operation: Operation, destination: Destination, header_size: int | None, body: bytes
) -> ReceivedRequest | None:
    """Read an infer request; None if the streaming path is needed.

    ``header_size`` is its Inference-Header-Content-Length: None if all of it is JSON, 0 for raw
    binary.
    """
    try:
        if header_size == 0:
            request = _read_raw_binary(operation, destination, body)
        elif header_size is None:
            request = _read_json(body, destination.limits)
        else:
            request = _read_binary(body, header_size, destination.limits)
    except GatewayError:
        return None
    if request is None:
        return None
    is_raw = header_size == 0
    return ReceivedRequest(request, request.chunks, uses_metadata=is_raw, is_raw_binary=is_raw)


def read_buffered_prediction(
    operation: Operation, destination: Destination, body: bytes, request_id: str
) -> tuple[ReceivedRequest, V1ResponseLayout] | None:
    """Read a V1 prediction; return it with the layout of its response. None as above."""
    model = cached_metadata(operation, destination)
    if model is None or not model.inputs or not body or len(body) > MAX_UNSCHEDULED:
        return None
    try:
        request, layout = read_prediction(body, model, destination.limits, request_id)
    except GatewayError:
        return None
    return ReceivedRequest(request, request.chunks, uses_metadata=True), layout


def is_accepted(operation: Operation, destination: Destination, received: ReceivedRequest) -> bool:
    """Tell whether a request needs no check that waits, and fails none that does not."""
    head = received.request.head
    declared = destination.declared_models.get(operation.model or "")
    if declared and not received.is_raw_binary and not declared.accepts(head.inputs):
        return False
    return head.features.is_plain or not destination.upstream.dialect.triton_extensions


def cached_metadata(operation: Operation, destination: Destination) -> ModelMetadata | None:
    """Return the metadata of a request's model if it is cached, completed by the declared one."""
    upstream, name = destination.upstream, operation.model or ""
    metadata = upstream.metadata.cached(name, operation.version, upstream.dialect.has_config)
    if metadata is None:
        return None
    return complete_metadata(metadata, destination.declared_models.get(name))


def cached_outputs_to_list(
    operation: Operation, destination: Destination, head: InferRequestHead
) -> tuple[str, ...] | None:
    """Return the outputs that a request must list; see ``outputs_to_list``. None as above."""
    if not destination.upstream.dialect.binary_only_if_listed or head.outputs:
        return ()
    model = cached_metadata(operation, destination)
    return None if model is None else tuple(output.name for output in model.outputs)


def _read_json(body: bytes, limits: Limits) -> InferRequest | None:
    if not 0 < len(body) <= min(MAX_FAST_REQUEST, limits.max_inference_header_bytes):
        return None
    request = read_buffered_request(body, limits.max_json_depth, limits.max_tensors)
    request = request or _read_small(body, limits)
    return None if request is None or request.missing_size else request


def _read_binary(body: bytes, header_size: int, limits: Limits) -> InferRequest | None:
    if header_size > min(len(body), limits.max_inference_header_bytes):
        return None
    text = body[:header_size]
    request = None
    if header_size <= MAX_CACHED_HEADER:
        request = read_without_data(text, limits.max_json_depth, limits.max_tensors)
    request = request or _read_small(text, limits)
    if request is None or request.missing_size != len(body) - header_size:
        return None
    return _with_data(request, body, header_size)


def _read_small(text: bytes, limits: Limits) -> InferRequest | None:
    """Read the JSON of a request that fits into a time slice; raises GatewayError."""
    if len(text) > MAX_UNSCHEDULED:
        return None
    reader = InferRequestReader(
        limits.max_inference_header_bytes, limits.max_json_depth, tensor_cap=limits.max_tensors
    )
    reader.feed(text, last=True)
    while reader.step():
        pass
    return reader.finish()


_read_raw_binary_head = lru_cache(maxsize=CACHED_DOCUMENTS)(read_raw_binary)


def _read_raw_binary(
    operation: Operation, destination: Destination, body: bytes
) -> InferRequest | None:
    model = cached_metadata(operation, destination)
    if model is None:
        return None
    return _with_data(_read_raw_binary_head(model, len(body)), body, 0)


def _with_data(request: InferRequest, body: bytes, start: int) -> InferRequest:
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


def read_prediction(
    body: bytes, model: ModelMetadata, limits: Limits, request_id: str
) -> tuple[InferRequest, V1ResponseLayout]:
    """Read a V1 prediction that fits into a time slice; raises GatewayError."""
    read = read_buffered_predict(body, model, limits.max_json_depth, request_id)
    if read is not None:
        return read
    with closing(predict_reader(model, limits)) as reader:
        reader.feed(body, last=True)
        while reader.step():
            pass
        return reader.finish(request_id)


def predict_reader(model: ModelMetadata, limits: Limits) -> PredictRequestReader:
    """Make the reader of a V1 prediction."""
    caps = limits.max_inference_header_bytes, limits.max_json_depth, limits.max_tensors
    return PredictRequestReader(model, *caps)
