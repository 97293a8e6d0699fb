"""Passes gRPC calls through to a server that speaks gRPC, messages and trailers as they come.

What would kill a Triton 2.51 does not reach it: the classification of strings, and a stream that
ends with its first error (triton_grpc_error) though its model may send more. The gateway refuses
the one, and ends the stream itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.infer import read_infer_request, read_stream_response
from gateway.codec.grpc.infer_message import read_requested_output
from gateway.codec.grpc.shared_memory import SharedMessage
from gateway.errors import ErrorKind, GatewayError, ServerName, bad_response, strip_tracebacks
from gateway.observe.call_record import CallRecord
from gateway.protocol.dialects import GrpcForm
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import PREFIX_SIZE, MessagePiece, MessageReader, frame
from gateway.protocol.grpc.headers import (
    ACCEPT_ENCODING,
    ENCODING,
    MESSAGE,
    STATUS,
    TIMEOUT,
    WANTS_STATUS,
    format_timeout,
    is_written_well,
    parse_timeout,
    read_error,
    read_status,
)
from gateway.protocol.grpc.methods import INFERENCE_SERVICE, find_method
from gateway.protocol.grpc.model_scanner import ModelScanner
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.grpc.wire import MAX_MESSAGE, WireError, WireReader, varint_field
from gateway.protocol.messages import RequestFeatures
from gateway.protocol.operations import OperationKind, quote_name
from gateway.protocol.request_features import check_classified_outputs
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.retry import send_call
from gateway.proxy.attempts.shared_memory_forms import SharedMemoryForm, SharedOverGrpc
from gateway.proxy.body_chunks import Chunks, write_chunks
from gateway.proxy.body_io import ClientBody, ResponseRelay, convert_message, prepend
from gateway.proxy.errors import record_status, send_status, status_lines
from gateway.proxy.filters.mirror import DiscardResponse
from gateway.proxy.grpc.message import receive_messages
from gateway.proxy.grpc.region_guard import RegionGuard
from gateway.proxy.grpc.request import GrpcRequest, RequestChunks
from gateway.proxy.grpc.shared_memory import share_buffered, share_streamed, without_encodings
from gateway.proxy.headers import end_to_end
from gateway.proxy.infer.convert_request import model_metadata
from gateway.proxy.interfaces import Call, ClientRequest, HeaderLines
from gateway.upstream.grpc.endpoint import check_grpc_head, check_one_message
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.shared_memory import NOT_SHARED
from gateway.upstream.transport import Body, RequestTemplate, UpstreamRequest, UpstreamResponse

_ANY_SIZE = 2**62
_UNKNOWN_MODEL: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)
_MAX_ERROR: Final = 64 * 1024
"""Bytes of a message that may be an error; Triton's have no tensors."""

_STREAM_INFER = f"/{INFERENCE_SERVICE}/ModelStreamInfer"


def client_timeout(headers: CIMultiDictProxy[str]) -> float | None:
    """Return the seconds that a client waits; None if it does not say.

    Raises GatewayError (400) for a grpc-timeout that is not valid.
    """
    value = headers.get(TIMEOUT)
    return None if value is None else parse_timeout(value)


async def grpc_passthrough(
    call: Call, reservation: Reservation, message: bytes | memoryview | None = None
) -> None:
    """Pass a gRPC call to a server, and its response back.

    ``message`` is the request's only one, if it was read. Raises GatewayError; an error of the
    server passes as its own status.
    """
    is_infer = call.operation.kind is OperationKind.INFER
    if is_infer and call.destination.upstream.shared_memory is not None:
        call = replace(call, request=await _scan_again(call, RegionGuard))
    request = call.request
    headers = CIMultiDict(request.headers)
    headers.popall("Content-Length", None)
    headers["TE"] = "trailers"
    if call.destination.upstream.drains_cancelled:
        headers.popall(TIMEOUT, None)  # the server would cancel the call itself
    elif TIMEOUT in headers:
        headers[TIMEOUT] = format_timeout(call.deadline.seconds_left)
    dialect = call.destination.upstream.dialect_state.dialect
    form = GrpcForm() if dialect is None else dialect.grpc
    changes: list[Callable[[Chunks], Chunks]] = []
    if request.target == _STREAM_INFER and not form.wraps_streamed:
        changes.append(wrap_streamed)
    if request.target == _STREAM_INFER and wants_status(request):
        changes.append(end_at_first_error)
    headers.popall(WANTS_STATUS, None)
    if changes:
        headers.popall(ACCEPT_ENCODING, None)  # the gateway does not read compressed messages
    target = request.target.replace(f"/{INFERENCE_SERVICE}/", f"/{form.service}/", 1)
    if message is not None:
        body: Body = (frame(len(message)), message)
    elif request.target == _STREAM_INFER and not form.checks_tensors:
        headers.popall(ENCODING, None)  # they are read, and sent as they are then
        body = _checked_messages(call, reservation)
    else:
        body = await _body(call, reservation)
    is_unary = not find_method(request.target.partition("?")[0]).response_streams
    shared: SharedMemoryForm | None = None
    if is_infer and is_unary:
        template = RequestTemplate("POST", target, tuple(headers.items()))
        body, shared = await _share(call, body, template, reservation)
    upstream_request = UpstreamRequest("POST", target, headers, body, is_grpc=True)
    async with send_call(call, upstream_request, form=shared) as upstream_call:
        received, server = upstream_call.response, upstream_call.server
        relay = ResponseRelay(received, server, call.response, call.destination, call.deadline)
        await relay_messages(relay, changes, is_unary=is_unary)


async def relay_messages(
    relay: ResponseRelay, changes: Sequence[Callable[[Chunks], Chunks]] = (), *, is_unary: bool
) -> None:
    """Pass on the response to a gRPC call; ``changes`` are made to its body, in their order.

    Raises GatewayError (502) for a response without a status, and for one to a unary call that has
    the status OK but is not one message.
    """
    received, response, server = relay.upstream_response, relay.response, relay.server
    check_grpc_head(received.status, received.headers, server)
    headers = _valid_head(end_to_end(received.headers), server)
    headers.popall("Content-Length", None)  # the trailers, not its last byte, end the response
    chunks = relay.chunks()
    if is_unary:
        chunks = _one_message(chunks, received, server)
        if STATUS in headers:  # mostly the whole response, so nothing may be sent yet
            first = await anext(chunks, b"")
            chunks = prepend((first,) if first else (), chunks)
    await relay.start(headers)
    for change in changes:
        chunks = change(chunks)
    try:
        await write_chunks(chunks, response, relay.deadline)
    except StreamError as error:
        relay.deadline.expect_client()
        await send_status(response, GrpcStatus.INTERNAL, str(error))  # as Triton ends it
        return
    status = received.grpc_status
    if status is None and received.status == 200:
        raise bad_response(f"{server.url} ended its response without grpc-status", server)
    await response.finish(_valid_fields(received.trailers, server))
    if status is not None:
        record_status(response.record, status, received.grpc_error(server.url))


async def _one_message(
    chunks: Chunks, upstream_response: UpstreamResponse, server: ServerName
) -> Chunks:
    """Yield a body; raises GatewayError (502) at its end as ``check_one_message``."""
    start, size = b"", 0
    async for chunk in chunks:
        if len(start) < PREFIX_SIZE:
            start += chunk[:PREFIX_SIZE]
        size += len(chunk)
        yield chunk
    if upstream_response.grpc_status == GrpcStatus.OK:
        check_one_message(start, size, server)


async def _body(call: Call, reservation: Reservation) -> Body:
    """Return the body to send: buffered if it was read ahead, so that it can be sent again."""
    is_checked = (
        call.operation.kind is OperationKind.INFER
        and call.destination.upstream.dialect.triton_extensions
    )
    marking = await marking_request(call) if is_checked else None
    request = call.request if marking is None else marking
    if request.content_length is None:
        check = None if marking is None else partial(check_outputs, call)
        return RequestChunks(request, call.deadline, check)
    body = ClientBody(request, _ANY_SIZE, call.deadline)  # each message has its cap
    data = await body.read_all(reservation)
    if marking is not None:
        await check_outputs(call, marking)
    return (data,)


async def _share(
    call: Call, body: Body, template: RequestTemplate, reservation: Reservation
) -> tuple[Body, SharedMemoryForm | None]:
    """Return the body, and how its message goes through shared memory, if it does."""
    upstream = call.destination.upstream
    if upstream.min_shared_bytes == NOT_SHARED or not upstream.dialect.grpc.takes_raw:
        return body, None
    message: SharedMessage | None = None
    if isinstance(body, AsyncIterator):
        body, message = await share_streamed(body, call.operation, call.destination, reservation)
    elif isinstance(body, Sequence):
        message = share_buffered(b"".join(body), call.operation, call.destination)
    if message is None:
        return body, None
    template = replace(template, headers=without_encodings(template.headers))
    return body, SharedOverGrpc(message, template)


async def _checked_messages(call: Call, reservation: Reservation) -> Chunks:
    """Yield infer requests whose tensors fit their data; raises GatewayError (400) for another."""
    limits = call.destination.limits
    caps = limits.max_inference_header_bytes, limits.max_tensors
    async for message in receive_messages(call, reservation):
        await convert_message(len(message), read_infer_request, message, *caps)
        yield frame(len(message))
        yield message


def _valid_head(headers: CIMultiDict[str], server: ServerName) -> CIMultiDict[str]:
    """Return the head of a response, which may be one without a body; see ``_valid_fields``."""
    if STATUS not in headers and MESSAGE not in headers:
        return headers
    return CIMultiDict(_valid_fields(tuple(headers.items()), server))


def _valid_fields(fields: HeaderLines, server: ServerName) -> HeaderLines:
    """Return headers or trailers with a status that all clients read alike.

    One that is no number becomes UNKNOWN, and the message says what the server sent.
    """
    if is_written_well(fields):
        return tuple(_valid_message(*field) for field in fields)
    kept = tuple(field for field in fields if field[0].lower() not in (STATUS, MESSAGE))
    text = read_error(fields, server.public)
    return kept + status_lines(read_status(fields) or GrpcStatus.OK, text)


def _valid_message(name: str, value: str) -> tuple[str, str]:
    """Encode the spaces of a grpc-message with spaces around it, as RFC 9113 forbids these."""
    if name.lower() == MESSAGE and value != value.strip(" "):
        return name, value.replace(" ", "%20")
    return name, value


async def wrap_streamed(chunks: Chunks) -> Chunks:
    """Yield a stream of ModelInferResponse messages as ModelStreamInferResponse messages.

    Raises GatewayError (502) for compressed messages, and for what is no message.
    """
    reader = MessageReader(MAX_MESSAGE, "protobuf's limit", RESPONSE)
    async for chunk in chunks:
        reader.feed(chunk)
        while (piece := reader.next_piece()) is not None:
            if piece.begins:
                if piece.is_compressed:
                    raise bad_response(f"{RESPONSE.name} is compressed, which was not asked for")
                field = varint_field(fields.INFER_RESPONSE, piece.size)
                yield frame(len(field) + piece.size) + field
            if piece.data:
                yield piece.data
    reader.end()


# -------------------------------------------------------------- classification of strings


async def marking_request(call: Call) -> GrpcRequest:
    """Return the request of a call, which marks outputs that may want classification.

    Requests that copy a body for a mirror, and their copies, are scanned once more.
    """
    request = call.request
    if not isinstance(request, GrpcRequest):
        request = await _scan_again(call)
    request.marks_outputs = True
    return request


async def _scan_again(call: Call, scanner: type[ModelScanner] = ModelScanner) -> GrpcRequest:
    """Return the request of a call, which is scanned as it is read, whatever models it names."""
    # The sizes were checked before a rewrite may have added to them.
    limits = replace(call.destination.limits, max_request_bytes=MAX_MESSAGE)
    method = find_method(call.request.target.partition("?")[0])
    next_slice = call.destination.scheduler.next_slice
    request = GrpcRequest(call.request, method, limits, next_slice, scanner)
    request.content_length = call.request.content_length
    await request.route(MAX_MESSAGE, lambda _: None)
    return request


async def check_outputs(call: Call, request: GrpcRequest) -> None:
    """Check the messages that were read since the last check.

    Raises GatewayError (400) that names an output of strings that are to be classified, or 501 if
    the server does not say what outputs its model has.
    """
    for model, outputs in request.take_marked():
        await _check_message(call, *model, outputs)


async def _check_message(call: Call, model: str, version: str, outputs: list[bytes]) -> None:
    names = _classified(outputs)
    if not names:
        return
    operation = replace(
        call.operation, model=quote_name(model), version=quote_name(version) or None
    )
    # The record of the call is that of the attempt in progress.
    response = DiscardResponse(CallRecord("", ""))
    call = replace(call, operation=operation, response=response)
    try:
        known = (await model_metadata(call)).outputs
    except UpstreamResponseError as error:
        strip_tracebacks(error)
        if error.status in _UNKNOWN_MODEL:
            return  # so it says to the call itself
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"classification of output '{names[0]}': the server does not say what outputs "
            f"model '{model}' has",
        ) from None
    check_classified_outputs(RequestFeatures(names), known, model)


def _classified(outputs: Sequence[bytes]) -> tuple[str, ...]:
    """Return the names of the outputs that have the parameter."""
    found: list[str] = []
    for output in outputs:
        with suppress(WireError):  # the server refuses it
            read = read_requested_output(WireReader(output))
            if "classification" in read.parameters:
                found.append(read.name)
    return tuple(found)


# ------------------------------------------------------------------------- errors of streams


class StreamError(Exception):
    """An error of the model, which ends a stream."""


def wants_status(request: ClientRequest) -> bool:
    """Tell whether a client wants the first error of a stream as the status."""
    return request.headers.get(WANTS_STATUS, "").lower() == "true"


async def end_at_first_error(chunks: Chunks) -> Chunks:
    """Yield a stream of ModelStreamInferResponse messages up to the first error of a model.

    It raises StreamError then. An error from before the inference, which names no model, passes as
    a message: Triton ends no stream for it. So do compressed messages, which are not read.
    """
    reader = MessageReader(MAX_MESSAGE, "protobuf's limit", RESPONSE)
    held = bytearray()
    is_known = False
    async for chunk in chunks:
        reader.feed(chunk)
        while (piece := reader.next_piece()) is not None:
            if piece.begins:
                held.clear()
                is_known = False
            if not is_known:
                held += piece.data
                if piece.ends and (text := _error_of(piece, held)):
                    raise StreamError(text)
                if piece.ends or not _may_be_error(piece, held):
                    is_known = True
                    yield frame(piece.size, piece.is_compressed)
                    yield bytes(held)
            elif piece.data:
                yield piece.data
    reader.end()


def _may_be_error(piece: MessagePiece, start: bytearray) -> bool:
    """Tell by the start of a message whether it may be an error: protobuf writes that first."""
    if piece.is_compressed or piece.size > _MAX_ERROR:
        return False
    return not start or start[0] == fields.ERROR_MESSAGE


def _error_of(piece: MessagePiece, message: bytearray) -> str:
    """Return the error of a model; empty if the message is none."""
    if not _may_be_error(piece, message):
        return ""
    try:
        read = read_stream_response(bytes(message), _MAX_ERROR)
    except GatewayError:
        return ""  # the client finds out
    return read.error or "" if read.has_begun else ""
