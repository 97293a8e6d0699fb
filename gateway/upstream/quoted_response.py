"""Reads what a server says in the body of an error, so that the log can quote the server."""

from __future__ import annotations

from multidict import MultiMapping

from gateway.errors import MAX_ERROR_START, describe_error, read_server_error
from gateway.upstream.content_decoding import decode_start
from gateway.upstream.transport import FIRST_ERROR_STATUS, UpstreamResponse, WrappedResponse


def quoted_response(response: UpstreamResponse) -> UpstreamResponse:
    """Return a response whose ``error`` has the message in its body, once that was read."""
    return response if response.status < FIRST_ERROR_STATUS else _QuotedResponse(response)


def quote_error(status: int, headers: MultiMapping[str], body: bytes | memoryview) -> str:
    """Return the status and the message of a server's error with this body, or a start of it."""
    start = decode_start(headers, bytes(body[:MAX_ERROR_START]))
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
