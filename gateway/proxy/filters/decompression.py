"""Decompresses request bodies as they are read."""

from __future__ import annotations

from dataclasses import replace

from multidict import CIMultiDictProxy

from gateway.codec.decompress import Decompressor
from gateway.http1.content_codings import content_coding, is_encoded
from gateway.protocol.operations import OperationKind
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import ClientBody
from gateway.proxy.destination import Destination
from gateway.proxy.filters.body_filter import BodyFilter, FilteredHead
from gateway.proxy.headers import end_to_end
from gateway.proxy.interfaces import Call, ClientRequest
from gateway.sizes import CONVERT_CHUNK

_CONTENT_ENCODING = frozenset(("content-encoding",))


async def decompress_request(call: Call, reservation: Reservation) -> Call:
    """Return the call with a request that has no content coding.

    ``reservation`` counts the buffered bytes while the request is used. Raises GatewayError: 415
    for an unknown coding, and what reading raises for the part that is read at once.
    """
    request = call.request
    if not is_encoded(request.headers):
        # Triton responds with 501 to an empty Content-Encoding.
        request.headers = CIMultiDictProxy(end_to_end(request.headers, _CONTENT_ENCODING))
        return call
    if request.content_length == 0:
        return call
    coding = content_coding(request.headers)
    assert coding is not None
    decompressed = DecompressedRequest(
        request, coding, call.destination, call.deadline, reservation
    )
    await decompressed.start()
    return replace(call, request=decompressed)


def _is_coded(head: FilteredHead) -> bool:
    """Tell whether a body may have a content coding; those of unknown operations pass as is."""
    return head.operation.kind is not OperationKind.OTHER and "Content-Encoding" in head.headers


DECOMPRESSION = BodyFilter(_CONTENT_ENCODING, _is_coded, change_call=decompress_request)
"""Decompresses requests, and drops an empty Content-Encoding."""


class DecompressedRequest(ClientRequest):
    """A request whose body is decompressed as it arrives.

    It has at most ``limits.max_request_bytes``, both as received and decompressed. Reading raises
    GatewayError: 413 over the caps, 400 for invalid data, 408 if the body arrives too slowly, 503
    if too much is buffered.
    """

    def __init__(
        self,
        request: ClientRequest,
        coding: str,
        destination: Destination,
        deadline: Deadline,
        reservation: Reservation,
    ) -> None:
        self.method = request.method
        self.target = request.target
        self.headers = request.headers
        self.content_length: int | None = None
        self._body = ClientBody(request, destination.limits.max_request_bytes, deadline)
        self._decompressor = Decompressor(coding, destination.limits.max_decompression_ratio)
        self._scheduler = destination.scheduler
        self._reservation = reservation
        self._first = b""
        self._ended = False

    async def start(self) -> None:
        """Decompress the first chunk; if that is the whole body, the request gets a length."""
        pieces = []
        size = 0
        while size <= CONVERT_CHUNK and (piece := await self._next_piece()):
            pieces.append(piece)
            size += len(piece)
            self._reservation.resize(self._decompressor.buffered_bytes + size)
        self._first = b"".join(pieces)
        headers = end_to_end(self.headers, _CONTENT_ENCODING | {"content-length"})
        if self._ended:
            self.content_length = size
            headers["Content-Length"] = str(size)
        self.headers = CIMultiDictProxy(headers)

    async def read(self) -> bytes:
        """Return the next piece of the decompressed body."""
        first, self._first = self._first, b""
        return first or await self._next_piece()

    async def read_within(self, deadline: Deadline) -> bytes:
        """Return the next piece; the deadline counts compressed bytes, in the inner body."""
        return await self.read()

    async def _next_piece(self) -> bytes:
        while not self._ended:
            piece = self._decompressor.step()
            if piece is None:
                await self._receive()
                continue
            await self._scheduler.next_slice()
            if piece:
                return piece
        return b""

    async def _receive(self) -> None:
        if self._decompressor.last:
            self._ended = True
            return
        data = await self._body.read()
        self._decompressor.feed(data, last=not data)
        self._reservation.resize(self._decompressor.buffered_bytes)
