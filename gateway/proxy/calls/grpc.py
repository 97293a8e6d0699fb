"""ModelInfer: passed on to servers that take it as it came, converted for all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.request import read_infer_request
from gateway.errors import GatewayError
from gateway.http1.head import RequestHead, ResponseHead
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import PREFIX_SIZE, frame, is_one_message
from gateway.protocol.grpc.headers import (
    GRPC_TYPE,
    TIMEOUT,
    WANTS_STATUS,
    is_written_well,
    read_message,
)
from gateway.protocol.grpc.methods import INFERENCE_SERVICE, GrpcMethod, find_method
from gateway.protocol.grpc.model_scanner import ModelScanner
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.grpc.timeout import format_timeout, parse_timeout
from gateway.protocol.response_header import is_success, response_header_length
from gateway.proxy.body_io import convert_message
from gateway.proxy.calls.handler import (
    OK,
    CallHandler,
    ClientMessage,
    HandlerScope,
    ServerRequest,
    ServerResponse,
    explain,
)
from gateway.proxy.calls.infer import InferHandler
from gateway.proxy.calls.stream_infer import StreamInferHandler
from gateway.proxy.calls.templates import make_template, passed_lines
from gateway.proxy.destination import Destination, Limits, Upstream
from gateway.proxy.errors import record_status
from gateway.proxy.grpc.http_form import (
    HttpFormResponse,
    http_headers,
    infer_converter,
    infer_target,
    received_message,
    response_message,
)
from gateway.proxy.grpc.message import receive_message
from gateway.proxy.grpc.passthrough import grpc_passthrough, relay_messages
from gateway.proxy.grpc.request import NamedModel
from gateway.proxy.headers import end_to_end
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.convert_response import convert_whole
from gateway.proxy.interfaces import Call, ResponseTemplate
from gateway.proxy.passthrough import ResponseRelay
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.sizes import CACHED_HEADS, CONVERT_CHUNK
from gateway.system.bounded_cache import BoundedCache
from gateway.upstream.grpc.endpoint import check_grpc_head
from gateway.upstream.transport import RequestTemplate

MAX_REQUEST: Final = 64 * 1024
"""Bytes of the largest request: the first window of a stream."""

_MAX_FIELDS: Final = 256
"""Fields of a message that are scanned at once: about a quarter of a millisecond."""
_SCAN_STEP: Final = 1024

_GRPC_HEADERS: Final = (("content-type", GRPC_TYPE),)

_templates: BoundedCache[tuple[object, ...], ResponseTemplate] = BoundedCache(CACHED_HEADS)


def scan_message(method: GrpcMethod, body: bytes) -> NamedModel | None:
    """Return the model of a body with one message.

    None leaves it to the streaming path: an invalid message, a compressed one, one of very many
    fields, or one that may want outputs to be classified, which has to be checked.
    """
    if not is_one_message(body, len(body)) or body[0] or fields.CLASSIFICATION in body:
        return None
    scanner = ModelScanner(method.name_fields, method.version_field)
    if method.name_fields:
        data = memoryview(body)[PREFIX_SIZE:]
        try:
            while data:
                size = max(_SCAN_STEP, scanner.skip_size)
                scanner.feed(data[:size])
                data = data[size:]
                if scanner.fields > _MAX_FIELDS:
                    return None
            scanner.end()
        except GatewayError:
            return None
    return scanner.model, scanner.names


class GrpcHandler(InferHandler):
    """Serves ModelInfer; the scope is that of the client's requests."""

    max_size = MAX_REQUEST
    is_grpc = True

    def __init__(self, scope: HandlerScope) -> None:
        # The target is known once a message is converted: not each model's name fits into a path.
        headers = CIMultiDictProxy(http_headers(scope.headers))
        super().__init__(replace(scope, method="POST", target="", headers=headers), 0, MAX_REQUEST)
        self._rpc_target: Final = scope.target
        sent = CIMultiDict(scope.headers)
        sent["TE"] = "trailers"
        sent.popall(WANTS_STATUS, None)
        self._passed_headers: Final = tuple(sent.items())
        self._passed_templates: Final[dict[str, RequestTemplate]] = {}

    def sends_grpc(self, upstream: Upstream) -> bool:
        """Tell whether servers of the upstream get the calls over gRPC."""
        return _passes(upstream) or super().sends_grpc(upstream)

    def to_server(
        self, head: RequestHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server."""
        upstream = destination.upstream
        if upstream.dialect_state.dialect is None:
            return None
        timeouts = [field.value for field in head.noted if field.lower == TIMEOUT]
        if len(timeouts) > 1:
            return None
        seconds = parse_timeout(timeouts[0]) if timeouts else None
        if seconds is not None and not seconds:
            return None  # the streaming path sends the error
        if not _passes(upstream):
            return self._convert_message(head, body, destination, seconds)
        template = self._passed_template(upstream.dialect.grpc.service)
        line = b""
        if seconds and not upstream.drains_cancelled:  # else the server would cancel it itself
            left = min(seconds, destination.limits.request_timeout)
            line = f"{TIMEOUT}: {format_timeout(left)}\r\n".encode()
        return ServerRequest(template, line, (body,), client_timeout=seconds, is_grpc=True)

    def _passed_template(self, service: str) -> RequestTemplate:
        template = self._passed_templates.get(service)
        if template is None:
            target = self._rpc_target.replace(f"/{INFERENCE_SERVICE}/", f"/{service}/", 1)
            template = RequestTemplate("POST", target, self._passed_headers)
            self._passed_templates[service] = template
        return template

    def _convert_message(
        self, head: RequestHead, body: bytes, destination: Destination, seconds: float | None
    ) -> ServerRequest | None:
        limits = destination.limits
        if len(body) > limits.max_buffered_body_bytes:
            return None  # the streaming path sends the error
        if self._operation.version is not None and not destination.upstream.dialect.versioned_paths:
            return None
        message = memoryview(body)[PREFIX_SIZE:]
        sent = self._write(head, self._read(message, limits), destination)
        if sent is not None:
            sent.client_timeout = seconds
        return sent

    def _read(self, message: bytes | memoryview, limits: Limits) -> ReceivedRequest:
        """Read a message; raises GatewayError (400) also for a name that fits into no path."""
        if not self._target:
            self._target = infer_target(self._operation)
        read = read_infer_request(message, limits.max_inference_header_bytes, limits.max_tensors)
        return received_message(read)

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        upstream, limits = call.destination.upstream, call.destination.limits
        with call.reserve() as reservation:
            if upstream.speaks_grpc and upstream.dialect.grpc.infer_passes:
                await grpc_passthrough(call, reservation)
                return
            message = await receive_message(call, reservation)
            received = await convert_message(len(message), self._read, message, limits)
            await self.send(call, received)

    def passes_untouched(
        self, request: ServerRequest, head: ResponseHead, destination: Destination
    ) -> bool:
        """Tell by its head whether the client gets a response as it is."""
        return request.received is None

    def to_client(self, response: ServerResponse) -> ClientMessage | None:
        """Return a complete response; raises GatewayError (502) if it is none of its protocol."""
        if response.request.received is None:
            return _pass_on(response)
        try:
            message = self._message_of(response)
        except GatewayError as error:
            raise explain(error, response) from error
        if message is None:
            return None
        record_status(response.record, GrpcStatus.OK)
        return _converted_template(response.policy), b"", message, OK

    def _message_of(self, response: ServerResponse) -> bytes | None:
        """Return the message for the client; None for an error, and for a large response."""
        form = self._in_http_form(response)
        if form is None:
            return None
        request, (head, content) = response.request, form
        if not is_success(head.status) or len(content) > CONVERT_CHUNK:
            return None
        plan = self._plan(request, head, response.destination)
        if plan.is_coded:
            return None
        body, limits = bytes(content), response.destination.limits
        size = response_header_length(head.headers, limits.max_inference_header_bytes)
        converted = convert_whole(head, body, plan, request.response_form)
        if converted is not None:
            body, size = converted.body, converted.header_size
            response.record.response_elements = converted.elements
        if len(body) > limits.max_buffered_body_bytes:
            return None  # the streaming path sends the error
        assert request.received is not None
        chunks = response_message(size, body, limits, is_raw=request.received.wants_raw)
        return b"".join((frame(sum(map(len, chunks))), *chunks))

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        if request.received is None:
            await relay_messages(relay, is_unary=True)
            return
        limits = relay.destination.limits
        convert = infer_converter(limits, is_raw=request.received.wants_raw)
        cap = limits.max_buffered_body_bytes
        with relay.reserve() as reservation:
            response = HttpFormResponse(relay.response, convert, cap, reservation)
            await super().relay(request, replace(relay, response=response))


def make_grpc_infer_handler(scope: HandlerScope) -> CallHandler:
    """Return the handler of ModelInfer or ModelStreamInfer."""
    is_stream = find_method(scope.target.partition("?")[0]).request_streams
    return StreamInferHandler(scope) if is_stream else GrpcHandler(scope)


def _passes(upstream: Upstream) -> bool:
    """Tell whether messages pass to the servers of an upstream as they came."""
    dialect = upstream.dialect_state.dialect
    return upstream.speaks_grpc and (dialect is None or dialect.grpc.infer_passes)


def _pass_on(response: ServerResponse) -> ClientMessage | None:
    """Return a response of gRPC as it came, with its status recorded.

    None leaves it to the streaming path, which writes a status, and spaces around a text, as all
    clients read them. Raises GatewayError (502) if it is of another protocol.
    """
    head, trailers, record = response.head, response.trailers, response.record
    template = _passed_on_template(response)
    message = template, passed_lines(head, template), response.body, trailers
    if response.is_ok_message:
        record_status(record, GrpcStatus.OK)
        return message
    code = response.grpc_status
    if code is None:
        return None  # it is no response of gRPC
    if code == GrpcStatus.OK and not is_one_message(response.body, len(response.body)):
        return None  # the streaming path sends the error
    if any(value != value.strip(b" ") for _, value in trailers):
        return None
    status_fields = response.status_fields
    if not is_written_well(status_fields) or not is_written_well(head.headers.items()):
        return None
    record_status(record, code, read_message(status_fields))
    return message


def _passed_on_template(response: ServerResponse) -> ResponseTemplate:
    head, policy = response.head, response.policy
    key = head.key, policy
    template = _templates.get(key)
    if template is None:
        check_grpc_head(head.status, head.headers, response.server)
        headers = end_to_end(CIMultiDictProxy(CIMultiDict(head.keyed_headers)))
        template = make_template(head, headers, policy, states_length=False)
        _templates.put(key, template)
    return template


def _converted_template(policy: ResponseHeaderPolicy | None) -> ResponseTemplate:
    template = _templates.get((policy,))
    if template is None:
        lines = _GRPC_HEADERS if policy is None else policy.apply_to_lines(_GRPC_HEADERS)
        template = ResponseTemplate(200, "", lines, states_length=False)
        _templates.put((policy,), template)
    return template
