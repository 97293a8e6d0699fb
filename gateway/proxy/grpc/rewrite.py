"""Rewrites the model of a gRPC call's messages: ``rewrite`` of a route."""

from __future__ import annotations

from typing import Final

from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.framing import MessagePiece, MessageReader, frame
from gateway.protocol.grpc.methods import GrpcMethod
from gateway.protocol.grpc.model_scanner import ScannedModel
from gateway.protocol.grpc.wire import LENGTH, MAX_MESSAGE, bytes_field
from gateway.proxy.admission.conversion_scheduler import TimeSliceWaiter
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.destination import Limits
from gateway.proxy.grpc.compression import MessageDecompressor
from gateway.sizes import CONVERT_CHUNK

_CAP_NAME = "limits.max_buffered_body_bytes"


class ModelRewriter:
    """Gives each message of a request another model, and another version unless that is empty.

    Of a field that occurs twice the last counts, so the new names are appended to a message while
    it streams: https://protobuf.dev/programming-guides/encoding/#last-one-wins
    The size precedes a message: a compressed one is buffered within the limits, and is sent
    uncompressed. ``next_slice`` waits for a time slice.
    """

    def __init__(
        self,
        method: GrpcMethod,
        model: str,
        version: str,
        headers: CIMultiDictProxy[str],
        limits: Limits,
        reservation: Reservation,
        next_slice: TimeSliceWaiter,
    ) -> None:
        self._renamed: Final = ScannedModel(model, version)
        self._model: Final = model.encode()
        number = method.version_field
        self._version: Final = (
            bytes_field(number << 3 | LENGTH, version.encode()) if number and version else b""
        )
        # The names have the same size in each field, as its number is below 16.
        self._added: Final = len(self._names(1))
        self._headers: Final = headers
        self._cap: Final = limits.max_buffered_body_bytes
        self._max_ratio: Final = limits.max_decompression_ratio
        self._reservation: Final = reservation
        self._next_slice: Final = next_slice
        # Whoever reads the request has checked the sizes.
        self._messages: Final = MessageReader(MAX_MESSAGE, "the most of protobuf", REQUEST)
        self._decompressor: MessageDecompressor | None = None
        self._text = bytearray()
        self._reserved = 0

    def rewrite(self, model: ScannedModel) -> ScannedModel:
        """Return the model that the server gets for a client's."""
        return ScannedModel(self._renamed.name, self._renamed.version or model.version)

    async def feed(self, piece: bytes | memoryview, name_field: int) -> list[bytes | memoryview]:
        """Return what to send for the next piece of the body, nothing while that is buffered.

        ``name_field`` is the number of the field that has the model's name in the message that
        ends in this piece. Other calls have their turn between the chunks of a compressed message.
        Raises GatewayError: 400 for a broken compressed message, 413, 503.
        """
        if self._decompressor is None:
            self._reserve(0)  # that message was sent
        chunks: list[bytes | memoryview] = []
        for part in self._messages.feed(piece):
            if part.is_compressed:
                await self._decompress(part)
                if part.ends:
                    chunks += (self._prefix(len(self._text)), memoryview(self._text))
                    self._text = bytearray()
            else:
                if part.begins:
                    chunks.append(self._prefix(part.size))
                chunks.append(part.data)
            if part.ends:
                chunks.append(self._names(name_field))
        if sum(map(len, chunks)) <= CONVERT_CHUNK:
            return [b"".join(chunks)] if chunks else []
        return chunks

    async def _decompress(self, part: MessagePiece) -> None:
        if part.begins:
            self._decompressor = MessageDecompressor(
                self._headers, self._cap, _CAP_NAME, self._max_ratio
            )
        decompressor, text = self._decompressor, self._text
        assert decompressor is not None
        for chunk in decompressor.feed(part.data, last=part.ends):
            self._reserve(len(text) + len(chunk) + decompressor.buffered_bytes)
            text += chunk
            await self._next_slice()
        self._reserve(len(text) + decompressor.buffered_bytes)
        if part.ends:
            self._decompressor = None

    def _reserve(self, size: int) -> None:
        """Reserve so many bytes for the message; raises GatewayError (503)."""
        self._reservation.grow(size - self._reserved)
        self._reserved = size

    def _prefix(self, size: int) -> bytes:
        size += self._added
        if size > MAX_MESSAGE:
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                f"the request has a gRPC message of {size} bytes, with the model of its route",
            )
        return frame(size)

    def _names(self, name_field: int) -> bytes:
        return bytes_field(name_field << 3 | LENGTH, self._model) + self._version
