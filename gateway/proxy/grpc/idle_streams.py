"""Ends idle streams when the gateway stops or has new settings: a client may keep one for days."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Self

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc.framing import MessageReader
from gateway.protocol.grpc.wire import MAX_MESSAGE
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.filters.interfaces import WrappedResponse
from gateway.proxy.grpc.request import GrpcRequest
from gateway.proxy.interfaces import ClientResponse
from gateway.proxy.readiness import CACHE_SECONDS, Readiness
from gateway.system.sockets.body_stream import RelaySteps

IDLE_SECONDS: Final = 10.0
"""Seconds in which a client may still use its stream, once that has to end."""


class IdleStreamCheck(WrappedResponse):
    """Passes the response of a stream on, and ends the call if it is idle for ``IDLE_SECONDS``.

    That counts from the moment when the gateway stops, or has new settings. A stream is idle while
    nothing moves, the client may send more messages, and the server has responded with as many as
    it got, or more. The call ends with UNAVAILABLE, which clients try again elsewhere.
    """

    def __init__(
        self, request: GrpcRequest, response: ClientResponse, readiness: Readiness
    ) -> None:
        super().__init__(response)
        self.is_grpc = True
        self.deadline: Deadline | None = None
        """That of the call as it is now."""
        self._request = request
        self._readiness = readiness
        self._reader: MessageReader | None = MessageReader(MAX_MESSAGE, "protobuf", RESPONSE)
        self._responses = 0
        self._loop = asyncio.get_running_loop()
        self._moved = 0
        self._idle_since = 0.0

    def __enter__(self) -> Self:
        """Start to check the stream."""
        self._check()
        return self

    def __exit__(self, *error: object) -> None:
        """End the checks."""
        self._timer.cancel()
        self.deadline = None

    def write(self, data: bytes | memoryview) -> Coroutine[Any, Any, None]:
        """Write a part of the body, and count the messages that end in it."""
        self._count(data)
        return self._response.write(data)

    def relay_steps(self) -> RelaySteps:
        """Return the steps that write a part of the body, and count its messages."""
        steps = self._response.relay_steps()
        return (*steps, self._count) if steps else ()

    def _count(self, data: bytes | memoryview) -> None:
        if self._reader is not None:
            try:
                self._responses += self._reader.count_ended(data)
            except GatewayError:
                self._reader = None  # no messages, so it is not known what is in flight

    def _check(self) -> None:
        now, request = self._loop.time(), self._request
        may_end = self._reader is not None and not request.has_ended
        is_idle = may_end and self._responses >= request.reader.messages
        moved = self.record.request_bytes + self.record.response_bytes
        reason = self._readiness.end_of_streams
        if not reason or moved != self._moved or not is_idle:
            self._moved, self._idle_since = moved, now
        elif now - self._idle_since >= IDLE_SECONDS and self.deadline is not None:
            self.deadline.end(
                GatewayError(ErrorKind.NOT_READY, f"{reason}, and nothing moved on this stream")
            )
            return
        self._timer = self._loop.call_later(min(CACHE_SECONDS, IDLE_SECONDS), self._check)
