"""Serves the generate extension from servers over gRPC, as Triton serves it over HTTP.

Over gRPC only ModelStreamInfer serves all models: ModelInfer refuses decoupled ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from multidict import CIMultiDict

from gateway.codec.generate import (
    MAX_GENERATE_REQUEST,
    GenerateBodyCheck,
    generate_too_large,
    read_generate_request,
    write_event,
    write_generate_error,
    write_generate_response,
)
from gateway.codec.grpc.infer import (
    FINAL_RESPONSE,
    ReadResponse,
    read_stream_response,
    write_infer_request,
)
from gateway.codec.v2.request import InferRequestReader, read_buffered_json
from gateway.errors import (
    ErrorKind,
    GatewayError,
    ModelMismatchError,
    bad_request,
    name_server_in_errors,
)
from gateway.observe.failure_log import FAILURE_LOG
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc.framing import MessageReader
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.messages import InferRequest, InferRequestHead
from gateway.protocol.operations import OperationKind, decode_utf8_name
from gateway.protocol.tensors import ModelMetadata
from gateway.proxy.admission.memory_budget import Reservation, run_steps
from gateway.proxy.attempts.retry import UpstreamCall, send_call
from gateway.proxy.body_chunks import ResponseChunks
from gateway.proxy.body_io import (
    ClientBody,
    buffer_chunks,
    feed_each,
    passthrough,
    read_messages,
    write,
)
from gateway.proxy.headers import with_body
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.convert_request import check_request, current_metadata, model_metadata
from gateway.proxy.infer.grpc_upstream import one_message_request
from gateway.proxy.interfaces import Call
from gateway.sizes import CONVERT_CHUNK
from gateway.system.time_slices import split
from gateway.upstream.content_decoding import decompress_message
from gateway.upstream.grpc.endpoint import check_grpc_head, error_of_rpc

_RPC: Final = "ModelStreamInfer"
_JSON_TYPE: Final = "application/json"
_EVENTS_TYPE: Final = "text/event-stream; charset=utf-8"

_NOT_ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)
"""Triton's text."""

_HIDDEN_PARAMETERS: Final = {FINAL_RESPONSE: True}
"""Parameters of responses that belong to gRPC."""

_PARSED_FACTOR: Final = 5
"""How much larger than its text a request is while it is read: texts, mostly, in several forms."""


class _Result(NamedTuple):
    """What a client gets of a message, or of the end of a stream that failed.

    ``in_event`` tells whether Triton sends it as an event if it comes first.
    """

    status: int
    json: bytes
    in_event: bool
    ends_stream: bool = False


async def generate(call: Call) -> None:
    """Serve a request to generate: one response, or a stream of events.

    It passes untouched to a server over HTTP. Else the first response sets the status. Raises
    GatewayError; an error after that is an event.
    """
    if not call.destination.upstream.speaks_grpc:
        await passthrough(call, inference=OperationKind.GENERATE)
        return
    if call.request.method != "POST":
        raise GatewayError(ErrorKind.NOT_ALLOWED, "Method Not Allowed")
    record = call.response.record
    with call.reserve() as reservation, call.reserve() as buffered:
        received = await _receive(call, reservation)
        await check_request(call, received)
        model = decode_utf8_name(call.operation.model or "", "model")
        version = decode_utf8_name(call.operation.version or "", "version")
        message = write_infer_request(received.request, model, version)
        headers = with_body(call.request.headers, {})
        upstream_request = one_message_request(_RPC, message, headers)
        reservation.resize(received.buffered_size)
        record.server_form = "grpc"
        record.request_elements = received.request.head.element_count
        try:
            async with send_call(call, upstream_request) as upstream_call:
                results = _results(call, upstream_call, received, buffered)
                with name_server_in_errors(upstream_call.server):
                    if call.request.target.partition("?")[0].endswith("/generate_stream"):
                        await _send_events(call, results)
                    else:
                        await _send_document(call, results)
        except GatewayError as error:
            if not call.response.started:
                raise
            await _end_with(call, error)


# --------------------------------------------------------------------------------- request


async def _receive(call: Call, reservation: Reservation) -> ReceivedRequest:
    """Read the request as the model's metadata says."""
    limits = call.destination.limits
    model = await model_metadata(call)
    body = ClientBody(call.request, limits.max_request_bytes, call.deadline)
    cap = min(MAX_GENERATE_REQUEST, limits.max_buffered_body_bytes)
    chunks = feed_each(body.read_rest(), GenerateBodyCheck(limits.max_json_depth).feed)
    text = b"".join(await buffer_chunks(chunks, reservation, cap, generate_too_large))
    if not text:
        raise bad_request("the request has no body")
    reservation.resize((1 + _PARSED_FACTOR) * len(text))
    try:
        request = await _read(call, text, model)
    except ModelMismatchError:
        request = await _read(call, text, await current_metadata(call))
    return ReceivedRequest(request, request.chunks, uses_metadata=True)


async def _read(call: Call, text: bytes, model: ModelMetadata) -> InferRequest:
    read = read_generate_request(text, model)
    inputs = await _read_inputs(call, read.infer_json)
    head = InferRequestHead(inputs.head.inputs, parameters=read.parameters)
    return InferRequest(head, read.id, inputs.tensors)


async def _read_inputs(call: Call, text: bytes) -> InferRequest:
    """Read the JSON infer request that was made of the members."""
    destination = call.destination
    header_cap, depth_cap, tensor_cap = destination.limits.reader_caps
    header_cap += len(text)  # the client's own JSON has been limited
    request = read_buffered_json(text, header_cap, depth_cap + 1, tensor_cap)
    if request is not None:
        return request
    reader = InferRequestReader(header_cap, depth_cap + 1, tensor_cap=tensor_cap)
    with call.reserve() as reservation:
        for piece in split(text, CONVERT_CHUNK):
            reader.feed(piece)
            await destination.scheduler.next_slice()
            await run_steps(reader, reservation, destination.scheduler)
        reader.feed(b"", last=True)
        await run_steps(reader, reservation, destination.scheduler)
        return reader.finish()


# -------------------------------------------------------------------------------- response


async def _results(
    call: Call, upstream_call: UpstreamCall, received: ReceivedRequest, reservation: Reservation
) -> AsyncIterator[_Result]:
    """Yield what the client gets of each message as it arrives, and of an error at the end.

    Raises GatewayError (502) for a broken stream.
    """
    response, server, destination = upstream_call.response, upstream_call.server, call.destination
    check_grpc_head(response.status, response.headers, server)
    header_cap = destination.limits.max_inference_header_bytes
    cap = destination.limits.max_buffered_body_bytes
    ratio = destination.limits.max_decompression_ratio

    async def decompress(message: bytes) -> bytes:
        return await decompress_message(message, response, server, cap, ratio, reservation.grow)

    chunks = ResponseChunks(response, server, call.deadline)
    reader = MessageReader(cap, "limits.max_buffered_body_bytes", RESPONSE)
    async for message in read_messages(chunks, reader, reservation, decompress):
        reservation.grow(len(message))
        read = read_stream_response(message, header_cap)
        if read.error is not None:
            received.check_metadata(400, call.operation, destination)
            # Triton's HTTP endpoint responds with 400 to every error of a model.
            yield _Result(400, write_generate_error(read.error), read.has_begun)
        elif read.response is not None and not _is_only_end(read.response):
            yield _Result(200, await _write_json(call, read.response, reservation), True)
        reservation.resize(0)
    if response.grpc_status != GrpcStatus.OK:
        status, text = error_of_rpc(_RPC, response, server)
        yield _Result(status, text, in_event=False, ends_stream=True)


def _is_only_end(read: ReadResponse) -> bool:
    """Tell whether a response says nothing but that there are no more; clients can ask for it."""
    head = read.response.head
    return not head.outputs and head.parameters.get(FINAL_RESPONSE) is True


async def _write_json(call: Call, read: ReadResponse, reservation: Reservation) -> bytes:
    """Write a response as JSON, a time slice for each piece but the first ones."""
    destination = call.destination
    call.response.record.response_elements += read.response.head.element_count
    pieces: list[bytes] = []
    size = sliced = 0
    for piece in write_generate_response(*read, destination.policies, _HIDDEN_PARAMETERS):
        pieces.append(bytes(piece))  # a view would pin orjson's whole buffer
        size += len(piece)
        if size - sliced >= CONVERT_CHUNK:
            sliced = size
            reservation.grow(CONVERT_CHUNK)
            await destination.scheduler.next_slice()
    return b"".join(pieces)


async def _send_events(call: Call, results: AsyncIterator[_Result]) -> None:
    """Send each result as an event as soon as it is there."""
    response = call.response
    async for result in results:
        if not response.started:
            if not result.in_event:
                await _send_json(call, result)
                return
            await _start_events(call, result.status)
        if result.ends_stream:
            response.record.answered_by_server = True
            response.record.error = f"the server ended its stream with an error: {result.status}"
        await write(response, write_event((result.json,)), call.deadline)
    if not response.started:
        await _start_events(call, 200)
    await response.finish()


async def _start_events(call: Call, status: int) -> None:
    await call.response.start(status, "", CIMultiDict((("Content-Type", _EVENTS_TYPE),)))


async def _send_document(call: Call, results: AsyncIterator[_Result]) -> None:
    """Send the only result; raises GatewayError (400) if there is another number of them."""
    only: _Result | None = None
    async for result in results:
        if only is not None and not result.ends_stream:
            raise bad_request(_NOT_ONE_RESPONSE)
        only = result
    if only is None:
        raise bad_request(_NOT_ONE_RESPONSE)
    await _send_json(call, only)


async def _send_json(call: Call, result: _Result) -> None:
    call.deadline.expect_client()
    headers = CIMultiDict((("Content-Type", _JSON_TYPE),))
    await call.response.send(result.status, "", headers, result.json)


async def _end_with(call: Call, error: GatewayError) -> None:
    """End a stream with the error of the gateway as its last event."""
    record = call.response.record
    record.set_abort(error)
    FAILURE_LOG.write(error, record.request_id)
    text = write_event((write_generate_error(error.public_message),))
    await write(call.response, text, call.deadline)
    await call.response.finish()
