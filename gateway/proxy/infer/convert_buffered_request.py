"""Reads infer requests that are fully buffered: at once, without waiting for anything.

Where that is not possible, the result is None: the model's metadata is not cached, the body takes
more than one time slice, or the request is invalid. The streaming path then waits, or sends the
error. For all other requests both give the same result.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

from gateway.codec.response_form import ResponseForm
from gateway.codec.v1.buffered_request import read_prediction
from gateway.codec.v1.prediction_form import PredictionForm
from gateway.codec.v2.request import read_buffered_binary, read_buffered_json, with_data
from gateway.errors import GatewayError
from gateway.protocol.declared_model import complete_metadata
from gateway.protocol.messages import InferRequest, InferRequestHead
from gateway.protocol.operations import Operation
from gateway.protocol.raw_binary import read_raw_binary
from gateway.protocol.request_features import region_error
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1ResponseLayout
from gateway.proxy.body_io import Chunks
from gateway.proxy.destination import Destination, Upstream
from gateway.sizes import CACHED_DOCUMENTS, MAX_UNSCHEDULED
from gateway.system.bounded_cache import cached
from gateway.system.shared_memory import PREFIX
from gateway.upstream.transport import FIRST_ERROR_STATUS

_PREFIX: Final = PREFIX.encode()
_OWN_REGION: Final = re.compile(rb'"shared_memory_region"[ \t\r\n]*+:[ \t\r\n]*+"%b' % _PREFIX)
"""A member of JSON without escapes."""

_UNRELATED_STATUSES: Final = frozenset((401, 403, 408, 413, 429, 502, 503, 504))
"""Errors whose reason is not the model's metadata."""


class ReceivedRequest:
    """A request that was read; ``body`` has the data of all its tensors, in order.

    ``uses_metadata`` tells whether it was read by the model's metadata. Raw binary is read by those
    of the server, which precede the declared ones. Responses are written in ``response_form``, or
    as the protocol says without one. A gRPC client gets a converted one with raw contents if it
    ``wants_raw``.
    """

    def __init__(
        self,
        request: InferRequest,
        body: Sequence[bytes | memoryview] | Chunks,
        uses_metadata: bool = False,
        is_raw_binary: bool = False,
        response_form: ResponseForm | None = None,
        wants_raw: bool = True,
    ) -> None:
        self.request: Final = request
        self.body: Final = body
        self.uses_metadata: Final = uses_metadata
        self.is_raw_binary: Final = is_raw_binary
        self.response_form: Final = response_form
        self.wants_raw: Final = wants_raw

    @property
    def is_idempotent(self) -> bool:
        """Whether a server may execute the request twice; see UpstreamRequest."""
        return not self.request.head.is_in_sequence

    @property
    def buffered_size(self) -> int:
        """Return the bytes that are buffered."""
        head = self.request.head.memory
        return head if isinstance(self.body, AsyncIterator) else head + self.request.data_size

    def check_metadata(self, status: int, operation: Operation, destination: Destination) -> None:
        """Recheck cached metadata after an error: the request may be made from outdated ones.

        Statuses of overload, of a proxy and of a client too slow or a body too large say nothing
        of it.
        """
        upstream = destination.upstream
        if status < FIRST_ERROR_STATUS or status in _UNRELATED_STATUSES:
            return
        if self.uses_metadata or upstream.dialect.binary_only_if_listed:
            upstream.metadata.recheck(operation.model or "", operation.version)


def read_buffered(
    operation: Operation,
    destination: Destination,
    header_size: int | None,
    body: bytes | memoryview,
) -> ReceivedRequest | None:
    """Read an infer request; None if the streaming path is needed.

    ``header_size`` is its Inference-Header-Content-Length: None if all of it is JSON, 0 for raw
    binary.
    """
    try:
        if header_size == 0:
            request = _read_raw_binary(operation, destination, body)
        elif header_size is None:
            request = read_buffered_json(bytes(body), *destination.limits.reader_caps)
        else:
            request = read_buffered_binary(body, header_size, *destination.limits.reader_caps)
    except GatewayError:
        return None
    if request is None:
        return None
    is_raw = header_size == 0
    return ReceivedRequest(request, request.chunks, uses_metadata=is_raw, is_raw_binary=is_raw)


def read_buffered_prediction(
    operation: Operation, destination: Destination, body: bytes, request_id: str
) -> ReceivedRequest | None:
    """Read a V1 prediction; None as above."""
    model = cached_metadata(operation, destination)
    if model is None or not model.inputs or not body or len(body) > MAX_UNSCHEDULED:
        return None
    try:
        request, layout = read_prediction(body, model, *destination.limits.reader_caps, request_id)
    except GatewayError:
        return None
    return received_prediction(request, layout)


def received_prediction(request: InferRequest, layout: V1ResponseLayout) -> ReceivedRequest:
    """Return a V1 prediction as it was read."""
    form = PredictionForm(layout)
    return ReceivedRequest(request, request.chunks, uses_metadata=True, response_form=form)


def own_region_error(request: InferRequest, upstream: Upstream) -> str:
    """Say which tensor names a region of the gateway's own shared memory; empty if none does.

    Another client's tensors are there.
    """
    if upstream.shared_memory is None:
        return ""
    head = request.head
    error = region_error("input", head.inputs, PREFIX)
    error = error or region_error("output", head.outputs, PREFIX)
    if not error and _PREFIX in request.text and _OWN_REGION.search(request.text):
        # Of a member that occurs twice, the server takes the first, and the head has the last.
        error = "the request's JSON names a shared memory region that is the gateway's own"
    return error


def is_accepted(operation: Operation, destination: Destination, received: ReceivedRequest) -> bool:
    """Tell whether a request needs no check that waits, and fails none that does not."""
    head = received.request.head
    if own_region_error(received.request, destination.upstream):
        return False
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
    declared = destination.declared_models.get(name)
    return metadata if declared is None else complete_metadata(metadata, declared)


def cached_outputs_to_list(
    operation: Operation, destination: Destination, head: InferRequestHead
) -> tuple[str, ...] | None:
    """Return the outputs that a request must list; see ``outputs_to_list``. None as above."""
    if not destination.upstream.dialect.binary_only_if_listed or head.outputs:
        return ()
    model = cached_metadata(operation, destination)
    return None if model is None else tuple(output.name for output in model.outputs)


_read_raw_binary_head = cached(CACHED_DOCUMENTS)(read_raw_binary)


def _read_raw_binary(
    operation: Operation, destination: Destination, body: bytes | memoryview
) -> InferRequest | None:
    model = cached_metadata(operation, destination)
    if model is None:
        return None
    return with_data(_read_raw_binary_head(model, len(body)), body, 0)
