"""ModelStreamInfer: passed on, or one infer request for each message, in order."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from multidict import CIMultiDictProxy

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.request import ReadRequest, read_infer_request
from gateway.codec.grpc.stream_response import write_stream_error, write_stream_response
from gateway.errors import GatewayError, strip_tracebacks
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import FAILURE_LOG
from gateway.protocol.grpc.status import http_status
from gateway.protocol.operations import Operation, quote_name
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.calls.handler import CallHandler, HandlerScope
from gateway.proxy.calls.infer import InferHandler
from gateway.proxy.errors import send_status
from gateway.proxy.grpc.http_form import (
    CollectedResponse,
    HttpError,
    http_headers,
    infer_converter,
    infer_target,
    received_message,
)
from gateway.proxy.grpc.message import finish, receive_messages, start_response, write_message
from gateway.proxy.grpc.passthrough import grpc_passthrough
from gateway.proxy.grpc.stream_errors import wants_status
from gateway.proxy.interfaces import Call, ClientResponse


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
            await _start(response)
            await write_message(response, message)
            reservation.resize(0)
        await _start(response)
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
        response = CollectedResponse(call.response, record, convert, cap, reservation)
        part = replace(call, response=response, operation=operation)
        try:
            await InferHandler(scope, 0, 0).send(part, received_message(read))
        finally:
            _add(main, record)
        return response.message if response.error is None else response.error


async def _start(response: ClientResponse) -> None:
    if not response.started:
        await start_response(response)


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
