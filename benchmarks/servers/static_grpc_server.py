"""A gRPC server with prepared responses: one response message for each request message.

It never looks at a request beyond the length of each message, so it is much faster than a proxy.
It obeys the windows of its clients, and takes frames of up to 4 MiB, as servers on gRPC's C-core
do.

Usage: python -m benchmarks.servers.static_grpc_server; it prints three ports. The first responds
to ModelInfer with ``SMALL`` FP32 values, the second with ``LARGE``, the third to ModelStreamInfer
with ``SMALL``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

import uvloop

from benchmarks.harness.client import HOST
from benchmarks.harness.grpc_messages import PREFIX_SIZE, infer_response, stream_response
from benchmarks.harness.http2_frames import (
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameProtocol,
    data_head,
    frame,
    header_block,
    opening,
    settings_of,
)
from benchmarks.harness.requests import normal

SMALL, LARGE = 16, 150_528

_BACKLOG = 4096
_FRAME_SIZE = 4 * 1024 * 1024
_HEADERS = header_block([(":status", "200"), ("content-type", "application/grpc")])
_TRAILERS = header_block([("grpc-status", "0")])


@dataclass(slots=True)
class _Stream:
    """A call: what is missing of the current message, and what has to be sent."""

    id: int
    window: int
    prefix: bytes = b""
    left: int = 0
    began: bool = False
    ended: bool = False
    unsent: list[memoryview] = field(default_factory=list)


class _Connection(FrameProtocol):
    def __init__(self, message: bytes) -> None:
        super().__init__()
        self._message = memoryview(message)
        self._streams: dict[int, _Stream] = {}
        self._window = self._stream_window = DEFAULT_WINDOW
        self._frame_size = DEFAULT_FRAME_SIZE
        self._preface_left = len(PREFACE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.output.append(opening(_FRAME_SIZE))
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._preface_left:
            skipped = min(self._preface_left, len(data))
            self._preface_left -= skipped
            data = data[skipped:]
        super().data_received(data)

    def receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            self._streams[stream] = _Stream(stream, self._stream_window)
        elif kind == WINDOW_UPDATE:
            self._open_window(stream, int.from_bytes(payload))
        elif kind == SETTINGS:
            values = settings_of(payload)
            self._stream_window = values.get(INITIAL_WINDOW_SIZE, self._stream_window)
            self._frame_size = values.get(MAX_FRAME_SIZE, self._frame_size)
        elif kind == RST_STREAM:
            self._streams.pop(stream, None)

    def _open_window(self, stream_id: int, increment: int) -> None:
        if not stream_id:
            self._window += increment
            for stream in [each for each in self._streams.values() if each.unsent]:
                self._send(stream)
        elif (found := self._streams.get(stream_id)) is not None:
            found.window += increment
            self._send(found)

    def receive_data(self, stream: int, data: bytes, start: int, end: int, ended: bool) -> None:
        call = self._streams.get(stream)
        if call is None:
            return
        while start < end:
            if call.left:
                size = min(call.left, end - start)
                call.left -= size
                start += size
            else:
                missing = PREFIX_SIZE - len(call.prefix)
                call.prefix += data[start : min(end, start + missing)]
                start += missing
                if len(call.prefix) < PREFIX_SIZE:
                    break
                call.left = int.from_bytes(call.prefix[1:])
                call.prefix = b""
            if not call.left:
                self._respond(call)
        call.ended = ended
        if call.unsent or ended:
            self._send(call)

    def _respond(self, call: _Stream) -> None:
        if not call.began:
            call.began = True
            self.output.append(frame(HEADERS, END_HEADERS, call.id, _HEADERS))
        call.unsent.append(self._message)

    def _send(self, call: _Stream) -> None:
        while call.unsent:
            message = call.unsent[0]
            size = min(len(message), call.window, self._window, self._frame_size)
            if size <= 0:
                return
            call.window -= size
            self._window -= size
            self.output += [data_head(size, call.id), message[:size]]
            if size < len(message):
                call.unsent[0] = message[size:]
            else:
                del call.unsent[0]
        if call.ended:
            flags = END_HEADERS | END_STREAM
            self.output.append(frame(HEADERS, flags, call.id, _TRAILERS))
            del self._streams[call.id]


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    servers = []
    small, large = normal(SMALL), normal(LARGE)
    for message in (infer_response(small), infer_response(large), stream_response(small)):
        connection = partial(_Connection, message)
        servers.append(await loop.create_server(connection, HOST, 0, backlog=_BACKLOG))
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(_serve())
