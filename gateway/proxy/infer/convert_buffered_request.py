"""Converts infer requests that are fully buffered: at once, without waiting for anything.

Where that is not possible, the result is None: the model's metadata is not cached, the body takes
more than one time slice, or the request is invalid. The streaming path then waits, or sends the
error. For all other requests both give the same result.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache

from gateway.codec.policies import BytesEncoding
from gateway.codec.v1.request import PredictRequestConverter
from gateway.codec.v2.fast_request import MAX_FAST_REQUEST, fast_convert_request
from gateway.codec.v2.request import (
    MAX_CACHED_HEADER,
    InferRequest,
    InferRequestConverter,
    header_without_data,
)
from gateway.errors import GatewayError
from gateway.protocol.declared_model import complete_metadata
from gateway.protocol.operations import Operation
from gateway.protocol.raw_binary import make_raw_binary_preamble
from gateway.protocol.request_features import RequestFeatures
from gateway.protocol.request_header import OutputEncoding, list_outputs
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1ResponseLayout
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.interfaces import Destination, Limits
from gateway.sizes import CACHED_DOCUMENTS
from gateway.upstream.transport import Body

ALL_BINARY = OutputEncoding(binary_by_default=True, binary_by_output={})
NO_FEATURES = RequestFeatures(())

make_cached_preamble = lru_cache(maxsize=CACHED_DOCUMENTS)(make_raw_binary_preamble)


@dataclass(frozen=True, slots=True)
class ConvertedRequest:
    """A request in binary form; ``size`` is that of the whole body. See also InferRequest.

    ``encoding`` is what the client wants of the outputs. ``features`` are empty for raw binary.
    ``uses_metadata`` tells whether the header was made from the model's metadata.
    """

    body: Body
    size: int
    header_size: int
    encoding: OutputEncoding
    features: RequestFeatures
    input_encodings: Mapping[int, BytesEncoding] = field(default_factory=dict)
    uses_metadata: bool = False

    @property
    def buffered_size(self) -> int:
        """Return the bytes that are buffered."""
        return self.header_size if isinstance(self.body, AsyncIterable) else self.size


def convert_buffered_request(
    operation: Operation, destination: Destination, header_size: int | None, body: bytes
) -> ConvertedRequest | None:
    """Convert a request into binary form; None if the streaming path is needed.

    ``header_size`` is its Inference-Header-Content-Length: None if all of it is JSON, 0 for raw
    binary.
    """
    try:
        if header_size == 0:
            return _convert_raw_binary(operation, destination, body)
        if header_size is None:
            return _read_json(operation, destination, body)
        return _read_binary(operation, destination, body, header_size)
    except GatewayError:
        return None


def convert_buffered_prediction(
    operation: Operation, destination: Destination, body: bytes, request_id: str
) -> tuple[ConvertedRequest, V1ResponseLayout] | None:
    """Convert a V1 prediction; return it with the layout of its response. None as above."""
    model = cached_metadata(operation, destination)
    if model is None or not model.inputs or not body or len(body) > MAX_UNSCHEDULED:
        return None
    limits = destination.limits
    caps = limits.max_inference_header_bytes, limits.max_json_depth, limits.max_tensors
    try:
        with closing(PredictRequestConverter(model, *caps)) as codec:
            codec.feed(body, last=True)
            while codec.step():
                pass
            request = codec.finish(request_id)
    except GatewayError:
        return None
    content = b"".join((request.header, *request.tensors))
    converted = ConvertedRequest(
        (content,),
        len(content),
        len(request.header),
        ALL_BINARY,
        request.features,
        request.input_encodings,
        uses_metadata=True,
    )
    listed = _with_listed_outputs(operation, destination, converted, content)
    return None if listed is None else (listed, request.predicted)


def is_accepted(operation: Operation, destination: Destination, features: RequestFeatures) -> bool:
    """Tell whether a request needs none of the checks of ``check_request``."""
    declared = destination.declared_models.get(operation.model or "")
    if declared is not None and not declared.accepts(features.inputs):
        return False
    return features.is_plain or not destination.upstream.dialect.triton_extensions


def cached_metadata(operation: Operation, destination: Destination) -> ModelMetadata | None:
    """Return the metadata of a request's model if it is cached, completed by the declared one."""
    upstream, name = destination.upstream, operation.model or ""
    metadata = upstream.metadata.cached(name, operation.version, upstream.dialect.has_config)
    if metadata is None:
        return None
    return complete_metadata(metadata, destination.declared_models.get(name))


def needs_listed_outputs(destination: Destination, encoding: OutputEncoding) -> bool:
    """Tell whether the server responds in binary only if the gateway lists all outputs."""
    return destination.upstream.dialect.binary_only_if_listed and not encoding.binary_by_output


def _read_json(
    operation: Operation, destination: Destination, body: bytes
) -> ConvertedRequest | None:
    limits = destination.limits
    if not 0 < len(body) <= min(MAX_FAST_REQUEST, limits.max_inference_header_bytes):
        return None
    fast = fast_convert_request(body, limits.max_json_depth, limits.max_tensors)
    if fast is not None:
        request = ConvertedRequest(
            (fast.body,), len(fast.body), fast.header_size, fast.output_encoding, fast.features
        )
        return _with_listed_outputs(operation, destination, request, fast.body)
    return _join(operation, destination, _read_small(body, limits), b"")


def _read_binary(
    operation: Operation, destination: Destination, body: bytes, header_size: int
) -> ConvertedRequest | None:
    limits = destination.limits
    if header_size > min(len(body), limits.max_inference_header_bytes):
        return None
    text = body[:header_size]
    request = None
    if header_size <= MAX_CACHED_HEADER:
        request = header_without_data(text, limits.max_json_depth, limits.max_tensors)
    request = request or _read_small(text, limits)
    return _join(operation, destination, request, body[header_size:])


def _read_small(text: bytes, limits: Limits) -> InferRequest | None:
    """Read the JSON of a request that fits into a time slice; raises GatewayError."""
    if len(text) > MAX_UNSCHEDULED:
        return None
    codec = InferRequestConverter(
        limits.max_inference_header_bytes, limits.max_json_depth, tensor_cap=limits.max_tensors
    )
    codec.feed(text, last=True)
    while codec.step():
        pass
    return codec.finish()


def _join(
    operation: Operation, destination: Destination, request: InferRequest | None, tensors: bytes
) -> ConvertedRequest | None:
    """Join a request with the binary tensors behind its JSON; None if their size is wrong."""
    if request is None or request.expected_size != len(tensors):
        return None
    parts: list[bytes] = [request.header]
    for part in request.tensors:
        if isinstance(part, int):
            parts.append(tensors[:part])
            tensors = tensors[part:]
        else:
            parts += part
    body = b"".join(parts)
    converted = ConvertedRequest(
        (body,),
        len(body),
        len(request.header),
        request.output_encoding,
        request.features,
        request.input_encodings,
    )
    return _with_listed_outputs(operation, destination, converted, body)


def _convert_raw_binary(
    operation: Operation, destination: Destination, raw: bytes
) -> ConvertedRequest | None:
    model = cached_metadata(operation, destination)
    if model is None:
        return None
    preamble = make_cached_preamble(model, len(raw))
    body = b"".join((preamble.header, preamble.prefix, raw))
    request = ConvertedRequest(
        (body,), len(body), len(preamble.header), ALL_BINARY, NO_FEATURES, uses_metadata=True
    )
    return _with_listed_outputs(operation, destination, request, body)


def _with_listed_outputs(
    operation: Operation, destination: Destination, request: ConvertedRequest, body: bytes
) -> ConvertedRequest | None:
    """List all outputs in a request's ``body`` if the server needs that."""
    if not needs_listed_outputs(destination, request.encoding):
        return request
    model = cached_metadata(operation, destination)
    if model is None:
        return None
    names = [output.name for output in model.outputs]
    if not names:
        return request
    header = list_outputs(body[: request.header_size], names)
    body = header + body[request.header_size :]
    return replace(request, body=(body,), size=len(body), header_size=len(header))
