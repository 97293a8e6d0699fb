"""Compresses responses for clients that accept it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from gateway.http1.content_codings import accepted_coding, is_encoded
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.body_io import split
from gateway.proxy.filters.body_filter import BodyFilter, FilteredHead, WrappedResponse
from gateway.proxy.interfaces import ClientResponse, HeaderLines

if TYPE_CHECKING:
    from zlib import _Compress

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
        """Write a part of the body, in one time slice for each slice of it."""
        if self._compressor is None:
            await super().write(data)
            return
        for number, piece in enumerate(split(memoryview(data), _SLICE)):
            if number:
                await self._scheduler.next_slice()
            await self._write(self._compressor.compress(piece))
        if not self._has_length:
            await self._write(self._compressor.flush(zlib.Z_SYNC_FLUSH))

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """End the response."""
        if self._compressor is not None:
            await self._write(self._compressor.flush())
        await super().finish(trailers)

    async def change_body(self, body: bytes) -> bytes:
        """Compress a whole body, in one time slice for each slice of it."""
        if self._compressor is None:
            return body
        parts = []
        for number, piece in enumerate(split(body, _SLICE)):
            if number:
                await self._scheduler.next_slice()
            parts.append(self._compressor.compress(piece))
        return b"".join((*parts, self._compressor.flush()))

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
