"""Sends the tensors of a call through the shared memory of its endpoint, where there is any."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.v2.shared_memory import Place, SharedTensors
from gateway.errors import name_server_in_errors
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.attempts.attempt import Attempt
from gateway.sizes import MAX_SERVER_DOCUMENT
from gateway.system.buffers import MAX_WINDOW
from gateway.system.shared_memory import Slice
from gateway.upstream.http.connection import StaleConnectionError
from gateway.upstream.transport import (
    SharedMemory,
    UpstreamRequest,
    UpstreamResponse,
    WrappedResponse,
    closed_on_error,
)

SendRequest = Callable[[UpstreamRequest, Sequence[Slice]], Awaitable[UpstreamResponse]]
"""Sends a request whose tensors are in slices; see ``SharedMemoryLane.send``."""

_COPIED_AT_ONCE: Final = 1024 * 1024
"""Bytes that are copied in one time slice: that takes some 0.1 ms."""
_SLICE_TOO_SMALL: Final = b"shared memory"
_SMALL, _FULL, _UNAVAILABLE = "small", "full", "unavailable"
_UNSUITABLE, _FORGOTTEN, _STALE = "unsuitable", "forgotten", "stale"
"""Why tensors go over the socket: see docs/guide/metrics.md."""
_OK: Final = 200
_NOT_FOUND, _FAILED = 404, 500


class SharedMemoryCall:
    """The slices of a call, at whatever endpoints it is tried; ``release`` gives them back.

    ``request`` is what goes over the socket; once the inputs are in a slice, its body is there, so
    that another endpoint can get it.
    """

    def __init__(self, request: UpstreamRequest, tensors: SharedTensors, model: str) -> None:
        self.request = request
        self._tensors = tensors
        self._model = model
        self._slices: list[Slice] = []
        self._reasons: dict[str, str] = {}
        """Why inputs, and outputs, are not in a slice of this attempt; empty if they are."""

    def release(self) -> None:
        """Give back all slices; the server may still hold some."""
        slices, self._slices = self._slices, []
        for each in slices:
            each.end_call()

    async def try_send(
        self,
        attempt: Attempt,
        lane: SharedMemory,
        send: SendRequest,
        on_start: Callable[[], None],
        on_piece: Callable[[bytes | memoryview], None],
    ) -> UpstreamResponse | None:
        """Send the request with its tensors in shared memory; None if there is none for them.

        ``on_start`` is called before a streamed body is read, and ``on_piece`` with each piece of
        it, and an empty one at its end. Raises what the body and ``send`` raise, and GatewayError
        (502).
        """
        self._reasons = {}
        try:
            return await self._try_send(attempt, lane, send, on_start, on_piece)
        finally:
            for tensors, reason in self._reasons.items():
                attempt.record.add_lane(tensors, reason)

    async def _try_send(
        self,
        attempt: Attempt,
        lane: SharedMemory,
        send: SendRequest,
        on_start: Callable[[], None],
        on_piece: Callable[[bytes | memoryview], None],
    ) -> UpstreamResponse | None:
        inputs = await self._place_inputs(lane, on_start, on_piece)
        outputs = None
        if inputs is not None or isinstance(self._tensors.data, Sequence):
            outputs = self._take(lane, "outputs", self._tensors.output_size, self._model)
        else:
            self._reasons["outputs"] = _UNSUITABLE  # the body is streamed as it was written
        used = [each for each in (inputs, outputs) if each is not None]
        if not used:
            return None
        try:
            response = await send(self._write(inputs, outputs), used)
        except StaleConnectionError:
            if not self.request.is_idempotent:
                raise
            # The first one may still run, and write to the slices: they stay in quarantine.
            self._go_over_socket(attempt, _STALE)
            return None
        if inputs is not None:
            attempt.record.sent_bytes += inputs.size
        with closed_on_error(response), name_server_in_errors(attempt.endpoint.name):
            if response.status in (_NOT_FOUND, _FAILED):
                return await self._read_error(response, attempt, lane, used)
            if outputs is not None and response.status == _OK:
                return await self._read_outputs(response, outputs)
        return response

    async def _read_error(
        self,
        response: UpstreamResponse,
        attempt: Attempt,
        lane: SharedMemory,
        used: Sequence[Slice],
    ) -> UpstreamResponse | None:
        """Return an error of the server; None if it does not know the region: nothing ran then."""
        replayed = _Replayed(response, bytes(await response.read()))
        # It names the region that it does not know, before it runs the model.
        if response.status == _NOT_FOUND and used[0].region.encode() in replayed.start:
            response.close()
            lane.forget_region(used[0].region)
            self._go_over_socket(attempt, _FORGOTTEN)
            return None
        if not self._reasons["outputs"] and _SLICE_TOO_SMALL in replayed.start:
            lane.distrust(self._model)
        return replayed

    def _go_over_socket(self, attempt: Attempt, why: str) -> None:
        self._reasons = {each: reason or why for each, reason in self._reasons.items()}
        attempt.record.forget_attempt()

    async def _place_inputs(
        self,
        lane: SharedMemory,
        on_start: Callable[[], None],
        on_piece: Callable[[bytes | memoryview], None],
    ) -> Slice | None:
        """Copy the inputs into a slice of this lane: the one copy after the kernel's."""
        tensors, size = self._tensors, self._tensors.input_size
        taken = self._take(lane, "inputs", size)
        if taken is None:
            return None
        position = 0

        def write(piece: bytes | memoryview) -> None:
            nonlocal position
            taken.view[position : position + len(piece)] = piece
            position += len(piece)

        if isinstance(tensors.data, Sequence):
            for piece in tensors.data:
                for part in _split(piece, _COPIED_AT_ONCE):
                    write(part)
                    if size > _COPIED_AT_ONCE:
                        await asyncio.sleep(0)  # the event loop is for other calls, too
        else:
            on_start()
            async for piece in tensors.data:
                on_piece(piece)
                write(piece)
            on_piece(b"")
            tensors.data = [taken.view]
            self.request = replace(self.request, body=[tensors.binary_header, taken.view])
        return taken

    def _take(self, lane: SharedMemory, tensors: str, size: int, model: str = "") -> Slice | None:
        taken, reason = None, ""
        if not size or not lane.is_certain(model):
            reason = _UNSUITABLE
        elif size < lane.min_bytes:
            reason = _SMALL
        elif (taken := lane.take(size)) is not None:
            self._slices.append(taken)
        else:
            reason = _FULL if lane.size else _UNAVAILABLE
        self._reasons[tensors] = reason
        return taken

    def _write(self, inputs: Slice | None, outputs: Slice | None) -> UpstreamRequest:
        header = self._tensors.write_header(_place(inputs), _place(outputs))
        headers = self.request.headers.copy()
        headers.popall(HEADER_LENGTH, None)
        headers["Content-Type"] = "application/json"
        body: list[bytes | memoryview] = [header]
        if inputs is None:
            # They are few, or there was no room for them.
            headers["Content-Type"] = "application/octet-stream"
            headers[HEADER_LENGTH] = str(len(header))
            assert isinstance(self._tensors.data, Sequence)
            body += self._tensors.data
        headers["Content-Length"] = str(sum(map(len, body)))
        if outputs is not None:
            headers.popall("Accept-Encoding", None)
        # The connection does not send it again after a close: see ``_STALE``.
        return replace(self.request, headers=headers, body=body, is_idempotent=False)

    async def _read_outputs(self, response: UpstreamResponse, outputs: Slice) -> UpstreamResponse:
        document = bytearray()
        while piece := await response.read():
            document += piece
            if len(document) > MAX_SERVER_DOCUMENT:
                break
        header, data = self._tensors.read_response(bytes(document), outputs.view)
        return _OutputsResponse(response, header, data)


def _place(taken: Slice | None) -> Place | None:
    return None if taken is None else Place(taken.region, taken.offset)


class _Replayed(WrappedResponse):
    """A response whose start was read."""

    def __init__(self, response: UpstreamResponse, start: bytes) -> None:
        super().__init__(response)
        self.start: Final = start
        self._is_read = False

    @property
    def error(self) -> str:
        """Return the status and the message of an error; see UpstreamResponse."""
        return self._response.error

    async def read(self) -> bytes | memoryview:
        if not self._is_read:
            self._is_read = True
            if self.start:
                return self.start
        return await self._response.read()


class _OutputsResponse(WrappedResponse):
    """A response in the binary form, whose data are in a slice."""

    def __init__(
        self, response: UpstreamResponse, header: bytes, data: Sequence[memoryview]
    ) -> None:
        super().__init__(response)
        size = len(header) + sum(map(len, data))
        headers = CIMultiDict(response.headers)
        headers.popall("Transfer-Encoding", None)
        headers["Content-Type"] = "application/octet-stream"
        headers["Content-Length"] = str(size)
        headers[HEADER_LENGTH] = str(len(header))
        self.headers = CIMultiDictProxy(headers)
        pieces = [part for each in data for part in _split(each, MAX_WINDOW)]
        self._pieces = deque([header, *pieces])
        self._size = size
        self._read_bytes = 0

    @property
    def content_length(self) -> int | None:
        """Return the size of the body."""
        return self._size

    @property
    def received_bytes(self) -> int:
        """Return the bytes of the body that were read so far."""
        return self._read_bytes

    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body, copied: its reader may write it when the call is over.

        The slice may have another call's bytes by then.
        """
        piece = bytes(self._pieces.popleft()) if self._pieces else b""
        self._read_bytes += len(piece)
        return piece


def _split(piece: bytes | memoryview, size: int) -> Iterator[bytes | memoryview]:
    whole = memoryview(piece)
    return (whole[start : start + size] for start in range(0, len(whole), size))
