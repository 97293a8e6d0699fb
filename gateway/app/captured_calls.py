"""Serves calls of the admin address that are captured, so that operators see what servers get.

Each such call has a connection, and a listener of its own without the fast path: calls of clients
pay nothing for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import orjson

from gateway.listener.dispatcher import RequestHandler
from gateway.listener.server import HttpListener
from gateway.observe.call_capture import CallCapture
from gateway.observe.call_record import CallObserver, CallRecord
from gateway.proxy.interfaces import ClientRequest, ClientResponse

_DELIVERY_TIMEOUT = 10.0
"""Seconds for the admin address to read what was captured."""

MakeListener = Callable[[RequestHandler, CallObserver, Callable[[], None]], HttpListener]
"""Makes a listener of a handler, a further observer, and what is called for a closed connection."""


_CONVERTED, _SKIPS_CONVERSION = b"\0", b"\1"


def send_connection(sink: socket.socket, connection: socket.socket, skips_conversion: bool) -> None:
    """Send the connection of a captured call through the socket that gets what is captured."""
    message = _SKIPS_CONVERSION if skips_conversion else _CONVERTED
    socket.send_fds(sink, [message], [connection.fileno()])


class CapturedCalls:
    """Serves the calls; ``make_listener`` uses the settings of the moment."""

    def __init__(self, make_listener: MakeListener, handler: RequestHandler) -> None:
        self._make_listener = make_listener
        self._handler = handler
        self._served: set[_CapturedConnection] = set()

    def serve(self, sink: socket.socket) -> None:
        """Serve the connection that ``send_connection`` has put into ``sink``; own both.

        When its call has ended, the sink gets a list of attempts as JSON, and is closed.
        """
        sink.setblocking(False)
        try:
            message, (descriptor, *_), _, _ = socket.recv_fds(sink, 1, 1)
        except (OSError, ValueError):  # the admin address is gone, or has asked another worker
            sink.close()
            return
        capture = CallCapture(skips_conversion=message == _SKIPS_CONVERSION)
        served = _CapturedConnection(self._handler, capture, sink, self._served.discard)
        self._served.add(served)
        listener = self._make_listener(served.handle, served.deliver, served.on_closed)
        served.start(listener, socket.socket(fileno=descriptor))

    async def close(self) -> None:
        """Drop the calls that run."""
        for each in list(self._served):
            await each.close()


class _CapturedConnection:
    """A connection for one call, until what was captured is delivered."""

    def __init__(
        self,
        handler: RequestHandler,
        capture: CallCapture,
        sink: socket.socket,
        on_end: Callable[[_CapturedConnection], None],
    ) -> None:
        self._handler = handler
        self._capture = capture
        self._sink = sink
        self._on_end = on_end
        self._listener: HttpListener | None = None
        self._delivery: asyncio.Task[None] | None = None

    def start(self, listener: HttpListener, connection: socket.socket) -> None:
        """Serve a connection."""
        self._listener = listener
        connection.setblocking(False)
        listener.adopt(connection)

    async def handle(self, request: ClientRequest, response: ClientResponse) -> None:
        """Handle a call, and capture it."""
        response.record.capture = self._capture
        await self._handler(request, response)

    def deliver(self, record: CallRecord) -> None:
        """Send what was captured of a call; an observer."""
        if record.capture is not None and self._delivery is None:
            document = orjson.dumps(record.capture.describe())
            self._delivery = asyncio.create_task(self._deliver(document))

    async def _deliver(self, document: bytes) -> None:
        try:
            with suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout(_DELIVERY_TIMEOUT):
                    await asyncio.get_running_loop().sock_sendall(self._sink, document)
        finally:
            self._end()

    def on_closed(self) -> None:
        """End when the connection has closed, unless the delivery is under way."""
        if self._delivery is None:
            self._end()

    async def close(self) -> None:
        """Drop the call, and what was captured."""
        if self._listener is not None:
            await self._listener.drain(0.0)
        if self._delivery is not None:
            self._delivery.cancel()
        self._end()

    def _end(self) -> None:
        self._sink.close()
        self._listener = None
        self._on_end(self)
