"""An HTTP/2 connection over a socket: what listeners and upstreams share."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Final

from gateway.http2 import events, frames
from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.hpack import Header
from gateway.http2.stream import Stream
from gateway.system.buffers import BodyProgress, BufferAccount
from gateway.system.hangups import HangupWatch
from gateway.system.sockets.body_stream import BodyStream, RelaySteps
from gateway.system.sockets.connection import MAX_COALESCED_WRITE, Connection
from gateway.system.time_slices import PerLoop

STREAM_WINDOW: Final = 64 * 1024
"""Initial window of a stream. It grows to that of ``BufferAccount`` once its body is read."""
CONNECTION_WINDOW: Final = 16 * 1024 * 1024
"""So many bytes of all streams may wait to be read: a stream that waits does not stop others."""
MAX_RECEIVED_FRAME: Final = 4 * 1024 * 1024
"""Received frames may be so large, as they are not buffered."""

_MAX_PART: Final = 256 * 1024
"""Bytes of one stream that are sent before other streams of the connection get their turn. What
waits to be sent is less than ``_MAX_UNSENT``."""
_MAX_UNSENT: Final = 4 * 1024 * 1024
"""Bytes that may wait for a peer that does not read, with what it made the gateway send."""

_TIME_SLICE: Final = "time slice"
"""The pauser of a session that waits for its next time slice."""

_log = logging.getLogger("tensorgate.http2")


class StreamHandler(BodyStream):
    """One stream for its user: reads the peer's message, and sends one with flow control.

    Its user must call ``close`` in the end.
    """

    def __init__(self, session: Http2Session, stream: Stream) -> None:
        super().__init__(session.buffers, ended=stream.received_end)
        self.session = session
        self.stream = stream
        self.error: Exception | None = None
        """Why nothing more comes."""
        self.sending = BodyProgress()
        """How fast the peer reads: the wait for it, and what it takes."""
        self._unsent = 0
        """Bytes that ``send`` counts as buffered."""
        self._writer: asyncio.Future[None] | None = None
        self._relay_steps: RelaySteps = ()
        """Those of ``relay``, while the reader waits in it."""
        self._refused: bytes | memoryview = b""
        stream.handler = self
        session.handlers[self] = None

    def give_back(self) -> None:
        """Give back what the stream holds, and forget it, whatever state its connection is in."""
        self.stream.handler = None
        self.session.handlers.pop(self, None)
        self.session.waiting.pop(self, None)
        self._drop()
        self._count_unsent(0)

    @property
    def received_end(self) -> bool:
        """Whether the peer's message is complete."""
        return self.stream.received_end

    def close(self) -> None:
        """Release the stream: end it if it is not complete, and forget it.

        If that fails, the connection is aborted; nothing is raised.
        """
        self.give_back()
        self.session.run_guarded(self._end_stream)

    def _end_stream(self) -> None:
        self._on_discard()
        if not self.stream.closed:
            self.end_incomplete()

    def end_incomplete(self) -> None:
        """End the stream, of which one of both messages is not complete."""
        self.reset(ErrorCode.CANCEL)

    def send_headers(self, fields: tuple[Header, ...], end_stream: bool = False) -> None:
        """Send the headers, or the trailers, of the message."""
        self.session.http2.send_headers(self.stream, fields, end_stream)
        self.session.flush_soon()

    async def send(
        self, data: bytes | memoryview, end_stream: bool = False, is_counted: bool = False
    ) -> None:
        """Send data as fast as the peer reads them.

        While they wait for the peer, they count as buffered, unless ``is_counted`` says that the
        caller counts them already. Raises ConnectionResetError if the stream or the connection is
        closed.
        """
        session, stream = self.session, self.stream
        waiting = session.waiting
        size = 0 if is_counted else len(data)
        is_unread = False
        try:
            while True:
                if self.error is not None or stream.is_reset or session.closed:
                    raise ConnectionResetError("the stream is closed")
                sent = 0
                if not session.write_blocked:
                    part = data if len(data) <= _MAX_PART else memoryview(data)[:_MAX_PART]
                    is_last = len(part) == len(data)
                    sent = session.http2.send_data(stream, part, end_stream and is_last)
                    session.flush_soon(sent)
                    # While others of the connection go on, it is not silent, but may be slow.
                    self.sending.receive(sent, self.reserved.progress)
                    if is_last and sent == len(part):
                        return
                    data = memoryview(data)[sent:]
                if sent:
                    waiting.pop(self, None)
                # Those who could not send anything keep their place: else the first one of them
                # would always be the first again.
                waiting[self] = None
                self._count_unsent(size)  # a part that is sent is freed with the rest
                if sent == _MAX_PART and not session.write_blocked:
                    await asyncio.sleep(0)
                else:
                    self.sending.begin_wait(time.monotonic())
                    if not is_unread:
                        is_unread = True
                        self.open_unread(size)
                    await self._wait_to_send()
        finally:
            self._count_unsent(0)
            if waiting:
                waiting.pop(self, None)
            if is_unread:
                self.close_unread()
                self.sending.receive(0)

    def send_now(self, data: bytes | memoryview) -> bool:
        """Send a piece, unless it has to wait; return whether it was sent."""
        session, stream, size = self.session, self.stream, len(data)
        if session.write_blocked or size > min(_MAX_PART, session.http2.sendable(stream)):
            return False
        if self.error is not None or session.http2.send_data(stream, data, False) < size:
            return False
        session.flush_soon(size)
        self.sending.receive(size, self.reserved.progress)
        return True

    def _count_unsent(self, size: int) -> None:
        """Count so many bytes that wait for the peer, in place of those before."""
        if size != self._unsent:
            self.session.buffers.change(size - self._unsent)
            self._unsent = size

    def open_unread(self, size: int) -> None:
        """Note that ``send`` waits for the peer with so many bytes."""

    def close_unread(self) -> None:
        """Note that it does so no more."""

    async def _wait_to_send(self) -> None:
        self._writer = self.session.loop.create_future()
        await self._writer

    def wake_writer(self) -> None:
        """Let ``send`` go on."""
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def reset(self, code: ErrorCode) -> None:
        """Reset the stream, unless it is closed already."""
        self.session.http2.reset(self.stream, code)
        self.session.flush_soon()

    def receive(
        self, data: bytes | memoryview, size: int, trailers: tuple[Header, ...] = ()
    ) -> None:
        """Take in a piece of the body that counts ``size`` in flow control, or the trailers."""
        unused = size if self._discarding else size - len(data)
        if unused:
            self.session.http2.acknowledge(self.stream, unused)
        if trailers:
            self.trailers = trailers
        self.feed(data)
        if self.stream.received_end:
            self.end()

    def fail(self, error: Exception) -> None:
        """End the stream: readers and writers get this error."""
        if self.error is None:
            self.error = error
        self.fail_body(error)
        self.wake_writer()

    def is_reading(self) -> bool:
        """Tell whether the gateway reads what the client sends; see ``Body``."""
        return not self.session.read_flow.paused

    def open_window(self) -> None:
        """Let the peer send more at a time, as the body is being read."""
        window = self.session.buffers.account.window
        if self.stream.receive_window.target < window:
            self.session.http2.set_stream_window(self.stream, window)
            self.session.flush_soon()

    async def relay(self, steps: RelaySteps) -> bytes | memoryview:
        """Let each piece pass these steps; see BodyStream. Raises what a step raises."""
        if self._pieces or self.ended or self._error is not None:
            return b""
        self._relay_steps = steps
        try:
            await self._begin_wait()
        finally:
            self._relay_steps = ()
        refused, self._refused = self._refused, b""
        return refused

    def relay_pieces(self) -> None:
        """Let what has arrived pass the steps, unless its reader is cancelled or woken already."""
        reader = self._reader
        if reader is None or reader.done():
            return
        try:
            while self._pieces:
                piece = self._next_piece()
                for step in self._relay_steps:
                    if step(piece) is False:
                        self._refused, self._relay_steps = piece, ()
                        self._wake_reader()
                        return
        except Exception as error:
            if not reader.done():  # a step may have ended the call
                reader.set_exception(error)
            return
        self.progress.begin_wait(time.monotonic())

    def _wake_reader(self) -> None:
        if self._relay_steps and not self.ended and self._error is None:
            self.session.relayed[self] = None
            return
        self.session.has_woken = True
        super()._wake_reader()

    def _on_wait(self) -> None:
        self.open_window()

    def _on_read(self, size: int) -> None:
        self.session.http2.acknowledge(self.stream, size)
        self.session.flush_soon()

    def _on_discard(self) -> None:
        """Let the peer send as much again as it has sent, also what was lost by an error."""
        unused = self.stream.receive_window.unused
        if unused:
            self.session.http2.acknowledge(self.stream, unused)
            self.session.flush_soon()


class FlushQueue:
    """Writes the output of sessions once in an iteration of the event loop."""

    def __init__(self) -> None:
        self._sessions: list[Http2Session] = []
        self._is_scheduled = False

    def add(self, session: Http2Session) -> None:
        """Write the output of a session soon."""
        self._sessions.append(session)
        self.schedule(session.loop)

    def schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write soon; after readers were woken, what they send goes out in the same iteration."""
        if not self._is_scheduled:
            loop.call_soon(self._run)
            self._is_scheduled = True

    def _run(self) -> None:
        self._is_scheduled = False
        sessions, self._sessions = self._sessions, []
        begun = 0
        try:
            for session in sessions:
                begun += 1
                session.flush_scheduled()
        finally:
            if begun < len(sessions):  # one has failed in spite of its guard
                self._sessions += sessions[begun:]
                self.schedule(sessions[begun].loop)


_flush_queues = PerLoop(FlushQueue)


def flush_queue() -> FlushQueue:
    """Return the queue of the running event loop: one for all of its sessions."""
    return _flush_queues.get()


class Http2Session(Connection):
    """Reads frames, gives them to the handlers of their streams, and writes what they send."""

    def __init__(
        self,
        http2: Http2Connection,
        buffers: BufferAccount | None = None,
        hangups: HangupWatch | None = None,
    ) -> None:
        super().__init__(buffers, hangups)
        self.http2 = http2
        self.waiting: dict[StreamHandler, None] = {}
        """Those who wait to send, in order: for the peer's windows, or for the socket."""
        self.handlers: dict[StreamHandler, None] = {}
        """Those of all streams that are in use."""
        self._flushes = flush_queue()
        self._flushing = False
        self.has_woken = False
        """Whether it has woken a reader, in this time slice."""
        self.relayed: dict[StreamHandler, None] = {}
        """Those that have got bytes to relay, in this time slice."""
        self._unflushed = 0
        self._partial_size = 0
        self._output_closed = False
        """Whether this end has closed its sending side."""
        self._unread_size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings."""
        super().connection_made(transport)
        self.http2.watch(self.transport.abort)
        self.flush_output()

    def data_received(self, data: bytes | memoryview) -> None:
        """Process frames of the peer."""
        self.http2.receive(data)
        self.process_received()

    def process_received(self) -> None:
        """Process received frames: as many as fit into one time slice of the event loop."""
        http2 = self.http2
        http2.begin_time_slice()
        try:
            while (event := http2.next_event()) is not None:
                self._handle(event)
        except Http2Error as error:
            self.fail(error)
            self._end_time_slice()
            return
        if self.relayed:
            relayed, self.relayed = self.relayed, {}
            for handler in relayed:
                handler.relay_pieces()
        if self.has_woken:
            self.has_woken = False
            self._flushes.schedule(self.loop)
        self._count_partial(http2.reader.size)
        if http2.must_wait or self.read_flow.paused:
            self._end_time_slice()
        self.flush_output()
        if self.transport.get_write_buffer_size() > _MAX_UNSENT:
            self.end_for(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read")
            self.transport.abort()

    def fail(self, error: Http2Error) -> None:
        """Close the connection because the peer broke the protocol."""
        self.flush_output()
        self.on_failure(error)
        self.transport.close()

    def end_for(self, code: ErrorCode, reason: str) -> None:
        """Tell the peer why the connection is closed, and close it."""
        self.http2.close(code, reason)
        self.fail(Http2Error(code, reason))

    def connection_lost(self, exc: Exception | None) -> None:
        """Release those who wait; the user of each handler is told by ``on_failure``."""
        self.http2.watch(None)  # else the two form a cycle
        super().connection_lost(exc)
        self.relayed.clear()
        self._count_partial(0)
        self._count_unread(0)

    def run_guarded(self, step: Callable[[], None]) -> None:
        """Run a step that no caller guards; if it fails, the connection is aborted."""
        try:
            step()
        except Exception:
            self.abort_after_error()

    def abort_after_error(self) -> None:
        """Log an unexpected error, and abort the connection, whose state may be wrong.

        Its end gives back what it holds, and fails its streams.
        """
        _log.exception("an HTTP/2 connection is aborted because of an unexpected error")
        if not self.closed:
            self.transport.abort()

    def resume_writing(self) -> None:
        """Let those who wait send."""
        super().resume_writing()
        self._wake_writers()

    def flush_soon(self, size: int = 0) -> None:
        """Write what there is to send in the next iteration of the event loop.

        It is written at once when the data in it are large; ``size`` are those added last.
        """
        self._unflushed += size
        if self._unflushed >= MAX_COALESCED_WRITE:
            self.flush_output()
        elif not self._flushing and self.http2.output:
            self._flushes.add(self)
            self._flushing = True

    def flush_output(self) -> None:
        """Write what there is to send."""
        self._unflushed = 0
        output = self.http2.take_output()
        if output and not self._output_closed and not self.transport.is_closing():
            self.write(output)

    def flush_scheduled(self) -> None:
        """Write what ``flush_soon`` was called for."""
        try:
            self._flushing = False
            self.flush_output()
        except Exception:
            self.abort_after_error()

    def _end_time_slice(self) -> None:
        """Let others have a time slice if this one had too much to read; read nothing meanwhile."""
        unread, delay = self.http2.reader.unread, self.http2.excess()
        self._count_unread(unread)
        if unread or delay:
            self.read_flow.pause(_TIME_SLICE, is_short=True)
            if delay:
                self.loop.call_later(delay, self.await_time_slice, self._use_time_slice)
            else:
                self.await_time_slice(self._use_time_slice)
        else:
            self.read_flow.resume(_TIME_SLICE)

    def _use_time_slice(self) -> None:
        """Process what waits, unless the connection was closed meanwhile."""
        if not (self.closed or self.transport.is_closing()):
            self.run_guarded(self.process_received)

    def _handle(self, event: events.Event | frames.Frame) -> None:
        if isinstance(event, events.HeadersReceived):
            self.on_headers(event)
        elif isinstance(event, events.StreamEvent):
            self._handle_on_stream(event)
        elif isinstance(event, events.WindowOpened):
            self._on_window(event.stream)
        elif isinstance(event, frames.GoAwayFrame):
            self.on_goaway(event)
        elif isinstance(event, events.StreamRefused):
            self.on_refused(event.error)
        elif isinstance(event, frames.SettingsFrame):
            self.on_settings()

    def _handle_on_stream(self, event: events.StreamEvent) -> None:
        handler = event.stream.handler
        if not isinstance(handler, StreamHandler):
            size = event.size if isinstance(event, events.DataReceived) else 0
            self.http2.acknowledge(event.stream, size)
            self.on_unread(event.stream, size)
        elif isinstance(event, events.DataReceived):
            handler.receive(event.data, event.size, event.trailers)
            self.on_data(handler, event)
        elif isinstance(event, events.StreamReset):
            self.on_reset(handler, event)

    def _on_window(self, stream: Stream | None) -> None:
        if stream is None:
            self._wake_writers()
        elif isinstance(stream.handler, StreamHandler):
            stream.handler.wake_writer()

    def _wake_writers(self) -> None:
        for handler in tuple(self.waiting):
            handler.wake_writer()

    def _count_partial(self, size: int) -> None:
        """Count the bytes of incomplete frames."""
        if size != self._partial_size:
            self.buffers.change(size - self._partial_size)
            self._partial_size = size

    def _count_unread(self, size: int) -> None:
        """Count the bytes that wait for the next time slice."""
        if size != self._unread_size:
            self.buffers.change(size - self._unread_size)
            self._unread_size = size

    @abstractmethod
    def on_headers(self, event: events.HeadersReceived) -> None:
        """Handle the start of a request or of a response."""

    def on_data(self, handler: StreamHandler, event: events.DataReceived) -> None:
        """Handle a piece of a body, or trailers, which the handler has got."""

    @abstractmethod
    def on_reset(self, handler: StreamHandler, event: events.StreamReset) -> None:
        """Handle the end of a stream that is not complete."""

    def on_unread(self, stream: Stream, size: int) -> None:
        """Handle what was dropped as it has no handler: ``size`` bytes, or the stream's end."""

    @abstractmethod
    def on_failure(self, error: Http2Error) -> None:
        """Handle a connection error: fail all streams; the connection is closed after it."""

    def on_refused(self, error: Http2Error) -> None:
        """Handle that a stream of the peer was reset before it had a handler, or after that."""

    def on_goaway(self, event: frames.GoAwayFrame) -> None:
        """Handle that the peer accepts no more streams."""

    def on_settings(self) -> None:
        """Handle that the settings of the peer have changed."""
