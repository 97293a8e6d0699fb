"""Reads the messages of calls that do not pass through, and writes those of their responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from multidict import CIMultiDict

from gateway.errors import bad_request
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.framing import PREFIX_SIZE, MessageReader, frame
from gateway.protocol.grpc.headers import GRPC_TYPE
from gateway.protocol.grpc.status import GrpcStatus
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import (
    Chunks,
    ClientBody,
    buffer_chunks,
    read_messages,
    too_large_to_buffer,
)
from gateway.proxy.errors import record_status, status_lines
from gateway.proxy.grpc.request import MessageDecompressor
from gateway.proxy.interfaces import Call, ClientResponse

_CAP_NAME: Final = "limits.max_buffered_body_bytes"
_too_large: Final = partial(too_large_to_buffer, "a gRPC message that the gateway reads")


async def receive_message(call: Call, reservation: Reservation) -> bytes | memoryview:
    """Read the one message of a unary call, decompressed.

    Raises GatewayError: 400 for a broken one, 413 over a cap, 503 if too much is buffered.
    """
    body = ClientBody(call.request, call.destination.limits.max_request_bytes, call.deadline)
    cap = call.destination.limits.max_buffered_body_bytes
    data = b"".join(await buffer_chunks(body.read_rest(), reservation, cap, _too_large))
    if len(data) < PREFIX_SIZE:
        raise bad_request("the request has no gRPC message")
    message = memoryview(data)[PREFIX_SIZE:]
    return await _decompress(call, message, cap, _CAP_NAME, reservation) if data[0] else message


def receive_messages(call: Call, reservation: Reservation) -> Chunks:
    """Yield the messages of a stream as they arrive, decompressed; only the last one is reserved.

    A client may pause between them. Raises GatewayError as ``receive_message``.
    """
    cap = call.destination.limits.max_buffered_body_bytes
    return messages_of(call, _pieces(call), reservation, cap, _CAP_NAME)


def messages_of(
    call: Call, pieces: Chunks, reservation: Reservation, cap: int, cap_name: str
) -> Chunks:
    """Yield the messages in ``pieces`` of a call's body, each of at most ``cap`` bytes."""
    reader = MessageReader(cap, cap_name, REQUEST)
    decompress = partial(_decompress, call, cap=cap, cap_name=cap_name, reservation=reservation)
    return read_messages(pieces, reader, reservation, decompress)


async def _pieces(call: Call) -> Chunks:
    call.deadline.expect_client()
    while piece := await call.request.read():
        yield piece
        call.deadline.expect_client()


async def _decompress(
    call: Call, message: bytes | memoryview, cap: int, cap_name: str, reservation: Reservation
) -> memoryview:
    ratio = call.destination.limits.max_decompression_ratio
    decompressor = MessageDecompressor(call.request.headers, cap, cap_name, ratio)
    text = bytearray()
    for chunk in decompressor.feed(message, last=True):
        reservation.grow(len(chunk))
        text += chunk
        await call.destination.scheduler.next_slice()
    return memoryview(text)


async def start_response(response: ClientResponse) -> None:
    """Start a response of messages."""
    await response.start(200, "", CIMultiDict((("Content-Type", GRPC_TYPE),)))


async def write_message(response: ClientResponse, chunks: Sequence[bytes | memoryview]) -> None:
    """Write a message, which is not compressed."""
    await response.write(frame(sum(map(len, chunks))))
    for chunk in chunks:
        await response.write(chunk)


async def finish(response: ClientResponse) -> None:
    """End a response with the status OK."""
    await response.finish(status_lines(GrpcStatus.OK, ""))
    record_status(response.record, GrpcStatus.OK)
