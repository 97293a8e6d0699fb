"""RPCs: passed to servers that take them as they come, else converted.

ModelStreamInfer becomes one infer request for each message, in order. RPCs that do not infer are
served as the request over HTTP that asks for the same.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.documents import read_request, write_model_config, write_response
from gateway.codec.grpc.infer import (
    ReadRequest,
    read_infer_request,
    write_stream_error,
    write_stream_response,
)
from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.http1.head import RequestHead
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import FAILURE_LOG
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import PREFIX_SIZE, frame, is_one_message
from gateway.protocol.grpc.headers import (
    GRPC_TYPE,
    TIMEOUT,
    WANTS_STATUS,
    format_timeout,
    is_written_well,
    parse_timeout,
    read_message,
)
from gateway.protocol.grpc.methods import HEALTH_SERVICE, INFERENCE_SERVICE, GrpcMethod, find_method
from gateway.protocol.grpc.model_scanner import ModelScanner
from gateway.protocol.grpc.rpcs import RPCS, http_request_of
from gateway.protocol.grpc.status import GrpcStatus, http_status
from gateway.protocol.grpc.wire import Buffer, WireError, WireReader
from gateway.protocol.operations import Operation, OperationKind, quote_name
from gateway.protocol.response_header import ResponseAction, is_success, response_header_length
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.shared_memory_forms import SharedMemoryForm, SharedOverGrpc
from gateway.proxy.body_io import ResponseRelay, convert_message
from gateway.proxy.calls.handler import (
    OK,
    CallHandler,
    ClientMessage,
    HandlerScope,
    MakeHandler,
    ServerRequest,
    ServerResponse,
    explain,
    make_template,
    passed_lines,
    scope_of,
)
from gateway.proxy.calls.infer import InferHandler, convert_whole
from gateway.proxy.calls.shared_memory import is_for_all_regions
from gateway.proxy.destination import Destination, Limits, Upstream
from gateway.proxy.errors import record_status, send_status
from gateway.proxy.grpc.http_form import (
    Chunks,
    HttpError,
    HttpFormRequest,
    HttpFormResponse,
    check_target,
    http_headers,
    infer_converter,
    infer_target,
    parse_json,
    received_message,
    response_message,
)
from gateway.proxy.grpc.message import (
    finish,
    receive_message,
    receive_messages,
    start_response,
    write_message,
)
from gateway.proxy.grpc.own_services import serve_health, serve_reflection
from gateway.proxy.grpc.passthrough import grpc_passthrough, relay_messages, wants_status
from gateway.proxy.grpc.region_guard import MARK
from gateway.proxy.grpc.request import NamedModel
from gateway.proxy.grpc.shared_memory import share_buffered, without_encodings
from gateway.proxy.headers import ResponseHeaderPolicy, end_to_end
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.interfaces import Call, ResponseTemplate
from gateway.proxy.server_dialect import wait_for_dialects
from gateway.sizes import CACHED_HEADS, CONVERT_CHUNK
from gateway.system.bounded_cache import BoundedCache
from gateway.system.buffers import MAX_WINDOW
from gateway.upstream.grpc.endpoint import check_grpc_head
from gateway.upstream.shared_memory import NOT_SHARED
from gateway.upstream.transport import RequestTemplate

MAX_REQUEST: Final = MAX_WINDOW
"""Bytes of the largest request, which is waited for in one window of its stream."""

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
    if not is_one_message(body, len(body)) or body[0]:
        return None
    scanner = ModelScanner(method.name_fields, method.version_field)
    if method.name_fields:
        is_small = len(body) <= _SCAN_STEP
        data: Buffer = body[PREFIX_SIZE:] if is_small else memoryview(body)[PREFIX_SIZE:]
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
    # Not before: few fields are left to search.
    return None if _mentions(body, fields.CLASSIFICATION) else (scanner.model, scanner.names)


def _mentions(body: bytes, text: bytes) -> bool:
    """Tell whether a body with one message has a text outside its raw contents."""
    if len(body) > _SCAN_STEP:
        body = bytes(_without_contents(memoryview(body)[PREFIX_SIZE:]))
    return body.find(text) >= 0


def _without_contents(message: memoryview) -> memoryview:
    """Return a message without the raw contents at its end; all of it if it has none there."""
    reader, start = WireReader(message), -1
    try:
        while tag := reader.next_tag():
            if tag != fields.RAW_INPUT_CONTENTS:
                start = -1
            elif start < 0:
                start = reader.field_start
            reader.skip(tag)
    except WireError:
        return message
    return message if start < 0 else message[:start]


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
        self._passed_templates: Final[dict[tuple[str, bool], RequestTemplate]] = {}

    def sends_grpc(self, upstream: Upstream) -> bool:
        """Tell whether servers of the upstream get the calls over gRPC."""
        return _passes(upstream) or super().sends_grpc(upstream)

    def to_server(
        self,
        head: RequestHead,
        body: bytes | memoryview,
        destination: Destination,
        request_id: str,
    ) -> ServerRequest | None:
        """Return the request for a server."""
        upstream, body = destination.upstream, bytes(body)
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
        if upstream.shared_memory is not None and _mentions(body, MARK):
            return None  # the streaming path reads it, and may send the error
        line = b""
        if seconds and not upstream.drains_cancelled:  # else the server would cancel it itself
            left = min(seconds, destination.limits.request_timeout)
            line = f"{TIMEOUT}: {format_timeout(left)}\r\n".encode()
        return ServerRequest(
            self._passed_template(upstream),
            line,
            (body,),
            client_timeout=seconds,
            is_grpc=True,
            shared=self._share_passed(body, line, destination),
        )

    def _share_passed(
        self, body: bytes, line: bytes, destination: Destination
    ) -> SharedMemoryForm | None:
        if destination.upstream.min_shared_bytes == NOT_SHARED:
            return None
        message = share_buffered(body, self._operation, destination)
        if message is None:
            return None
        return SharedOverGrpc(
            message, self._passed_template(destination.upstream, shared=True), line
        )

    def _passed_template(self, upstream: Upstream, *, shared: bool = False) -> RequestTemplate:
        service = upstream.dialect.grpc.service
        template = self._passed_templates.get((service, shared))
        if template is None:
            target = self._rpc_target.replace(f"/{INFERENCE_SERVICE}/", f"/{service}/", 1)
            headers = without_encodings(self._passed_headers) if shared else self._passed_headers
            template = RequestTemplate("POST", target, headers)
            self._passed_templates[service, shared] = template
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
        if len(message) > CONVERT_CHUNK and len(_without_contents(message)) > CONVERT_CHUNK:
            return None  # to read so much takes several time slices
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
        received = request.received
        assert received is not None
        if not is_success(head.status) or len(content) > MAX_WINDOW:
            return None
        plan = self._plan(request, head, response.destination)
        passes_raw = received.wants_raw and plan.action is ResponseAction.UNTOUCHED
        if plan.is_coded or (len(content) > CONVERT_CHUNK and not passes_raw):
            return None
        body, limits = bytes(content), response.destination.limits
        size = response_header_length(head.headers, limits.max_inference_header_bytes)
        converted = convert_whole(request, head, body, plan)
        if converted is not None:
            body, size = converted.body, converted.header_size
            response.record.response_elements = converted.elements
        if len(body) > limits.max_buffered_body_bytes:
            return None  # the streaming path sends the error
        chunks = response_message(size, body, limits, is_raw=received.wants_raw)
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


class StreamInferHandler(CallHandler):
    """Serves ModelStreamInfer: passed on to servers of gRPC, a request for each message for others.

    The scope is that of the client's call.
    """

    def __init__(self, scope: HandlerScope) -> None:
        self._headers: Final = CIMultiDictProxy(http_headers(scope.headers))

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        with call.reserve() as reservation:
            if call.destination.upstream.speaks_grpc:
                await grpc_passthrough(call, reservation)
            else:
                await self._serve_messages(call, reservation)

    async def _serve_messages(self, call: Call, reservation: Reservation) -> None:
        """Serve each message of a stream before the next one is read.

        An error is a message of the stream, unless the client asks for its status. Raises
        GatewayError for what is no message, or with such a client.
        """
        response = call.response
        ends_at_error = wants_status(call.request)
        limits = call.destination.limits
        caps = limits.max_inference_header_bytes, limits.max_tensors
        async for data in receive_messages(call, reservation):
            model, request_id, message = "", None, list[bytes | memoryview]()
            try:
                read = read_infer_request(data, *caps)
                model, request_id = read.model, read.request.id
                result = await self._infer(call, read, reservation)
            except GatewayError as error:
                if ends_at_error:
                    raise
                _record(call, error)
                message = write_stream_error(error.public_message, model, request_id)
            else:
                if isinstance(result, HttpError):
                    if ends_at_error:
                        await send_status(response, result.code, result.text)
                        return
                    message = write_stream_error(result.text, model, request_id)
                else:
                    message = write_stream_response(result)
            call.deadline.expect_client()
            if not response.started:
                await start_response(response)
            await write_message(response, message)
            reservation.resize(0)
        if not response.started:
            await start_response(response)
        await finish(response)

    async def _infer(
        self, call: Call, read: ReadRequest, reservation: Reservation
    ) -> Chunks | HttpError:
        """Serve one message; return the message of the response, or the server's error."""
        operation, limits = _operation_of(read, call.operation), call.destination.limits
        scope = HandlerScope("POST", infer_target(operation), self._headers, operation, limits)
        main = call.response.record
        record = CallRecord(main.method, main.target, main.request_id, time.perf_counter())
        record.labels = main.labels
        record.trace = main.trace
        record.reserved = main.reserved
        convert, cap = infer_converter(limits, is_raw=read.is_raw), limits.max_buffered_body_bytes
        response = HttpFormResponse(call.response, convert, cap, reservation, record, is_sent=False)
        part = replace(call, response=response, operation=operation)
        try:
            await InferHandler(scope, 0, 0).send(part, received_message(read))
        finally:
            _add(main, record)
        return response.message if response.error is None else response.error


def _operation_of(read: ReadRequest, first: Operation) -> Operation:
    """Return the operation of a message: a stream may have messages for several models."""
    version = quote_name(read.version) or None
    return replace(first, model=quote_name(read.model) or first.model, version=version)


def _add(main: CallRecord, part: CallRecord) -> None:
    """Add the record of a message to that of its stream, which may have any number of them."""
    if part.trace is not None:
        part.trace.end_attempt(part)
    main.attempts += part.attempts
    main.retries += part.retries
    main.upstream = part.upstream or main.upstream
    main.endpoint = part.endpoint or main.endpoint
    main.server_form = part.server_form
    main.request_elements += part.request_elements
    main.response_elements += part.response_elements
    main.sent_bytes += part.total_sent_bytes
    main.received_bytes += part.total_received_bytes
    main.server_seconds += part.server_seconds
    if not main.sent_at:
        main.sent_at = part.sent_at
        main.prepare_seconds = part.prepare_seconds
        main.queue_seconds = part.queue_seconds
        main.first_byte_seconds = part.first_byte_seconds


def _record(call: Call, error: GatewayError) -> None:
    record = call.response.record
    record.set_abort(strip_tracebacks(error))
    FAILURE_LOG.write(error, record.request_id, http_status(error.kind.value.grpc_code))


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


_READINESS: Final = {"ServerLive": "live", "ServerReady": "ready", "ModelReady": "ready"}
_IS_READY: Final = {200: True, 400: False, 503: False}
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
                    await self._serve_as_http(call, reservation, from_metadata=True)
                    return
            # Whoever changes settings has to learn which upstream lacks them.
            passes = upstream.speaks_grpc and kind is not OperationKind.LOGGING
            message: bytes | memoryview | None = None
            rpc = self._rpc.name
            if rpc.startswith("SystemSharedMemory") and upstream.shared_memory is not None:
                message = await receive_message(call, reservation)
                region = read_request(rpc, message).path.get("name", "")
                passes = passes and not is_for_all_regions(rpc, region)
            if passes:
                await grpc_passthrough(call, reservation, message)
            else:
                await self._serve_as_http(call, reservation, message)

    async def _serve_as_http(
        self,
        call: Call,
        reservation: Reservation,
        message: bytes | memoryview | None = None,
        *,
        from_metadata: bool = False,
    ) -> None:
        """Serve an RPC as the request over HTTP that asks for the same.

        The config of a model comes ``from_metadata`` if its server has none. Raises GatewayError:
        400 for an invalid request, 501 for an RPC that HTTP has nothing like.
        """
        name = self._rpc.name
        if name not in RPCS:
            raise GatewayError(ErrorKind.UNSUPPORTED, f"{name} has no counterpart over HTTP")
        if message is None:
            message = await receive_message(call, reservation)
        path, body = read_request(name, message)
        readiness = _READINESS.get(name)

        def convert(status: int, _headers: CIMultiDict[str], document: bytes) -> Chunks:
            if readiness is not None and status in _IS_READY:
                return [write_response(name, {readiness: _IS_READY[status]})]
            if status != 200:
                raise HttpError(status, document)
            parsed = parse_json(document)
            return [write_model_config(parsed) if from_metadata else write_response(name, parsed)]

        operation, sent_name = call.operation, name
        if from_metadata:
            sent_name = "ModelMetadata"
            operation = replace(operation, kind=OperationKind.MODEL_METADATA)
        as_http = http_request_of(sent_name, path, body)
        check_target(as_http.method, as_http.target)
        request = HttpFormRequest(call.request, as_http, body)
        cap = call.destination.limits.max_buffered_body_bytes
        response = HttpFormResponse(call.response, convert, cap, reservation)
        call = replace(call, request=request, response=response, operation=operation)
        try:
            await self._make_http(scope_of(call)).serve(call)
            return
        except GatewayError as error:
            if readiness is None or error.kind is not ErrorKind.NOT_READY:
                raise
        await response.send(ErrorKind.NOT_READY.value.status, "", CIMultiDict(), b"")


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
                await self._serve_as_http(call, reservation)
