"""One end of an HTTP/2 connection, without I/O: RFC 9113.

Give it what was received, take the events, and send what it has to send. A client opens streams;
for a server the peer does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

from gateway.http2 import events, frames
from gateway.http2 import flood_limits as limits
from gateway.http2.errors import ErrorCode, Http2Error, flood_error, protocol_error
from gateway.http2.frame_reader import FrameReader
from gateway.http2.header_check import check_request, check_response, check_trailers
from gateway.http2.hpack import MAX_HEADER_LIST, Decoder, Encoder, Header, HeaderList
from gateway.http2.stream import DEFAULT_WINDOW, ReceiveWindow, Stream

_MAX_RESET_IDS: Final = 2 * limits.MAX_RESETS
"""Streams that were reset here, and whose late frames are ignored: section 5.1, "closed"."""

_MAX_REASON: Final = 200
"""Bytes of the debug data of GOAWAY."""

_UNLIMITED: Final = 2**31 - 1
_ERROR_CODES: Final = {int(code): code for code in ErrorCode}
_HEAD: Final = (b":method", b"HEAD")


class _Guard:
    """Tells of an unexpected error that leaves an operation half done."""

    def __init__(self) -> None:
        self.on_broken: Callable[[], None] | None = None

    def __enter__(self) -> None:
        """Begin an operation."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it."""
        on_broken = self.on_broken
        if error is not None and on_broken is not None and not isinstance(error, Http2Error):
            on_broken()


class Http2Connection:
    """The state of a connection: settings, streams, windows.

    ``max_streams`` are those that the peer may have open at a time. ``stream_window`` is the
    initial window of each stream, ``window`` that of the connection; both in bytes, at least
    65,535. ``max_frame_size`` is that of received frames.

    After ``next_event`` has raised Http2Error, what there is to send tells the peer why, and the
    connection must be closed. What is received from then on is ignored. Any other error leaves
    windows, tables or frames half changed: ``watch`` for it.
    """

    def __init__(
        self,
        is_client: bool,
        max_streams: int = 100,
        stream_window: int = DEFAULT_WINDOW,
        window: int = DEFAULT_WINDOW,
        max_frame_size: int = frames.MIN_MAX_FRAME_SIZE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_client: Final = is_client
        self._max_streams = max_streams
        self._stream_window = stream_window
        self.reader: Final = FrameReader(max_frame_size)
        """Its ``unread`` bytes are left for the next time slice."""
        self._decoder: Final = Decoder()
        self._encoder: Final = Encoder()
        self._receive_window: Final = ReceiveWindow(DEFAULT_WINDOW, window)
        self._send_window = DEFAULT_WINDOW
        self.streams: dict[int, Stream] = {}
        """The open streams by id."""
        self._last_id = -1
        self._skipped = (0, 0)
        """The ids of two streams of the peer between which it opened none."""
        self._next_id = 1
        self._reset_ids: dict[int, None] = {}
        self.output: list[bytes | memoryview] = []
        """What is to be sent; see ``take_output``."""
        self._event: events.Event | frames.Frame | None = None
        """The next one; most frames make one at most."""
        self._events: deque[events.Event | frames.Frame] = deque()
        """Those after it."""
        self._preface_left = b"" if is_client else frames.PREFACE
        self._has_settings = False
        self.settings_acknowledged = False
        """Whether the peer has acknowledged the settings of this end."""
        self.going_away = False
        """Whether one of both ends has sent GOAWAY: no stream may be opened any more."""
        self._last_accepted_id = frames.MAX_WINDOW_SIZE
        # What the peer has set.
        self._initial_send_window = DEFAULT_WINDOW
        self._max_send_frame = frames.MIN_MAX_FRAME_SIZE
        self.peer_max_streams = _UNLIMITED
        """Streams that the peer lets this end have open at a time."""
        self._guard: Final = _Guard()
        self._failure: Http2Error | None = None
        self._closed = False
        self._work_left = _UNLIMITED
        self._is_too_fast = False
        self._resets: Final = limits.RateLimit(
            limits.MAX_RESETS, limits.MAX_RESETS_PER_SECOND, clock
        )
        self._control: Final = limits.RateLimit(
            limits.MAX_CONTROL_FRAMES, limits.MAX_CONTROL_FRAMES_PER_SECOND, clock
        )
        self._tiny: Final = limits.RateLimit(
            limits.MAX_TINY_FRAMES, limits.MAX_TINY_FRAMES_PER_SECOND, clock
        )
        self._tiny_data: Final = limits.RateLimit(
            limits.MAX_TINY_DATA, limits.MAX_TINY_DATA_PER_SECOND, clock
        )
        values = [
            (frames.INITIAL_WINDOW_SIZE, stream_window),
            (frames.MAX_FRAME_SIZE, max_frame_size),
            (frames.MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST),
        ]
        if is_client:
            self.output.append(frames.PREFACE)
            values.append((frames.ENABLE_PUSH, 0))
        else:
            values.append((frames.MAX_CONCURRENT_STREAMS, max_streams))
        self.output.append(frames.encode_settings(values))
        self._open_window(None, self._receive_window.opening())

    def watch(self, on_broken: Callable[[], None] | None) -> None:
        """Call ``on_broken`` when an operation fails with an unexpected error, which it raises.

        None ends that.
        """
        self._guard.on_broken = on_broken

    # ------------------------------------------------------------------------------- receiving

    def receive(self, data: bytes | memoryview) -> None:
        """Add received data; then take the events."""
        with self._guard:
            if self._preface_left:
                data = self._check_preface(data)
            if data and not self._closed:
                self.reader.feed(data)

    def next_event(self) -> events.Event | frames.Frame | None:
        """Return the next event, None if there is none yet, or none in this time slice.

        SETTINGS and GOAWAY are events themselves.

        Raises Http2Error, and the connection must be closed.
        """
        with self._guard:
            try:
                while (event := self._event) is None:
                    if self._closed or self._work_left <= 0 or not self._read_frame():
                        return None
                self._event = self._events.popleft() if self._events else None
                return event
            except Http2Error as error:
                self.close(error.code, error.reason)
                raise

    def _tell(self, event: events.Event | frames.Frame) -> None:
        if self._event is None:
            self._event = event
        else:
            self._events.append(event)

    def _read_frame(self) -> bool:
        """Handle the next frame; return whether there was one."""
        if self._failure is not None:
            raise self._failure
        try:
            frame = self.reader.next_frame()
            if frame is None:
                return False
            self._work_left -= 1
            self._handle(frame)
        except Http2Error as error:
            if error.ends_connection:
                raise
            self._fail_stream(error)
        return True

    def begin_time_slice(self, work: int = limits.TIME_SLICE_WORK) -> None:
        """Limit the work until the next call; before the first one it is unlimited.

        What exceeds it stays unread, for the next time slice.
        """
        self._work_left = work

    @property
    def must_wait(self) -> bool:
        """Whether nothing must be read before the next time slice."""
        return self._work_left <= 0 or self._is_too_fast

    def excess(self) -> float:
        """Return for how many seconds nothing must be read, as too many tiny frames came."""
        seconds = self._tiny_data.excess()
        self._is_too_fast = seconds > 0.0
        return seconds

    def ignore_received(self) -> None:
        """Ignore what was received and is not read yet, and what is still to come."""
        self._closed = True
        self.reader.drop()

    def acknowledge(self, stream: Stream, size: int) -> None:
        """Count bytes of a DataReceived as used, so that the peer may send as many again."""
        with self._guard:
            if stream.is_reset:
                return  # they were counted when it was reset
            self._open_window(None, self._receive_window.use(size))
            increment = stream.receive_window.use(size)
            if not stream.received_end:
                self._open_window(stream, increment)

    def set_stream_window(self, stream: Stream, target: int) -> None:
        """Change how much the peer may send on a stream before any of it is used."""
        with self._guard:
            window = stream.receive_window
            window.target = target
            if not stream.received_end and not stream.is_reset:
                self._open_window(stream, window.opening())

    def _check_preface(self, data: bytes | memoryview) -> bytes | memoryview:
        """Check the next bytes of the preface, and return what follows: section 3.4."""
        expected = self._preface_left[: len(data)]
        if bytes(data[: len(expected)]) != expected:
            self._preface_left = b""
            self._failure = protocol_error("this is not HTTP/2")
            return b""
        self._preface_left = self._preface_left[len(expected) :]
        return data[len(expected) :]

    def _handle(self, frame: frames.Frame) -> None:
        if not self._has_settings:
            # Section 3.4: the first frame.
            if not isinstance(frame, frames.SettingsFrame) or frame.ack:
                raise protocol_error("the first frame is not SETTINGS")
            self._has_settings = True
        if isinstance(frame, frames.DataFrame):
            self._handle_data(frame)
        elif isinstance(frame, frames.HeadersFrame):
            self._handle_headers(frame)
        else:
            self._handle_control(frame)

    def _handle_control(self, frame: frames.Frame) -> None:
        if not self._control.spend():
            raise flood_error(f"more than {limits.MAX_CONTROL_FRAMES} frames without a message")
        if isinstance(frame, frames.WindowUpdateFrame):
            self._handle_window_update(frame)
        elif isinstance(frame, frames.SettingsFrame):
            self._handle_settings(frame)
        elif isinstance(frame, frames.PingFrame):
            if not frame.ack:
                self.output.append(frames.encode_ping(frame.data, ack=True))
        elif isinstance(frame, frames.RstStreamFrame):
            self._handle_reset(frame)
        elif isinstance(frame, frames.GoAwayFrame):
            self._handle_goaway(frame)

    def _handle_data(self, frame: frames.DataFrame) -> None:
        """Handle DATA: section 6.1."""
        size = frame.size
        if not self._receive_window.receive(size):
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
        # If nobody uses these data, others must not wait for what was used before.
        self._open_window(None, self._receive_window.opening())
        stream = self.streams.get(frame.stream_id)
        if stream is None or stream.received_end:
            self._open_window(None, self._receive_window.use(size))
            self._refuse_late_frame(frame.stream_id, stream, "DATA", frame.ends_frame)
            return
        # If this fails, the stream is dropped, and its data with it.
        if not stream.receive_window.receive(size):
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the stream's window", stream.id
            )
        self._check_data(stream, frame)
        data = frame.data
        if frame.end_stream:
            self._end_received(stream)
        elif not data:
            # Padding counts in flow control, but nobody will use it.
            self.acknowledge(stream, size)
            if frame.ends_frame and not self._control.spend():
                raise flood_error("too many empty DATA frames")
            return
        elif len(data) < limits.TINY_FRAME:
            self._is_too_fast = not self._tiny_data.spend()
        self._tell(events.DataReceived(stream, data, size, frame.end_stream))

    def _check_data(self, stream: Stream, frame: frames.DataFrame) -> None:
        if not stream.has_headers:
            raise protocol_error("DATA before the headers", stream.id)
        if stream.content_left >= 0:
            stream.content_left -= len(frame.data)
            if stream.content_left < 0 or (frame.end_stream and stream.content_left):
                # Section 8.1.1.
                raise protocol_error("the body does not have its Content-Length", stream.id)

    def _handle_headers(self, frame: frames.HeadersFrame) -> None:
        """Handle HEADERS: section 6.2."""
        # Also for those that are refused: they are decoded, too.
        self._work_left -= len(frame.block) // limits.BLOCK_BYTES_PER_WORK
        headers = self._decoder.decode(frame.block)
        stream_id = frame.stream_id
        stream: Stream | None = self.streams.get(stream_id)
        if stream is None:
            if self._is_client or stream_id <= self._last_id:
                self._refuse_late_frame(stream_id, stream, "HEADERS")
                return
            stream = self._accept_stream(stream_id)
            if stream is None:
                return
        elif stream.received_end:
            self._refuse_late_frame(stream_id, stream, "HEADERS")
            return
        if frame.depends_on_itself:
            raise protocol_error("a stream that depends on itself", stream_id)
        self._work_left -= limits.MESSAGE_WORK
        if stream.has_headers:
            self._receive_trailers(stream, headers, frame.end_stream)
        else:
            self._receive_headers(stream, headers, frame.end_stream)

    def _accept_stream(self, stream_id: int) -> Stream | None:
        """Open a stream of the peer; return None if it came after GOAWAY."""
        if stream_id % 2 == 0:
            raise protocol_error("a client opened a stream with an even id")  # section 5.1.1
        if stream_id != self._last_id + 2:
            self._skipped = (self._last_id, stream_id)
        self._last_id = stream_id
        if stream_id > self._last_accepted_id:
            self._ignore_frame()  # section 6.8
            return None
        if len(self.streams) >= self._max_streams:
            raise Http2Error(
                ErrorCode.REFUSED_STREAM, f"more than {self._max_streams} streams", stream_id
            )
        return self._add_stream(stream_id)

    def _add_stream(self, stream_id: int) -> Stream:
        self._control.earn(limits.CONTROL_FRAMES_PER_MESSAGE)
        size = self._stream_window
        stream = Stream(stream_id, self._initial_send_window, ReceiveWindow(size, size))
        self.streams[stream_id] = stream
        return stream

    def _receive_headers(self, stream: Stream, headers: HeaderList, end_stream: bool) -> None:
        length = -1
        if not headers.too_large:
            status, length = headers.checked or self._check(headers, stream.id)
            if self._is_client:
                if status < 200:
                    if end_stream:  # section 8.1
                        raise protocol_error("an interim response with END_STREAM", stream.id)
                    if not self._control.spend():
                        raise flood_error("too many interim responses")
                    return
                if stream.is_head or status in (204, 304):
                    length = 0  # the header tells that of the response to GET: section 8.1.1
        if end_stream and length > 0:
            raise protocol_error("a Content-Length without a body", stream.id)
        stream.has_headers = True
        stream.content_left = length
        if end_stream:
            self._end_received(stream)
        self._tell(events.HeadersReceived(stream, headers, end_stream))

    def _check(self, headers: HeaderList, stream_id: int) -> tuple[int, int]:
        if self._is_client:
            headers.checked = check_response(headers.fields, stream_id)
        else:
            headers.checked = 0, check_request(headers.fields, stream_id)
        return headers.checked

    def _receive_trailers(self, stream: Stream, headers: HeaderList, end_stream: bool) -> None:
        """Handle trailers: section 8.1."""
        if not end_stream:
            raise protocol_error("trailers without END_STREAM", stream.id)
        if headers.too_large:
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"trailers of more than {MAX_HEADER_LIST} bytes",
                stream.id,
            )
        if not headers.checked_as_trailers:
            check_trailers(headers.fields, stream.id, is_request=not self._is_client)
            headers.checked_as_trailers = True
        if stream.content_left > 0:
            raise protocol_error("the body does not have its Content-Length", stream.id)
        self._end_received(stream)
        self._tell(events.DataReceived(stream, b"", 0, True, headers.fields))

    def _end_received(self, stream: Stream) -> None:
        stream.received_end = True
        if stream.sent_end:
            del self.streams[stream.id]

    def _refuse_late_frame(
        self, stream_id: int, stream: Stream | None, kind: str, ends_frame: bool = True
    ) -> None:
        """Handle DATA or HEADERS on a stream on which the peer must not send: section 5.1."""
        if stream is not None:  # half-closed (remote)
            raise Http2Error(
                ErrorCode.STREAM_CLOSED, f"{kind} after the end of the stream", stream_id
            )
        self._check_not_idle(stream_id, kind)
        # Section 6.8: frames of streams that were opened after GOAWAY are ignored.
        is_unaccepted = not self._is_client and stream_id > self._last_accepted_id
        if stream_id not in self._reset_ids and not is_unaccepted:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"{kind} on a closed stream")
        if ends_frame:
            self._ignore_frame()

    def _ignore_frame(self) -> None:
        if not self._control.spend():
            raise flood_error("too many frames on closed streams")

    def _check_not_idle(self, stream_id: int, kind: str) -> None:
        """Raise a connection error for a stream that was never opened: section 5.1, "idle"."""
        if self._is_idle(stream_id):
            raise protocol_error(f"{kind} on an idle stream")

    def _is_idle(self, stream_id: int) -> bool:
        last = self._next_id - 2 if self._is_client else self._last_id
        first, second = self._skipped
        return stream_id > last or stream_id % 2 == 0 or first < stream_id < second

    def _handle_reset(self, frame: frames.RstStreamFrame) -> None:
        """Handle RST_STREAM: section 6.4."""
        self._check_not_idle(frame.stream_id, "RST_STREAM")
        stream = self.streams.get(frame.stream_id)
        if stream is None:
            return
        # Clients reset a stream whose response came before the end of their request. As the call
        # has ended, that costs no more than the end of the request.
        if not self._is_client and not stream.sent_end and not self._resets.spend():
            raise flood_error(f"more than {limits.MAX_RESETS} reset streams")
        code = frame.error_code
        known = _ERROR_CODES.get(code)
        name = f"error {code}" if known is None else known.name
        self._drop_stream(stream)
        # Section 7: an unknown code may be taken for INTERNAL_ERROR.
        error = Http2Error(
            ErrorCode.INTERNAL_ERROR if known is None else known,
            f"the peer reset the stream: {name}",
            stream.id,
        )
        self._tell(events.StreamReset(stream, error, by_peer=True))

    def _handle_window_update(self, frame: frames.WindowUpdateFrame) -> None:
        """Handle WINDOW_UPDATE: section 6.9."""
        increment = frame.increment
        if not frame.stream_id:
            was_open = self._send_window > 0  # then nobody waits for it
            self._send_window += increment
            if self._send_window > frames.MAX_WINDOW_SIZE:
                raise _window_overflow(0)
            if not was_open:
                self._tell_all_windows_opened()
            return
        stream = self.streams.get(frame.stream_id)
        if stream is None:
            self._check_not_idle(frame.stream_id, "WINDOW_UPDATE")
            return
        was_open = stream.send_window > 0
        stream.send_window += increment
        if stream.send_window > frames.MAX_WINDOW_SIZE:
            raise _window_overflow(stream.id)
        if stream.send_window > 0 and not (was_open or stream.sent_end):
            self._tell(events.WindowOpened(stream))

    def _handle_settings(self, frame: frames.SettingsFrame) -> None:
        """Handle SETTINGS: section 6.5."""
        if frame.ack:
            self.settings_acknowledged = True
            return
        self._work_left -= len(frame.values) // limits.SETTINGS_PER_WORK
        initial_window = self._initial_send_window
        for identifier, value in frame.values:
            if identifier == frames.INITIAL_WINDOW_SIZE:
                initial_window = value
            elif identifier == frames.MAX_FRAME_SIZE:
                self._max_send_frame = value
            elif identifier == frames.HEADER_TABLE_SIZE:
                self._encoder.limit_table(value)
            elif identifier == frames.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
            elif identifier == frames.ENABLE_PUSH and value and self._is_client:
                raise protocol_error("a server must not enable push")  # section 6.5.2
        if initial_window != self._initial_send_window:
            # Once for all values of a frame: it costs a step for each stream.
            self._set_initial_send_window(initial_window)
        self.output.append(frames.SETTINGS_ACK)
        self._tell(frame)

    def _set_initial_send_window(self, size: int) -> None:
        """Change the windows of all streams by the difference: section 6.9.2."""
        self._work_left -= len(self.streams) // limits.STREAMS_PER_WORK
        difference = size - self._initial_send_window
        self._initial_send_window = size
        for stream in self.streams.values():
            stream.send_window += difference
            if stream.send_window > frames.MAX_WINDOW_SIZE:
                raise _window_overflow(0)
        if difference > 0:
            self._tell_all_windows_opened()

    def _tell_all_windows_opened(self) -> None:
        self._work_left -= len(self.streams) // limits.STREAMS_PER_WORK
        self._tell(events.WindowOpened(None))

    def _handle_goaway(self, frame: frames.GoAwayFrame) -> None:
        """Handle GOAWAY: section 6.8."""
        self.going_away = True
        last = frame.last_stream_id
        self._tell(frame)
        if not self._is_client:
            return
        for stream in [each for each in self.streams.values() if each.id > last]:
            # They were not processed, and can be sent again.
            self._drop_stream(stream)
            error = Http2Error(ErrorCode.REFUSED_STREAM, "the peer is going away", stream.id)
            self._tell(events.StreamReset(stream, error, by_peer=True))

    def _fail_stream(self, error: Http2Error) -> None:
        """Reset a stream on which the peer broke the protocol: section 5.4.2."""
        stream_id = error.stream_id
        if self._is_idle(stream_id):
            raise Http2Error(error.code, error.reason)
        if not self._resets.spend():
            raise flood_error(f"more than {limits.MAX_RESETS} broken streams")
        if stream_id in self._reset_ids:
            return
        stream = self.streams.get(stream_id)
        self.output.append(frames.encode_rst_stream(stream_id, error.code))
        self._remember_reset(stream_id)
        if stream is not None:
            had_headers = stream.has_headers or self._is_client
            self._drop_stream(stream)
            if had_headers:  # else nobody knows of it
                self._tell(events.StreamReset(stream, error, by_peer=False))
                return
        self._tell(events.StreamRefused(error))

    # --------------------------------------------------------------------------------- sending

    def take_output(self) -> list[bytes | memoryview]:
        """Return what is to be sent, once."""
        output = self.output
        self.output = []
        return output

    @property
    def can_open_stream(self) -> bool:
        """Whether the peer lets this end, a client, open one more stream."""
        return (
            not self.going_away
            and len(self.streams) < self.peer_max_streams
            and self._next_id <= frames.MAX_WINDOW_SIZE
        )

    def open_stream(self) -> Stream:
        """Open a stream for a request; only if ``can_open_stream``.

        Its headers must be sent before those of the next one: section 5.1.1.
        """
        with self._guard:
            assert self._is_client
            stream_id = self._next_id
            self._next_id = stream_id + 2
            return self._add_stream(stream_id)

    def send_headers(
        self,
        stream: Stream,
        fields: tuple[Header, ...],
        end_stream: bool,
    ) -> None:
        """Send the headers or the trailers of a message, with names in lower case.

        Those of a request begin with its method.
        """
        with self._guard:
            if stream.is_reset or stream.sent_end:
                return
            if not stream.sent_headers:
                stream.sent_headers = True
                stream.is_head = self._is_client and fields[0] == _HEAD
            block = self._encoder.encode(fields)
            self.output.append(
                frames.encode_headers(stream.id, block, end_stream, self._max_send_frame)
            )
            if end_stream:
                self._end_sent(stream)

    def sendable(self, stream: Stream) -> int:
        """Return how many bytes of data can be sent now on a stream."""
        return max(0, min(stream.send_window, self._send_window))

    def send_data(self, stream: Stream, data: bytes | memoryview, end_stream: bool) -> int:
        """Send as much data as the windows allow; return how much that was.

        ``end_stream`` ends the message if that was all.
        """
        with self._guard:
            if stream.is_reset or stream.sent_end:
                return 0
            size = len(data)
            allowed = min(size, self.sendable(stream))
            if allowed < size:
                if allowed < limits.TINY_FRAME and allowed and not self._tiny.spend():
                    # Raised at the next event: the peer has to open its window again.
                    self._failure = flood_error(
                        f"more than {limits.MAX_TINY_FRAMES} windows of a few bytes"
                    )
                    return 0
                end_stream = False
            stream.send_window -= allowed
            self._send_window -= allowed
            self._tiny.earn(allowed / limits.TINY_FRAME)
            position = 0
            while True:
                length = min(allowed - position, self._max_send_frame)
                is_last = position + length == allowed
                if length or end_stream:
                    self._control.earn(limits.CONTROL_FRAMES_PER_MESSAGE)
                    self.output.append(
                        frames.encode_data_header(stream.id, length, end_stream and is_last)
                    )
                if length:
                    if length == size:
                        self.output.append(data)
                    else:
                        self.output.append(memoryview(data)[position : position + length])
                position += length
                if is_last:
                    break
            if end_stream:
                self._end_sent(stream)
            return allowed

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream, unless it is closed; its late frames are ignored."""
        with self._guard:
            if stream.closed or stream.id not in self.streams:
                return
            if stream.sent_headers or not self._is_client:  # else the peer does not know of it
                self.output.append(frames.encode_rst_stream(stream.id, code))
                self._remember_reset(stream.id)
            self._drop_stream(stream)

    def ping(self, data: bytes) -> None:
        """Send a PING with 8 bytes."""
        with self._guard:
            self.output.append(frames.encode_ping(data))

    def announce_shutdown(self) -> None:
        """Tell a client to open no more streams; those on their way are still accepted."""
        with self._guard:
            self.output.append(frames.encode_goaway(frames.MAX_WINDOW_SIZE, ErrorCode.NO_ERROR))

    def shut_down(self) -> None:
        """Accept no more streams; open ones can finish: section 6.8."""
        with self._guard:
            if not self.going_away or self._last_accepted_id == frames.MAX_WINDOW_SIZE:
                self.going_away = True
                self._last_accepted_id = max(0, self._last_id)
                self.output.append(frames.encode_goaway(self._last_accepted_id, ErrorCode.NO_ERROR))

    def close(self, code: ErrorCode, reason: str = "") -> None:
        """Tell the peer why the connection is closed, and close all streams."""
        with self._guard:
            if self._closed:
                return
            self.going_away = True
            self.ignore_received()
            # Section 6.8: not more than in an earlier GOAWAY.
            last_id = min(max(0, self._last_id), self._last_accepted_id)
            self.output.append(frames.encode_goaway(last_id, code, reason.encode()[:_MAX_REASON]))
            for stream in self.streams.values():
                stream.is_reset = True
            self.streams.clear()

    def _open_window(self, stream: Stream | None, increment: int) -> None:
        if increment:
            stream_id = 0 if stream is None else stream.id
            self.output.append(frames.encode_window_update(stream_id, increment))

    def _end_sent(self, stream: Stream) -> None:
        stream.sent_end = True
        if stream.received_end:
            self.streams.pop(stream.id, None)

    def _drop_stream(self, stream: Stream) -> None:
        """Forget a stream that is reset; other streams may send as much as it has not used."""
        self._open_window(None, self._receive_window.use(stream.receive_window.unused))
        stream.is_reset = True
        self.streams.pop(stream.id, None)

    def _remember_reset(self, stream_id: int) -> None:
        reset_ids = self._reset_ids
        reset_ids[stream_id] = None
        if len(reset_ids) > _MAX_RESET_IDS:
            del reset_ids[next(iter(reset_ids))]


def _window_overflow(stream_id: int) -> Http2Error:
    return Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes", stream_id)
