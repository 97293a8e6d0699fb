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
        self._served: set[asyncio.Task[None]] = set()
        self._closed = False

    def serve(self, sink: socket.socket) -> None:
        """Serve the connection that ``send_connection`` has put into ``sink``; own both.

        When its call has ended, the sink gets a list of attempts as JSON, and is shut down.
        """
        sink.setblocking(False)
        try:
            if self._closed:
                raise ConnectionAbortedError
            message, (descriptor, *_), _, _ = socket.recv_fds(sink, 1, 1)
        except (OSError, ValueError):  # the admin address is gone, or has asked another worker
            sink.close()
            return
        capture = CallCapture(skips_conversion=message == _SKIPS_CONVERSION)
        served = _CapturedConnection(self._handler, capture, sink)
        listener = self._make_listener(served.handle, served.note_end, served.note_closed)
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        listener.adopt(connection)
        task = asyncio.create_task(served.run(listener))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def close(self) -> None:
        """Drop the calls that run, and serve no more."""
        self._closed = True
        served = list(self._served)
        for each in served:
            each.cancel()
        await asyncio.gather(*served, return_exceptions=True)


class _CapturedConnection:
    """A connection for one call, and the socket that gets what was captured."""

    def __init__(self, handler: RequestHandler, capture: CallCapture, sink: socket.socket) -> None:
        self._handler = handler
        self._capture = capture
        self._sink = sink
        self._document = b""
        self._ended = asyncio.Event()
        self._closed = asyncio.Event()

    async def run(self, listener: HttpListener) -> None:
        """Deliver what is captured of the call; end when the client has closed the connection."""
        try:
            await self._ended.wait()
            with suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout(_DELIVERY_TIMEOUT):
                    await asyncio.get_running_loop().sock_sendall(self._sink, self._document)
                # A worker that hangs may have a duplicate of the sink, which does not close.
                self._sink.shutdown(socket.SHUT_WR)
            self._sink.close()
            await self._closed.wait()
        finally:
            self._sink.close()
            await listener.drain(0.0)  # ends its timer, too

    async def handle(self, request: ClientRequest, response: ClientResponse) -> None:
        """Handle a call, and capture it."""
        response.record.capture = self._capture
        await self._handler(request, response)

    def note_end(self, record: CallRecord) -> None:
        """Keep what was captured of the first call; an observer."""
        if record.capture is not None and not self._ended.is_set():
            self._document = orjson.dumps(record.capture.describe())
            self._ended.set()

    def note_closed(self) -> None:
        """End the delivery: there is no further call."""
        self._ended.set()
        self._closed.set()
