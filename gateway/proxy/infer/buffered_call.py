"""Converts fully buffered requests and responses without waiting: every form, every dialect.

The streaming path has the same readers and writers. It takes over wherever a function here returns
None: something must be waited for, is too large for one time slice, or is an error, which is
worded there.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass, replace

from gateway.codec.json.header_length_check import check_header_length
from gateway.codec.v1.fast_request import read_buffered_predict
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v1.response import predict_converter
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.fast_request import read_buffered_request
from gateway.codec.v2.json_request import JsonRequestWriter
from gateway.codec.v2.request import MAX_CACHED_HEADER, InferRequestReader, read_without_data
from gateway.errors import GatewayError
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.messages import InferRequest, InferRequestHead, OutputEncoding, TensorData
from gateway.protocol.raw_binary import read_raw_binary
from gateway.protocol.response_header import check_no_binary_outputs
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1ResponseLayout
from gateway.proxy.infer.buffered_response import has_requested_encoding, new_converter
from gateway.proxy.infer.convert_response import (
    convert_to_json,
    destination_with_base64,
    with_empty_data,
)
from gateway.proxy.infer.json_upstream import MAX_BUFFERED, passes_as_json
from gateway.proxy.interfaces import Destination, Limits
from gateway.sizes import CONVERT_CHUNK


@dataclass(frozen=True, slots=True)
class BufferedRequest:
    """A request in the form of a server.

    ``header_size`` is the size of the JSON before tensors, None if it is all JSON. ``layout`` is
    that of the response to a V1 client.
    """

    body: bytes
    header_size: int | None
    head: InferRequestHead
    layout: V1ResponseLayout | None = None


def convert_buffered_request(
    body: bytes,
    header_size: int | None,
    destination: Destination,
    declared: DeclaredModel | None = None,
    model: ModelMetadata | None = None,
) -> BufferedRequest | None:
    """Convert an infer request; ``header_size`` is its Inference-Header-Content-Length.

    ``model`` is needed for raw binary, and for servers that send only listed outputs in binary.
    """
    try:
        request = _read(body, header_size, destination.limits, model)
    except GatewayError:
        return None
    if request is None:
        return None
    # Raw binary is read by the metadata of the server, which precede the declared.
    if header_size != 0 and declared and not declared.accepts(request.head.inputs):
        return None
    return _write(request, destination, model)


def convert_buffered_predict(
    body: bytes,
    request_id: str,
    destination: Destination,
    model: ModelMetadata,
    declared: DeclaredModel | None = None,
) -> BufferedRequest | None:
    """Convert a V1 request; ``request_id`` is that of its headers."""
    if not body or not model.inputs or len(body) > CONVERT_CHUNK:
        return None
    try:
        request, layout = _read_predict(body, request_id, destination.limits, model)
    except GatewayError:
        return None
    if declared and not declared.accepts(request.head.inputs):
        return None
    written = _write(request, destination, model)
    return None if written is None else replace(written, layout=layout)


def _read_predict(
    body: bytes, request_id: str, limits: Limits, model: ModelMetadata
) -> tuple[InferRequest, V1ResponseLayout]:
    """Read a V1 request; raises GatewayError (400, 413)."""
    read = read_buffered_predict(body, model, limits.max_json_depth, request_id)
    if read is not None:
        return read
    reader = PredictRequestReader(
        model, limits.max_inference_header_bytes, limits.max_json_depth, limits.max_tensors
    )
    with closing(reader):
        reader.feed(body, last=True)
        while reader.step():
            pass
        return reader.finish(request_id)


def _read(
    body: bytes, header_size: int | None, limits: Limits, model: ModelMetadata | None
) -> InferRequest | None:
    """Read a request, all of whose data are here; raises GatewayError (400, 413)."""
    if header_size == 0:
        return None if model is None else read_raw_binary(model, [body])
    text = body if header_size is None else body[:header_size]
    if not text or (header_size or 0) > len(body):
        return None
    request = None
    if header_size is None:
        if len(body) <= limits.max_inference_header_bytes:
            request = read_buffered_request(body, limits.max_json_depth, limits.max_tensors)
    elif header_size <= min(MAX_CACHED_HEADER, limits.max_inference_header_bytes):
        request = read_without_data(text, limits.max_json_depth, limits.max_tensors)
    if request is None:
        if len(text) > CONVERT_CHUNK:
            return None
        reader = InferRequestReader(
            limits.max_inference_header_bytes, limits.max_json_depth, tensor_cap=limits.max_tensors
        )
        reader.feed(text, last=True)
        request = reader.finish()
    if request.missing_size != len(body) - len(text):
        return None
    return _with_data(request, body, len(text))


def _with_data(request: InferRequest, body: bytes, start: int) -> InferRequest:
    """Return a request with the data that follow its JSON."""
    if not request.missing_size:
        return request
    tensors: list[TensorData] = []
    for part in request.tensors:
        if isinstance(part, int):
            tensors.append([body[start : start + part]])
            start += part
        else:
            tensors.append(part)
    return InferRequest(request.head, request.id, tuple(tensors), request.text)


def _write(
    request: InferRequest, destination: Destination, model: ModelMetadata | None
) -> BufferedRequest | None:
    dialect, head = destination.upstream.dialect, request.head
    if dialect.triton_extensions and not head.features.is_plain:
        return None
    if dialect.binary:
        unlisted: tuple[str, ...] = ()
        if dialect.binary_only_if_listed and not head.outputs:
            if model is None:
                return None
            unlisted = tuple(output.name for output in model.outputs)
        header = write_binary_header(request, unlisted)
        return BufferedRequest(b"".join((header, *request.chunks)), len(header), head)
    if request.data_size > MAX_BUFFERED:
        return None
    writer = JsonRequestWriter(request, destination.policies)
    with suppress(GatewayError):
        text = b"".join([writer.feed(chunk) for chunk in request.chunks])
        return BufferedRequest(text + writer.finish(), None, head)
    return None


def convert_buffered_response(
    body: bytes, header_size: int | None, request: BufferedRequest, destination: Destination
) -> tuple[bytes, int | None] | None:
    """Convert a response of status 200 to what the client of the request wants.

    ``header_size`` is the size of the JSON before tensors, None without tensors. Returns the body
    and its ``header_size``. Raises GatewayError: 502 for an invalid response, 406 if a policy
    refuses a value.
    """
    encoding = request.head.output_encoding
    destination = destination_with_base64(destination, encoding)
    dialect, cap = destination.upstream.dialect, destination.limits.max_inference_header_bytes
    json_size = len(body) if header_size is None else header_size
    if json_size > min(cap, len(body)) or len(body) > CONVERT_CHUNK:
        return None
    if dialect.binary and header_size is None:
        check_header_length(body)
    if header_size is not None and not dialect.binary:
        return None  # it does not speak its dialect
    if request.layout is not None:
        return _write_predictions(body, json_size, request.layout, destination), None
    if dialect.binary:
        return _convert_binary(body, header_size, encoding, destination)
    if passes_as_json(encoding, destination):
        return body, None
    return _encode(body, None, encoding, destination)


def _convert_binary(
    body: bytes, header_size: int | None, encoding: OutputEncoding, destination: Destination
) -> tuple[bytes, int | None]:
    """Convert a response of a server that was asked for binary outputs."""
    policies = destination.policies
    has_encoding = destination.upstream.dialect.honors_output_encoding or (
        encoding.all_json and (header_size is not None or not policies.any_base64)
    )
    if not has_encoding:
        if header_size and has_requested_encoding(body[:header_size], encoding, policies):
            return body, header_size
    elif header_size is None:
        if not encoding.all_binary:
            return with_empty_data(body, encoding, destination), None
        check_no_binary_outputs(body)
        return body, None
    elif encoding.all_binary:
        return body, header_size
    elif encoding.all_json:
        return convert_to_json(body, header_size, destination), None
    return _encode(body, header_size, encoding, destination)


def _write_predictions(
    body: bytes, header_size: int, layout: V1ResponseLayout, destination: Destination
) -> bytes:
    """Write a response for a V1 client."""
    limits = destination.limits
    converter = predict_converter(
        header_size,
        layout,
        destination.policies,
        limits.max_inference_header_bytes,
        limits.max_buffered_body_bytes,
    )
    return b"".join((converter.text(body), *converter.finish()))


def _encode(
    body: bytes, header_size: int | None, encoding: OutputEncoding, destination: Destination
) -> tuple[bytes, int | None]:
    """Convert each output to the requested encoding."""
    converter = new_converter(header_size, encoding, destination)
    converter.feed(body, last=True)
    header, tensors = converter.finish()
    return b"".join((header, *tensors)), len(header) if any(tensors) else None
