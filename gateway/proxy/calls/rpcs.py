"""RPCs that do not infer: passed on, or served as the request over HTTP that asks for the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import orjson
from multidict import CIMultiDict

from gateway.codec.grpc.documents import read_request, write_model_config, write_response
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.methods import HEALTH_SERVICE, GrpcMethod, find_method
from gateway.protocol.grpc.rpcs import RPCS, http_request_of
from gateway.protocol.operations import OperationKind
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.calls.handler import CallHandler, HandlerScope, MakeHandler, scope_of
from gateway.proxy.grpc.http_form import (
    Chunks,
    HttpError,
    HttpFormRequest,
    HttpFormResponse,
    check_target,
    parse_json,
)
from gateway.proxy.grpc.message import receive_message
from gateway.proxy.grpc.own_services import serve_health, serve_reflection
from gateway.proxy.grpc.passthrough import grpc_passthrough
from gateway.proxy.interfaces import Call
from gateway.proxy.server_dialect import wait_for_dialects

_NO_BODY = CIMultiDict[str]()
_JSON = CIMultiDict((("Content-Type", "application/json"),))
_READINESS = {"ServerLive": "live", "ServerReady": "ready", "ModelReady": "ready"}
_IS_READY = {200: True, 400: False, 503: False}
"""What a status over HTTP says of readiness; any other is an error."""


class RpcHandler(CallHandler):
    """Serves an RPC from one server; ``make_http`` makes what serves the same over HTTP."""

    def __init__(self, make_http: MakeHandler, scope: HandlerScope) -> None:
        self._make_http: Final = make_http
        self._rpc: Final = find_method(scope.target.partition("?")[0])

    async def serve(self, call: Call) -> None:
        """Serve a call in a task: untouched if the server is reached over gRPC."""
        upstream, kind = call.destination.upstream, self._rpc.kind
        with call.reserve() as reservation:
            if kind is OperationKind.CONFIG:
                await wait_for_dialects([upstream], call.deadline)
                if not upstream.dialect.has_config:
                    await _serve_config_from_metadata(call, reservation, self._make_http)
                    return
            # Whoever changes settings has to learn which upstream lacks them.
            if upstream.speaks_grpc and kind is not OperationKind.LOGGING:
                await grpc_passthrough(call, reservation)
            else:
                await _serve_as_http(call, self._rpc, reservation, self._make_http)


class OwnRpcHandler(RpcHandler):
    """Serves an RPC of the gateway itself, or over several servers."""

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        with call.reserve() as reservation:
            if self._rpc.is_reflection:
                await serve_reflection(call, reservation)
            elif self._rpc.service == HEALTH_SERVICE:
                await serve_health(call, self._rpc, reservation)
            else:
                await _serve_as_http(call, self._rpc, reservation, self._make_http)


async def _serve_as_http(
    call: Call, rpc: GrpcMethod, reservation: Reservation, make_http: MakeHandler
) -> None:
    """Serve an RPC as the request over HTTP that asks for the same.

    Raises GatewayError: 400 for an invalid request, 501 for an RPC that HTTP has nothing like.
    """
    if rpc.name not in RPCS:
        raise GatewayError(ErrorKind.UNSUPPORTED, f"{rpc.name} has no counterpart over HTTP")
    path, body = read_request(rpc.name, await receive_message(call, reservation))
    readiness = _READINESS.get(rpc.name)

    def write(status: int, document: bytes) -> Chunks | None:
        if readiness is not None and status in _IS_READY:
            return [write_response(rpc.name, {readiness: _IS_READY[status]})]
        return [write_response(rpc.name, parse_json(document))] if status == 200 else None

    as_http = _in_http_form(call, rpc.name, path, body, write, reservation)
    try:
        await make_http(scope_of(as_http)).serve(as_http)
    except GatewayError as error:
        if readiness is None or error.kind is not ErrorKind.NOT_READY:
            raise
        await as_http.response.send(error.kind.value.status, "", CIMultiDict(), b"")


async def _serve_config_from_metadata(
    call: Call, reservation: Reservation, make_http: MakeHandler
) -> None:
    """Serve ModelConfig for a server that has none, from the model's metadata."""
    path, _ = read_request("ModelConfig", await receive_message(call, reservation))

    def write(status: int, document: bytes) -> Chunks | None:
        return [write_model_config(parse_json(document))] if status == 200 else None

    as_http = _in_http_form(call, "ModelMetadata", path, None, write, reservation)
    operation = replace(call.operation, kind=OperationKind.MODEL_METADATA)
    as_http = replace(as_http, operation=operation)
    await make_http(scope_of(as_http)).serve(as_http)


def _in_http_form(
    call: Call,
    rpc: str,
    path: Mapping[str, str],
    body: object,
    write: Callable[[int, bytes], Chunks | None],
    reservation: Reservation,
) -> Call:
    """Return a call as it is over HTTP; ``write`` makes a message of what is no error."""
    as_http = http_request_of(rpc, path, body)
    check_target(as_http.method, as_http.target)
    request = HttpFormRequest(
        call.request,
        as_http.method,
        as_http.target,
        _JSON if as_http.has_body else _NO_BODY,
        orjson.dumps(body) if as_http.has_body else b"",
    )

    def convert(status: int, _headers: CIMultiDict[str], document: bytes) -> Chunks:
        message = write(status, document)
        if message is None:
            raise HttpError(status, document)
        return message

    cap = call.destination.limits.max_buffered_body_bytes
    response = HttpFormResponse(call.response, convert, cap, reservation)
    return replace(call, request=request, response=response)
