"""Reads the message of a unary call that does not pass through."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.grpc.framing import PREFIX_SIZE
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import ClientBody, buffer_chunks
from gateway.proxy.grpc.compression import MessageDecompressor
from gateway.proxy.interfaces import Call


async def read_message(call: Call, reservation: Reservation) -> bytes | memoryview:
    """Read the one message of a unary call, decompressed.

    Raises GatewayError: 400 for a broken one, 413 over a cap, 503 if too much is buffered.
    """
    body = ClientBody(call.request, call.destination.limits.max_request_bytes, call.deadline)
    cap = call.destination.limits.max_buffered_body_bytes
    data = b"".join(await buffer_chunks(body.read_rest(), reservation, cap, _too_large))
    if len(data) < PREFIX_SIZE:
        raise bad_request("the request has no gRPC message")
    message = memoryview(data)[PREFIX_SIZE:]
    if not data[0]:
        return message
    decompressor = MessageDecompressor(call.request.headers, cap, "limits.max_buffered_body_bytes")
    text = bytearray()
    for chunk in decompressor.feed(bytes(message)):
        reservation.grow(len(chunk))
        text += chunk
    decompressor.end()
    return memoryview(text)


def _too_large(cap: int) -> GatewayError:
    return GatewayError(
        ErrorKind.TOO_LARGE,
        f"a gRPC message that the gateway reads is buffered, and is larger than {cap} bytes "
        "(limits.max_buffered_body_bytes)",
    )
