"""Answers that are compressed on the way to clients which accept that."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.filters.content_codings import accepted_coding, encoded
from gateway.proxy.headers import HEADER_LENGTH
from gateway.proxy.interfaces import ClientRequest, ClientResponse, HeaderLines
from gateway.proxy.router import RouteMatch
from gateway.sizes import CACHED_HEADS

if TYPE_CHECKING:
    from zlib import _Compress

LEAST = 1024
"""Bytes of a body that is compressed, at least: a smaller one gains nothing."""

_SLICE = 16 * 1024
"""Bytes that are compressed before others have their turn; takes as long as a chunk elsewhere."""

_LEVEL = 1
_FORMATS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""How zlib is told what to put around the compressed data; RFC 9110, section 8.4.1."""

_AS_THEY_ARE = frozenset((204, 205, 206, 304))
"""Statuses of answers without a body, or with a part of one."""


def compressed(answer: ClientResponse, request: ClientRequest, found: RouteMatch) -> ClientResponse:
    """Give the answer to write to, where the request's route compresses answers: see below."""
    if not found.compress:
        return answer
    coding = None
    if request.method != "HEAD":
        coding = accepted_coding(request.headers, found.compress)
    return CompressedAnswer(answer, coding, found.choice.next.scheduler)


class CompressedAnswer(ClientResponse):
    """Compresses what is written; without a ``coding``, says that another client might see that.

    What is too small, encoded already or not to be transformed stays as it is, and so do
    server-sent events, which are not to be held up. What comes without a length is not either: each
    write goes out as a whole.
    """

    def __init__(
        self, answer: ClientResponse, coding: str | None, turns: ConversionScheduler
    ) -> None:
        self.request_id = answer.request_id
        self._answer = answer
        self._coding = coding
        self._turns = turns
        self._compressor: _Compress | None = None
        self._sized = False

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Begin the answer."""
        length = headers.get("Content-Length", "")
        self._begin(status, headers, int(length) if length.isdecimal() else None)
        self.started = True
        await self._answer.start(status, reason, headers)

    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body; others have their turn in between."""
        if self._compressor is None:
            await self._answer.write(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), _SLICE):
            if start:
                await self._turns.next()
            await self._pass_on(self._compressor.compress(view[start : start + _SLICE]))
        if not self._sized:
            await self._pass_on(self._compressor.flush(zlib.Z_SYNC_FLUSH))

    async def finish(self) -> None:
        """End the answer."""
        if self._compressor is not None:
            await self._pass_on(self._compressor.flush())
        await self._answer.finish()

    async def send(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Give a whole answer."""
        self._begin(status, headers, len(body))
        if self._compressor is not None:
            body = await self._whole(self._compressor, body)
        self.started = True
        await self._answer.send(status, reason, headers, body)

    def abort(self) -> None:
        """Drop the connection."""
        self._answer.abort()

    def _begin(self, status: int, headers: CIMultiDict[str], size: int | None) -> None:
        """Say in the headers of an answer how its body will be; ``size`` in bytes, if known."""
        self._compressor = None
        self._sized = size is not None
        _vary(headers)
        if self._coding is None or not _gains(status, headers, size):
            return
        headers.popall("Content-Length", None)
        headers["Content-Encoding"] = self._coding
        if etag := headers.get("ETag"):
            # RFC 9110, section 8.8.1: the same bytes are no longer promised.
            headers["ETag"] = etag if etag.startswith("W/") else f"W/{etag}"
        # Numbers in binary form repeat themselves too little for it to be worth a search: 107 MB/s
        # instead of 22 for random FP32, and no larger. 80 MB/s for their JSON.
        how = zlib.Z_RLE if HEADER_LENGTH in headers else zlib.Z_DEFAULT_STRATEGY
        form = _FORMATS[self._coding]
        self._compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, form, zlib.DEF_MEM_LEVEL, how)

    async def _whole(self, compressor: _Compress, body: bytes) -> bytes:
        parts = []
        for start in range(0, len(body), _SLICE):
            if start:
                await self._turns.next()
            parts.append(compressor.compress(body[start : start + _SLICE]))
        return b"".join((*parts, compressor.flush()))

    async def _pass_on(self, data: bytes) -> None:
        if data:
            await self._answer.write(data)


@lru_cache(maxsize=CACHED_HEADS)
def varying(lines: HeaderLines) -> HeaderLines:
    """Give an answer's headers with a word on what it depends on."""
    headers = CIMultiDict(lines)
    _vary(headers)
    return tuple(headers.items())


def _vary(headers: CIMultiDict[str]) -> None:
    """Say that other clients may be answered in another form; RFC 9110, section 12.5.5."""
    said = [value for value in headers.getall("Vary", ()) if value]
    names = {name.strip().lower() for value in said for name in value.split(",")}
    if names.isdisjoint(("*", "accept-encoding")):
        headers["Vary"] = ", ".join([*said, "Accept-Encoding"])


def _gains(status: int, headers: CIMultiDict[str], size: int | None) -> bool:
    """Tell whether an answer's body may be compressed, and is worth it."""
    if status in _AS_THEY_ARE or "Content-Range" in headers or encoded(headers):
        return False
    if size is not None and size < LEAST:
        return False
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    said = ",".join(headers.getall("Cache-Control", ())).lower().split(",")
    # RFC 9110, section 7.7.
    return media_type != "text/event-stream" and "no-transform" not in map(str.strip, said)
