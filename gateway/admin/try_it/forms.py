"""Writes a request in each form that clients use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import orjson
from multidict import CIMultiDict

from gateway.codec.elements.bytes_elements import PREFIX_SIZE
from gateway.codec.grpc.request import write_infer_request
from gateway.codec.policies import JsonPolicies, Nonfinite
from gateway.codec.v1.nested_writer import (
    EmptyTensorEncoder,
    NestedBytesEncoder,
    NestedEncoder,
    NestedNumberEncoder,
)
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.json_request import JsonRequestWriter
from gateway.errors import bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.messages import InferRequest, InputTensor
from gateway.protocol.operations import model_path, quote_name
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.tensors import element_count
from gateway.protocol.v1 import V1Format
from gateway.proxy.infer.grpc_upstream import one_message_request
from gateway.upstream.transport import UpstreamRequest

_WINDOW = 128 * 1024
"""Bytes of tensors that become text without giving other threads a chance."""
_JSON_TYPE = ("Content-Type", "application/json")
_BINARY_TYPE = ("Content-Type", "application/octet-stream")

Chunks = list[bytes | memoryview]
Form = Callable[[InferRequest, str, str], UpstreamRequest]


def write_json(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a request of the protocol's JSON form."""
    writer = JsonRequestWriter(request, JsonPolicies())
    text: Chunks = [writer.feed(piece) for piece in _windows(request.chunks)]
    text.append(writer.finish())
    return _post(f"{_path(model, version)}/infer", text, _JSON_TYPE)


def write_binary(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a request of the binary tensor data extension."""
    header = write_binary_header(request)
    size = (HEADER_LENGTH, str(len(header)))
    return _post(f"{_path(model, version)}/infer", [header, *request.chunks], _BINARY_TYPE, size)


def write_raw(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a raw binary request, whose body is the data of its only input.

    Raises GatewayError (400) if there are more.
    """
    inputs, data = request.head.inputs, b"".join(request.chunks)
    if len(inputs) != 1:
        raise bad_request(f"a raw request has one input, not {len(inputs)}")
    if inputs[0].datatype.family is Family.TEXT:
        if element_count(inputs[0].shape) != 1:
            raise bad_request("a raw request of BYTES has one element")
        data = data[PREFIX_SIZE:]
    return _post(f"{_path(model, version)}/infer", [data], _BINARY_TYPE, (HEADER_LENGTH, "0"))


def write_v1(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a V1 request: rows for one input, columns for several. Raises GatewayError."""
    pairs = zip(request.head.inputs, request.tensors, strict=True)
    tensors = [_nested(tensor, data) for tensor, data in pairs if not isinstance(data, int)]
    if len(tensors) == 1:
        layout, body = V1Format.ROWS, tensors[0]
    else:
        names = [orjson.dumps(each.name) for each in request.head.inputs]
        members = [b"%b:%b" % pair for pair in zip(names, tensors, strict=True)]
        layout, body = V1Format.COLUMNS, b"{%b}" % b",".join(members)
    text = b'{"%b":%b}' % (layout.value.encode(), body)
    return _post(f"{_path(model, version, '/v1')}:predict", [text], _JSON_TYPE)


def write_grpc(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a gRPC call."""
    message = write_infer_request(request, model, version)
    return one_message_request("ModelInfer", message, CIMultiDict())


FORMS: dict[str, Form] = {
    "json": write_json,
    "binary": write_binary,
    "raw": write_raw,
    "v1": write_v1,
    "grpc": write_grpc,
}


def _post(target: str, body: Chunks, *headers: tuple[str, str]) -> UpstreamRequest:
    return UpstreamRequest("POST", target, CIMultiDict(headers), body)


def _path(model: str, version: str, prefix: str = "/v2") -> str:
    return model_path(quote_name(model), quote_name(version) or None, prefix)


def _windows(chunks: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        for start in range(0, len(chunk), _WINDOW):
            yield memoryview(chunk)[start : start + _WINDOW]


def _nested(tensor: InputTensor, data: Sequence[bytes | memoryview]) -> bytes:
    encoder = _encoder(tensor)
    return b"".join([*map(encoder.feed, _windows(data)), encoder.end()])


def _encoder(tensor: InputTensor) -> NestedEncoder:
    label, shape = f"input '{tensor.name}'", tensor.shape
    if not element_count(shape):
        return EmptyTensorEncoder(label, shape)
    if tensor.datatype.family is Family.TEXT:
        return NestedBytesEncoder(label, shape, as_base64=False)
    return NestedNumberEncoder(label, tensor.datatype, shape, Nonfinite.LITERAL)
