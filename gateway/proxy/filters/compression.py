"""Compresses responses for clients that accept it, and decompresses requests."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.decompress import Decompressor
from gateway.http1.content_codings import accepted_coding, content_coding, is_encoded
from gateway.protocol.operations import OperationKind
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import ClientBody
from gateway.proxy.destination import Destination
from gateway.proxy.filters.interfaces import BodyFilter, FilteredHead, WrappedResponse
from gateway.proxy.headers import end_to_end
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse, HeaderLines
from gateway.sizes import CONVERT_CHUNK
from gateway.system.time_slices import split

if TYPE_CHECKING:
    from zlib import _Compress

# -------------------------------------------------------------------------------- responses

MIN_SIZE = 1024
"""Bytes of the smallest body that is compressed; smaller ones gain nothing."""

_SLICE = 16 * 1024
"""Bytes that are compressed in one time slice; as much work as a chunk elsewhere."""

_LEVEL = 1
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's parameter for the format of each coding; RFC 9110, section 8.4.1."""

_UNCOMPRESSED_STATUSES = frozenset((204, 205, 206, 304))
"""Statuses of responses without a body, or with a part of one."""


class CompressedResponse(WrappedResponse):
    """Compresses a response with a ``coding``.

    Bodies that are small, encoded already or must not be transformed stay as they are. So do
    server-sent events, which must not be delayed. A response without a length is not delayed
    either: each write is flushed.
    """

    def __init__(
        self, response: ClientResponse, coding: str, scheduler: ConversionScheduler
    ) -> None:
        super().__init__(response)
        self._coding = coding
        self._scheduler = scheduler
        self._compressor: _Compress | None = None
        self._has_length = False

    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body."""
        if self._compressor is None:
            await super().write(data)
            return
        async for piece in self._compressed(data):
            await self._write(piece)
        if not self._has_length:
            await self._write(self._compressor.flush(zlib.Z_SYNC_FLUSH))

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """End the response."""
        if self._compressor is not None:
            await self._write(self._compressor.flush())
        await super().finish(trailers)

    async def change_body(self, body: bytes) -> bytes:
        """Compress a whole body."""
        if self._compressor is None:
            return body
        parts = [piece async for piece in self._compressed(body)]
        return b"".join((*parts, self._compressor.flush()))

    async def _compressed(self, data: bytes | memoryview) -> AsyncIterator[bytes]:
        """Yield what data compresses to so far, in one time slice for each slice of it."""
        assert self._compressor is not None
        for number, piece in enumerate(split(memoryview(data), _SLICE)):
            if number:
                await self._scheduler.next_slice()
            yield self._compressor.compress(piece)

    def change_head(self, status: int, headers: CIMultiDict[str], size: int | None) -> None:
        """Change the headers if the body is to be compressed."""
        self._compressor = None
        self._has_length = size is not None
        if not _is_worthwhile(status, headers, size):
            return
        headers.popall("Content-Length", None)
        headers["Content-Encoding"] = self._coding
        if etag := headers.get("ETag"):
            # RFC 9110, section 8.8.1: a strong ETag would promise the same bytes.
            headers["ETag"] = etag if etag.startswith("W/") else f"W/{etag}"
        # Binary tensors repeat too little for a search to pay: 107 MB/s instead of 22 for random
        # FP32, and no larger. Their JSON compresses at 80 MB/s.
        strategy = zlib.Z_RLE if HEADER_LENGTH in headers else zlib.Z_DEFAULT_STRATEGY
        self._compressor = zlib.compressobj(
            _LEVEL, zlib.DEFLATED, _WINDOW_BITS[self._coding], zlib.DEF_MEM_LEVEL, strategy
        )

    async def _write(self, data: bytes) -> None:
        if data:
            await super().write(data)


def _is_worthwhile(status: int, headers: CIMultiDict[str], size: int | None) -> bool:
    """Tell whether a body may be compressed, and gains by it."""
    if status in _UNCOMPRESSED_STATUSES or "Content-Range" in headers or is_encoded(headers):
        return False
    if size is not None and size < MIN_SIZE:
        return False
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    directives = ",".join(headers.getall("Cache-Control", ())).lower().split(",")
    # RFC 9110, section 7.7.
    return media_type != "text/event-stream" and "no-transform" not in map(str.strip, directives)


def _accepts_coding(head: FilteredHead) -> bool:
    if not head.codings or head.method == "HEAD":
        return False
    return accepted_coding(head.headers, head.codings) is not None


def _compress(
    response: ClientResponse, head: FilteredHead, scheduler: ConversionScheduler
) -> ClientResponse:
    coding = accepted_coding(head.headers, head.codings)
    assert coding is not None
    return CompressedResponse(response, coding, scheduler)


COMPRESSION = BodyFilter(frozenset(("accept-encoding",)), _accepts_coding, wrap_response=_compress)
"""Compresses responses for clients that accept a coding of their route."""


# --------------------------------------------------------------------------------- requests

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
