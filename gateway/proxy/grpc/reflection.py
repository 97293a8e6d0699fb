"""Server reflection, which the gateway serves itself: doc/server-reflection.md of grpc."""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import Chunks
from gateway.proxy.grpc.message import finish, messages_of, start_response, write_message
from gateway.proxy.interfaces import Call, ClientRequest
from gateway.proxy.readiness import CACHE_SECONDS, Readiness

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
