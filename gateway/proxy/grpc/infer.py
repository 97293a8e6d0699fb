"""ModelInfer messages for servers over HTTP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.request import ReadRequest
from gateway.codec.grpc.response import write_infer_response
from gateway.codec.v2.response_reader import InferResponseReader
from gateway.errors import bad_request
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import (
    Operation,
    infer_path,
    parse_operation_variants,
)
from gateway.protocol.response_header import is_success, response_header_length
from gateway.proxy.destination import Limits
from gateway.proxy.grpc.http_form import (
    Chunks,
    ConvertResponse,
    HttpError,
)
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest

_OF_STREAM = "triton_enable_empty_final_response"


def infer_target(operation: Operation) -> str:
    """Return the target of an infer request; raises GatewayError (400) as ``check_target``."""
    target = infer_path(operation)
    check_target("POST", target)
    return target


def infer_converter(limits: Limits, *, is_raw: bool) -> ConvertResponse:
    """Return what makes a ModelInferResponse of a response over HTTP, in the request's form."""
    return partial(_infer_response, limits=limits, is_raw=is_raw)


def received_message(read: ReadRequest) -> ReceivedRequest:
    """Return a message for a server over HTTP.

    It lacks what clients say of a stream in every request: Triton refuses that over HTTP.
    """
    request, head = read.request, read.request.head
    if _OF_STREAM in head.parameters:
        parameters = {name: head.parameters[name] for name in head.parameters if name != _OF_STREAM}
        changed = replace(head, parameters=parameters, written={})
        request = InferRequest(changed, request.id, request.tensors)
    return ReceivedRequest(request, request.chunks, wants_raw=read.is_raw)


def check_target(method: str, target: str) -> None:
    """Refuse a name that a server over HTTP could take for another path; raises GatewayError."""
    if len(parse_operation_variants(method, target)) > 1:
        raise bad_request(
            f"the model's name cannot be in a path, as the server over HTTP needs it: {target}"
        )


def _infer_response(
    status: int, headers: CIMultiDict[str], body: bytes, limits: Limits, is_raw: bool
) -> Chunks:
    if not is_success(status):
        raise HttpError(status, body)
    size = response_header_length(CIMultiDictProxy(headers), limits.max_inference_header_bytes)
    return response_message(size, body, limits, is_raw=is_raw)


def response_message(
    header_size: int | None, body: bytes, limits: Limits, *, is_raw: bool
) -> Chunks:
    """Write a ModelInferResponse from an infer response over HTTP, mostly in binary form.

    Raises GatewayError (502) for an invalid one; it names no server.
    """
    caps = limits.max_inference_header_bytes, limits.max_buffered_body_bytes
    reader = InferResponseReader(header_size, *caps)
    reader.feed(body, last=True)
    while reader.step():
        pass
    tensors: dict[int, Chunks] = {}
    for piece in reader.pieces():
        tensors.setdefault(piece.index, []).append(piece.data)
    reader.finish()
    assert reader.response is not None
    return write_infer_response(
        reader.response, [chunks for _, chunks in sorted(tensors.items())], is_raw
    )
