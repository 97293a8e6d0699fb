"""Serves gRPC calls from servers over HTTP: each becomes the call of an HTTP client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.documents import read_request, write_model_config, write_response
from gateway.codec.grpc.request import read_infer_request
from gateway.codec.grpc.response import write_infer_response
from gateway.codec.v2.response_reader import InferResponseReader
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.grpc.http_mapping import http_request_of
from gateway.protocol.grpc.methods import GrpcMethod
from gateway.protocol.grpc.rpcs import RPCS
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import (
    Operation,
    OperationKind,
    model_path,
    parse_operation_variants,
)
from gateway.protocol.response_header import is_success, response_header_length
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import convert_message
from gateway.proxy.destination import Limits
from gateway.proxy.grpc.http_form import (
    Chunks,
    ConvertResponse,
    HttpError,
    HttpFormRequest,
    HttpFormResponse,
    parse_json,
)
from gateway.proxy.grpc.message import read_message
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.handler import send_request
from gateway.proxy.interfaces import Call

_NO_BODY = CIMultiDict[str]()
_JSON = CIMultiDict((("Content-Type", "application/json"),))
_READINESS = {"ServerLive": "live", "ServerReady": "ready", "ModelReady": "ready"}
_IS_READY = {200: True, 400: False, 503: False}
"""What a status over HTTP says of readiness; any other is an error."""

_OF_STREAM = "triton_enable_empty_final_response"

Serve = Callable[[Call], Awaitable[None]]
"""Serves a call over HTTP."""


async def grpc_infer(call: Call, reservation: Reservation) -> None:
    """Serve ModelInfer from a server over HTTP; the response has the form of the request.

    Raises GatewayError: 400 for an invalid request, 413 over a cap.
    """
    limits = call.destination.limits
    data = await read_message(call, reservation)
    caps = limits.max_inference_header_bytes, limits.max_tensors
    read = await convert_message(len(data), read_infer_request, data, *caps)
    operation = call.operation
    target = infer_target(operation)
    request = HttpFormRequest(call.request, "POST", target, _NO_BODY, b"")
    convert = infer_converter(limits, is_raw=read.is_raw)
    response = HttpFormResponse(call.response, convert, limits.max_buffered_body_bytes, reservation)
    infer_request = without_stream_parameter(read.request)
    received = ReceivedRequest(infer_request, infer_request.chunks)
    await send_request(replace(call, request=request, response=response), received, target)


def infer_target(operation: Operation) -> str:
    """Return the target of an infer request; raises GatewayError (400) as ``_check_target``."""
    target = model_path(operation.model or "", operation.version) + "/infer"
    _check_target("POST", target)
    return target


def infer_converter(limits: Limits, *, is_raw: bool) -> ConvertResponse:
    """Return what makes a ModelInferResponse of a response over HTTP, in the request's form."""
    return partial(_infer_response, limits=limits, is_raw=is_raw)


def without_stream_parameter(request: InferRequest) -> InferRequest:
    """Drop what clients say of a stream in every request; Triton refuses it over HTTP."""
    head = request.head
    if _OF_STREAM not in head.parameters:
        return request
    parameters = {name: head.parameters[name] for name in head.parameters if name != _OF_STREAM}
    changed = replace(head, parameters=parameters, written={})
    return InferRequest(changed, request.id, request.tensors)


async def grpc_as_http(call: Call, rpc: GrpcMethod, reservation: Reservation, serve: Serve) -> None:
    """Serve any other RPC as the request over HTTP that asks for the same.

    Raises GatewayError: 400 for an invalid request, 501 for an RPC that HTTP has nothing like.
    """
    schema = RPCS.get(rpc.name)
    if schema is None:
        raise GatewayError(ErrorKind.UNSUPPORTED, f"{rpc.name} has no counterpart over HTTP")
    path, body = read_request(schema, await read_message(call, reservation))
    if rpc.name in _READINESS:
        member = _READINESS[rpc.name]

        def convert_readiness(status: int, _headers: CIMultiDict[str], error: bytes) -> Chunks:
            if status not in _IS_READY:
                raise HttpError(status, error)
            return [write_response(schema, {member: _IS_READY[status]})]

        request, response = _in_http_form(
            call, rpc.name, path, body, convert_readiness, reservation
        )
        try:
            await serve(replace(call, request=request, response=response))
        except GatewayError as error:
            if error.kind is not ErrorKind.NOT_READY:
                raise
            await response.send(error.kind.value.status, "", CIMultiDict(), b"")
        return

    def convert(status: int, _headers: CIMultiDict[str], document: bytes) -> Chunks:
        if status != 200:
            raise HttpError(status, document)
        return [write_response(schema, parse_json(document))]

    request, response = _in_http_form(call, rpc.name, path, body, convert, reservation)
    await serve(replace(call, request=request, response=response))


async def grpc_model_config(call: Call, reservation: Reservation, serve: Serve) -> None:
    """Serve ModelConfig for a server that has none, from the model's metadata."""
    path, _ = read_request(RPCS["ModelConfig"], await read_message(call, reservation))

    def convert(status: int, _headers: CIMultiDict[str], document: bytes) -> Chunks:
        if status != 200:
            raise HttpError(status, document)
        return [write_model_config(parse_json(document))]

    request, response = _in_http_form(call, "ModelMetadata", path, None, convert, reservation)
    operation = replace(call.operation, kind=OperationKind.MODEL_METADATA)
    await serve(replace(call, request=request, response=response, operation=operation))


def _in_http_form(
    call: Call,
    rpc: str,
    path: Mapping[str, str],
    body: object,
    convert: ConvertResponse,
    reservation: Reservation,
) -> tuple[HttpFormRequest, HttpFormResponse]:
    """Return request and response of an RPC as they are over HTTP."""
    as_http = http_request_of(rpc, path, body)
    _check_target(as_http.method, as_http.target)
    request = HttpFormRequest(
        call.request,
        as_http.method,
        as_http.target,
        _JSON if as_http.has_body else _NO_BODY,
        orjson.dumps(body) if as_http.has_body else b"",
    )
    cap = call.destination.limits.max_buffered_body_bytes
    return request, HttpFormResponse(call.response, convert, cap, reservation)


def _check_target(method: str, target: str) -> None:
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
