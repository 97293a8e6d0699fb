"""Makes a call to the gateway itself, and gets what the gateway and its servers sent for it."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.admin.own_calls import OwnCallError, Reply, call_over
from gateway.admin.source import GatewaySource
from gateway.upstream.transport import UpstreamRequest

_TIMEOUT = 120.0
"""Seconds for a call."""
_CAPTURE_TIMEOUT = 5.0
"""Seconds from its end until what was captured is here."""
_MAX_CAPTURE = 4 * 2**20


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call that has ended."""

    seconds: float
    """From its begin to the end of its response."""
    reply: Reply
    attempts: list[dict[str, Any]]
    """What was sent to servers and received of them; see CapturedAttempt."""


async def make_captured_call(
    source: GatewaySource,
    request: UpstreamRequest,
    max_response: int,
    skips_conversion: bool = False,
) -> CapturedCall:
    """Make a call over a connection of its own. Raises OwnCallError.

    Its route, its limits and its log are those of any other call. With ``skips_conversion`` a
    server gets it as it is.
    """
    try:
        connection, sink = await source.connect_captured(skips_conversion)
    except TimeoutError:
        raise OwnCallError("no worker responds") from None
    with sink:
        began = time.perf_counter()
        reply = await call_over(connection, request, _TIMEOUT, max_response)
        seconds = time.perf_counter() - began
        return CapturedCall(seconds, reply, await _read_capture(sink))


async def _read_capture(sink: socket.socket) -> list[dict[str, Any]]:
    """Read what was captured; nothing if it does not come."""
    loop = asyncio.get_running_loop()
    sink.setblocking(False)
    text = bytearray()
    try:
        async with asyncio.timeout(_CAPTURE_TIMEOUT):
            while piece := await loop.sock_recv(sink, 256 * 1024):
                text += piece
                if len(text) > _MAX_CAPTURE:
                    return []
        attempts = orjson.loads(text)
    except (OSError, orjson.JSONDecodeError):  # a TimeoutError is an OSError
        return []
    return list(attempts)
