"""Serves calls of the admin address that are captured, so that operators see what servers get.

Each such call has a connection, and a listener of its own without the fast path: calls of clients
pay nothing for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from gateway.listener.client_call import RequestHandler
from gateway.listener.server import HttpListener
from gateway.observe.call_capture import CallCapture
from gateway.observe.call_record import CallObserver, CallRecord
from gateway.proxy.interfaces import ClientRequest, ClientResponse

DELIVERY_TIMEOUT = 10.0
"""Seconds for the admin address to read what was captured."""

MakeListener = Callable[[RequestHandler, CallObserver, Callable[[], None]], HttpListener]
"""Makes a listener of a handler, a further observer, and what is called for a closed connection."""


def send_connection(sink: socket.socket, connection: socket.socket, skips_conversion: bool) -> None:
    """Send the connection of a captured call through the socket that gets what is captured."""
    socket.send_fds(sink, [bytes([skips_conversion])], [connection.fileno()])


@dataclass(eq=False)
class CapturedCalls:
    """Serves the calls; ``make_listener`` uses the settings of the moment."""

    make_listener: MakeListener
    handler: RequestHandler
    served: set[asyncio.Task[None]] = field(default_factory=set)
    closed: bool = False

    def serve(self, sink: socket.socket) -> None:
        """Serve the connection that ``send_connection`` has put into ``sink``; own both.

        When its call has ended, the sink gets a list of attempts as JSON, and is shut down.
        """
        sink.setblocking(False)
        try:
            if self.closed:
                raise ConnectionAbortedError
            message, (descriptor, *_), _, _ = socket.recv_fds(sink, 1, 1)
        except (OSError, ValueError):  # the admin address is gone, or has asked another worker
            sink.close()
            return
        capture = CallCapture(skips_conversion=bool(message[0]))
        served = _CapturedConnection(self.handler, capture, sink)
        listener = self.make_listener(served.handle, served.note_end, served.note_closed)
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        listener.adopt(connection)
        task = asyncio.create_task(served.run(listener))
        self.served.add(task)
        task.add_done_callback(self.served.discard)

    async def close(self) -> None:
        """Drop the calls that run, and serve no more."""
        self.closed = True
        served = list(self.served)
        for each in served:
            each.cancel()
        await asyncio.gather(*served, return_exceptions=True)


@dataclass(eq=False)
class _CapturedConnection:
    """A connection for one call, and the socket that gets what was captured."""

    handler: RequestHandler
    capture: CallCapture
    sink: socket.socket
    document: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, listener: HttpListener) -> None:
        """Deliver what is captured of the call; end when the client has closed the connection."""
        try:
            await self.ended.wait()
            with suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout(DELIVERY_TIMEOUT):
                    await asyncio.get_running_loop().sock_sendall(self.sink, self.document)
                # A worker that hangs may have a duplicate of the sink, which does not close.
                self.sink.shutdown(socket.SHUT_WR)
            self.sink.close()
            await self.closed.wait()
        finally:
            self.sink.close()
            await listener.drain(0.0)  # ends its timer, too

    async def handle(self, request: ClientRequest, response: ClientResponse) -> None:
        """Handle a call, and capture it."""
        response.record.capture = self.capture
        await self.handler(request, response)

    def note_end(self, record: CallRecord) -> None:
        """Keep what was captured of the first call; an observer."""
        if record.capture is not None and not self.ended.is_set():
            self.document = orjson.dumps(record.capture.describe())
            self.ended.set()

    def note_closed(self) -> None:
        """End the delivery: there is no further call."""
        self.ended.set()
        self.closed.set()
