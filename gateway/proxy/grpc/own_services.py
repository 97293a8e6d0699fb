"""Services of the gateway itself: health and server reflection.

They are doc/health-checking.md and doc/server-reflection.md of grpc.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.methods import HEALTH_SERVICE, INFERENCE_SERVICE, GrpcMethod
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.grpc.wire import LENGTH, WireError, WireReader
from gateway.protocol.json_errors import quote_value
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import Chunks
from gateway.proxy.errors import send_status
from gateway.proxy.grpc.message import (
    finish,
    messages_of,
    receive_message,
    start_response,
    write_message,
)
from gateway.proxy.interfaces import Call, ClientRequest
from gateway.proxy.readiness import CACHE_SECONDS, Readiness

_SERVICE_TAG: Final = 1 << 3 | LENGTH
_SERVICES: Final = ("", INFERENCE_SERVICE, HEALTH_SERVICE)

# HealthCheckResponse with its status.
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
_SERVICE_UNKNOWN: Final = b"\x08\x03"


async def serve_health(call: Call, rpc: GrpcMethod, reservation: Reservation) -> None:
    """Serve Check, or Watch, with the readiness of the gateway.

    Raises GatewayError: 400 for a broken request, 404 for a check of an unknown service.
    """
    service = _read_service(await receive_message(call, reservation))
    if rpc.response_streams:
        with call.deadline.suspended():  # it may run for days
            await _watch(call, service)
        return
    if service not in _SERVICES:
        raise GatewayError(ErrorKind.NOT_FOUND, f"unknown service {quote_value(service)}")
    status = await _status(call.readiness)
    await start_response(call.response)
    await write_message(call.response, (status,))
    await finish(call.response)


async def _watch(call: Call, service: str) -> None:
    """Send the status, and again whenever it changes, until the client or the gateway leaves."""
    response, readiness = call.response, call.readiness
    await start_response(response)
    last = b""
    while True:
        status = await _status(readiness) if service in _SERVICES else _SERVICE_UNKNOWN
        if status != last:
            await write_message(response, (status,))
            last = status
        if reason := readiness.end_of_streams:
            await send_status(response, GrpcStatus.UNAVAILABLE, reason)
            return
        await asyncio.sleep(CACHE_SECONDS)


async def _status(readiness: Readiness) -> bytes:
    return _NOT_SERVING if await readiness.check() else _SERVING


def _read_service(message: bytes | memoryview) -> str:
    """Read the service of a HealthCheckRequest."""
    service = ""
    try:
        reader = WireReader(message, 0, len(message))
        while tag := reader.next_tag():
            if tag == _SERVICE_TAG:
                service = reader.read_text()
            else:
                reader.skip(tag)
    except WireError as error:
        raise REQUEST.invalid_protobuf(error) from None
    return service


# ------------------------------------------------------------------------------ reflection

MAX_REFLECTION_REQUEST: Final = 16 * 1024
"""Bytes of a request: it holds a name."""
_CAP_NAME: Final = "the most of a reflection request"


async def serve_reflection(call: Call, reservation: Reservation) -> None:
    """Answer each request of a stream, until the client or the gateway ends it.

    Raises GatewayError: 400 for a broken request, 413 for a larger one than any name needs, 503 if
    the gateway ends it.
    """
    # At first use: protobuf takes 30 ms and 7 MB.
    from gateway.codec.grpc.reflection import answer_reflection

    pieces = _pieces(call.request, call.readiness)
    requests = messages_of(call, pieces, reservation, MAX_REFLECTION_REQUEST, _CAP_NAME)
    with call.deadline.suspended():  # a client may keep it for its next question
        await start_response(call.response)
        async for request in requests:
            await write_message(call.response, (answer_reflection(bytes(request)),))
        await finish(call.response)


async def _pieces(request: ClientRequest, readiness: Readiness) -> Chunks:
    """Yield the body of a stream; raises GatewayError (503) once the gateway ends it."""
    while True:
        reading = asyncio.ensure_future(request.read())
        try:
            while not reading.done():
                if reason := readiness.end_of_streams:
                    raise GatewayError(ErrorKind.NOT_READY, reason)
                await asyncio.wait((reading,), timeout=CACHE_SECONDS)
        finally:
            reading.cancel()
        if not (piece := reading.result()):
            return
        yield piece
