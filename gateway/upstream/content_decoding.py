"""Decodes responses of servers that compress them, although the gateway asks for none of that.

Also quotes what a server says in the body of an error, for the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

from gateway.codec.decompress import Decompressor
from gateway.errors import (
    MAX_ERROR_START,
    ErrorKind,
    GatewayError,
    ServerName,
    bad_response,
    describe_error,
    read_server_error,
)
from gateway.http1.content_codings import CODINGS, content_coding, is_encoded
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc.headers import ENCODING
from gateway.protocol.json_errors import quote_value
from gateway.system.time_slices import time_slice_queue
from gateway.upstream.transport import FIRST_ERROR_STATUS, UpstreamResponse, WrappedResponse

MAX_RATIO: Final = 100
"""``limits.max_decompression_ratio``, unless another is set."""


def decode_response(
    response: UpstreamResponse, server: ServerName, max_ratio: int = MAX_RATIO
) -> UpstreamResponse:
    """Return a response without its content coding; itself if it has none.

    Beyond the first MiB its body may grow to ``max_ratio`` times its size. Raises GatewayError
    (502) that names the server and its coding, if the gateway does not read that; reading raises
    it for an invalid body.
    """
    if not is_encoded(response.headers):
        return response
    try:
        coding = content_coding(response.headers)
    except GatewayError:
        name = ", ".join(response.headers.getall("Content-Encoding"))
        raise _unknown_coding_error(server, "response", "Content-Encoding", name) from None
    assert coding is not None
    return _DecodedResponse(response, coding, server, max_ratio)


def _unknown_coding_error(server: ServerName, what: str, header: str, name: str) -> GatewayError:
    """Make the error of a response, or a message of one, in a coding that is not read."""
    return bad_response(
        f"{server.url} sent a compressed {what} with {header} {quote_value(name)}; "
        f"the gateway reads {' and '.join(CODINGS)}",
        server,
    )


class _DecodedResponse(WrappedResponse):
    def __init__(
        self, response: UpstreamResponse, coding: str, server: ServerName, max_ratio: int
    ) -> None:
        super().__init__(response)
        headers = CIMultiDict(response.headers)
        headers.popall("Content-Encoding", None)
        headers.popall("Content-Length", None)
        self.headers = CIMultiDictProxy(headers)
        self._server = server
        self._decompressor = Decompressor(
            coding, max_ratio, RESPONSE, f"the response of {server.url}"
        )
        self._is_empty = True

    @property
    def content_length(self) -> int | None:
        return None

    async def read(self) -> bytes | memoryview:
        while True:
            piece = self._step()
            if piece:
                return piece
            if piece is not None:
                await time_slice_queue().next_slice()
            elif self._decompressor.last:
                return b""
            else:
                data = await self._response.read()
                if not data and self._is_empty:
                    return b""
                self._is_empty = False
                self._decompressor.feed(data, last=not data)

    def _step(self) -> bytes | None:
        try:
            return self._decompressor.step()
        except GatewayError as error:
            raise bad_response(error.message, self._server) from None


async def decompress_message(
    message: bytes | memoryview,
    response: UpstreamResponse,
    server: ServerName,
    cap: int,
    max_ratio: int = MAX_RATIO,
    reserve: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Decompress a message of a response, which may become ``cap`` bytes.

    Beyond the first MiB it may grow to ``max_ratio`` times its size. ``reserve`` gets the size of
    each piece before it is kept. Other calls have their turn between the pieces. Raises
    GatewayError (502) that names the server, and what ``reserve`` raises.
    """
    encoding = response.headers.get(ENCODING, "identity")
    if encoding not in CODINGS:
        raise _unknown_coding_error(server, "message", ENCODING, encoding)
    decompressor = Decompressor(encoding, max_ratio, RESPONSE, f"the response of {server.url}")
    reserve(len(message))  # the decompressor has a copy
    decompressor.feed(message, last=True)
    text = bytearray()
    try:
        while (piece := decompressor.step()) is not None:
            reserve(len(piece))
            text += piece
            if len(text) > cap:
                break
            await time_slice_queue().next_slice()
    except GatewayError as error:
        if error.kind is not ErrorKind.BAD_RESPONSE:
            raise
        raise bad_response(error.message, server) from None
    if len(text) > cap:
        raise bad_response(
            f"the response of {server.url} becomes larger than {cap} bytes when it is decompressed",
            server,
        )
    return bytes(text)


def quoted_response(response: UpstreamResponse) -> UpstreamResponse:
    """Return a response whose ``error`` has the message in its body, once that was read."""
    return response if response.status < FIRST_ERROR_STATUS else _QuotedResponse(response)


def quote_error(status: int, headers: MultiMapping[str], body: bytes | memoryview) -> str:
    """Return the status and the message of a server's error with this body, or a start of it."""
    start = bytes(body[:MAX_ERROR_START])
    if is_encoded(headers):
        try:
            decompressor = Decompressor(content_coding(headers) or "", MAX_RATIO, RESPONSE)
            decompressor.feed(start, last=True)
            start = decompressor.step() or b""
        except GatewayError:
            start = b""
    return describe_error(status, read_server_error(start))


class _QuotedResponse(WrappedResponse):
    def __init__(self, response: UpstreamResponse) -> None:
        super().__init__(response)
        self._start = bytearray()

    @property
    def error(self) -> str:
        if self.grpc_status is not None:
            return self._response.error
        return quote_error(self.status, self.headers, bytes(self._start))

    async def read(self) -> bytes | memoryview:
        piece = await self._response.read()
        if len(self._start) < MAX_ERROR_START:
            self._start += piece[: MAX_ERROR_START - len(self._start)]
        return piece
