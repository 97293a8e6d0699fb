"""Server reflection, which the gateway serves itself: doc/server-reflection.md of grpc."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.framing import MessageReader
from gateway.protocol.grpc.status import GrpcStatus
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.errors import send_status
from gateway.proxy.grpc.compression import MessageDecompressor
from gateway.proxy.grpc.message import finish, start_response, write_message
from gateway.proxy.interfaces import Call, ClientRequest
from gateway.proxy.readiness import CACHE_SECONDS, Readiness

MAX_REFLECTION_REQUEST: Final = 16 * 1024
"""Bytes of a request: it holds a name."""
_CAP_NAME: Final = "the most of a reflection request"


async def serve_reflection(call: Call, reservation: Reservation) -> None:
    """Answer each request of a stream, until the client or the gateway ends it.

    Raises GatewayError: 400 for a broken request, 413 for a larger one than any name needs.
    """
    # At first use: protobuf takes 30 ms and 7 MB.
    from gateway.codec.grpc.reflection import answer_reflection

    requests = _RequestReader(call.request, reservation)
    response, readiness = call.response, call.readiness
    with call.deadline.suspended():  # a client may keep it for its next question
        await start_response(response)
        while (piece := await _read(call.request, readiness)) is not None:
            if not piece:
                requests.end()
                await finish(response)
                return
            for each in requests.feed(piece):
                await write_message(response, (answer_reflection(each),))
        await send_status(response, GrpcStatus.UNAVAILABLE, readiness.end_of_streams)


async def _read(request: ClientRequest, readiness: Readiness) -> bytes | memoryview | None:
    """Read the next piece; None if the stream has to end before there is one."""
    reading = asyncio.ensure_future(request.read())
    try:
        while not readiness.end_of_streams:
            done, _ = await asyncio.wait((reading,), timeout=CACHE_SECONDS)
            if done:
                return reading.result()
        return None
    finally:
        reading.cancel()


class _RequestReader:
    """Collects the requests of a stream."""

    def __init__(self, request: ClientRequest, reservation: Reservation) -> None:
        self._headers = request.headers
        self._reservation = reservation
        self._messages = MessageReader(MAX_REFLECTION_REQUEST, _CAP_NAME, REQUEST)
        self._decompressor: MessageDecompressor | None = None
        self._text = bytearray()

    def feed(self, piece: bytes | memoryview) -> Iterator[bytes]:
        """Yield the requests that end in a piece of the body."""
        for part in self._messages.feed(piece):
            if part.begins and part.is_compressed:
                cap = MAX_REFLECTION_REQUEST
                # So small a request may compress as well as it can.
                self._decompressor = MessageDecompressor(self._headers, cap, _CAP_NAME, cap)
            if self._decompressor is None:
                self._text += part.data
            else:
                for chunk in self._decompressor.feed(part.data, last=part.ends):
                    self._text += chunk
            self._reservation.resize(len(self._text))
            if part.ends:
                self._decompressor = None
                yield bytes(self._text)
                self._text.clear()

    def end(self) -> None:
        """Check that the body ends after a request; raises GatewayError (400)."""
        self._messages.end()
