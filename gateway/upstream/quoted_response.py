"""Reads what a server says in the body of an error, so that the log can quote the server."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson
from multidict import MultiMapping

from gateway.errors import describe_error
from gateway.upstream.content_decoding import decode_start
from gateway.upstream.transport import FIRST_ERROR_STATUS, UpstreamResponse, WrappedResponse

MAX_ERROR_START: Final = 4096
"""Bytes of an error's body that are read for its message."""

# V2 and V1 say "error", Python's frameworks "detail", OpenAI's API "message" within "error"; the
# entries of a list in FastAPI's "detail" say "msg".
_KEYS: Final = ("error", "detail", "message", "msg")
_MEMBER = re.compile(rb'"(?:error|detail|message|msg)"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)
_TAG = re.compile(rb"<[^>]*>")


def quoted_response(response: UpstreamResponse) -> UpstreamResponse:
    """Return a response whose ``error`` has the message in its body, once that was read."""
    return response if response.status < FIRST_ERROR_STATUS else _QuotedResponse(response)


def quote_error(status: int, headers: MultiMapping[str], body: bytes | memoryview) -> str:
    """Return the status and the message of a server's error with this body, or a start of it."""
    start = decode_start(headers, bytes(body[:MAX_ERROR_START]))
    return describe_error(status, read_server_error(start))


def read_server_error(body: bytes) -> str:
    """Find the message in the start of the body of a server's error; empty if it is no text.

    It is a member of a JSON object as servers write it, or else the text itself. ``describe_error``
    makes it fit to be shown.
    """
    text = body[:MAX_ERROR_START].strip()
    if b"\0" in text:
        return ""
    if text.startswith(b"<"):
        text = _TAG.sub(b" ", text)
    message = _find_message(text) if text.startswith(b"{") else None
    return text.decode(errors="replace") if message is None else message


def _find_message(text: bytes) -> str | None:
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:  # perhaps only because it is cut
        found = _MEMBER.search(text)
        return None if found is None else _unescape(found[1].decode(errors="replace"))
    while not isinstance(value, str):
        if isinstance(value, list):
            value = value[0] if value else None
        elif isinstance(value, dict):
            value = next((value[key] for key in _KEYS if value.get(key)), None)
        else:
            return None
    return value


def _unescape(text: str) -> str:
    try:
        return str(orjson.loads(f'"{text}"'))
    except orjson.JSONDecodeError:
        return text


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
