"""Sends the tensors of a call through the shared memory of its endpoint, where there is any."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from mmap import mmap
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.contents import Chunks
from gateway.codec.v2.shared_memory import Place
from gateway.errors import name_server_in_errors
from gateway.http1.head import ResponseHead, parse_lines
from gateway.observe.call_record import CallRecord
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.request_slice import RequestSlice
from gateway.proxy.attempts.attempt import Attempt
from gateway.proxy.attempts.shared_memory_forms import (
    FAILED,
    NOT_FOUND,
    SharedMemoryForm,
    WrittenRequest,
)
from gateway.sizes import MAX_SERVER_DOCUMENT
from gateway.system.buffers import MAX_WINDOW
from gateway.system.shared_memory import Slice
from gateway.system.time_slices import split
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
_UNSUITABLE, _FORGOTTEN, STALE = "unsuitable", "forgotten", "stale"
"""Why tensors go over the socket: see docs/guide/metrics.md."""
_OK: Final = 200


class SharedMemoryAttempt:
    """The slices of one attempt: where the tensors of its request go, and those of its response.

    ``model`` names the model. Inputs and outputs choose each for itself, by their size; ``take``
    gives them slices, and ``end_call`` gives these back, whatever has become of the attempt.
    """

    def __init__(
        self,
        lane: SharedMemory,
        form: SharedMemoryForm,
        model: str,
        placed: RequestSlice | None = None,
    ) -> None:
        self.lane: Final = lane
        self.form: Final = form
        tensors = self._tensors = form.tensors
        self._model: Final = model
        self._placed: Slice | None = None
        """The slice that the request was received into, if the inputs are there."""
        self._start = 0
        """Where they begin in it."""
        if placed is not None and placed.lane is lane:
            start = tensors.start_in(placed.view)
            if start is not None:
                self._placed, self._start = placed.taken, placed.first + start
        self.inputs: Slice | None = None
        self.outputs: Slice | None = None
        self._reasons: dict[str, str] = {}
        """Why inputs, and outputs, are not in a slice; empty if they are."""

    @property
    def slices(self) -> list[Slice]:
        """Return the slices that it has."""
        return [each for each in (self.inputs, self.outputs) if each is not None]

    def take_inputs(self) -> bool:
        """Take a slice for the inputs, if there is one; tell whether to copy them into it."""
        if self._placed is not None and self._tensors.input_size:
            self.inputs, self._reasons["inputs"] = self._placed, ""
            return False
        self.inputs = self._take("inputs", self._tensors.input_size, "")
        return self.inputs is not None

    @property
    def input_data(self) -> memoryview:
        """Return the memory of the inputs, which are in a slice."""
        assert self.inputs is not None
        start = self._input_start
        return self.inputs.view[start : start + self._tensors.input_size]

    @property
    def _input_start(self) -> int:
        return self._start if self.inputs is self._placed else 0

    def copy_inputs(self) -> Iterator[None]:
        """Copy buffered inputs into their slice, at each step as much as in one time slice."""
        assert isinstance(self._tensors.data, Sequence)
        rest = self.input_data
        for piece in self._tensors.data:
            for part in split(memoryview(piece), _COPIED_AT_ONCE):
                rest = _fill_start(rest, part)
                yield

    def take_outputs(self) -> None:
        """Take a slice for the outputs, if there is one for them."""
        data = self._tensors.data
        if self.inputs is not None or (isinstance(data, Sequence) and not _is_lent(data)):
            self.outputs = self._take("outputs", self._tensors.output_size, self._model)
        else:
            # The body is streamed as it was written. Or it is in memory of this call: a request
            # with slices is sent to its end, even if its call is over.
            self._reasons["outputs"] = _UNSUITABLE

    def _take(self, tensors: str, size: int, model: str) -> Slice | None:
        lane = self.lane
        taken, reason = None, ""
        if not size or not lane.is_certain(model):
            reason = _UNSUITABLE
        elif size < lane.min_bytes:
            reason = _SMALL
        elif (taken := lane.take(size)) is None:
            reason = _FULL if lane.size else _UNAVAILABLE
        self._reasons[tensors] = reason
        return taken

    def write(self) -> WrittenRequest:
        """Return the request without the tensors that are in slices."""
        return self.form.write(_place(self.inputs, self._input_start), _place(self.outputs))

    def goes_over_socket(self, status: int, text: bytes | memoryview, record: CallRecord) -> bool:
        """Learn from an error; tell whether the server did not know the region: nothing ran then.

        The request can be sent over the socket.
        """
        # It names the region that it does not know, before it runs the model.
        if status not in (NOT_FOUND, FAILED):
            return False
        text = bytes(text)
        named = [each.region for each in self.slices if each.region.encode() in text]
        if status == NOT_FOUND and named:
            self.lane.forget_region(max(named, key=len))  # one may be the start of another
            self.give_up(_FORGOTTEN, record)
            return True
        if status == FAILED and self.outputs is not None and _SLICE_TOO_SMALL in text:
            self.lane.distrust(self._model)
        return False

    def give_up(self, why: str, record: CallRecord) -> None:
        """Note that the tensors that were in slices go over the socket, and why."""
        self._reasons = {each: reason or why for each, reason in self._reasons.items()}
        record.forget_attempt()

    def returns_much(self, status: int) -> bool:
        """Tell whether outputs of a response take more than a time slice to copy."""
        return status == _OK and self.outputs is not None and self.outputs.size > MAX_WINDOW

    def read_response(
        self, status: int, head: ResponseHead, document: bytes | memoryview
    ) -> tuple[ResponseHead, bytes | memoryview]:
        """Return head and body of a complete response as they are without shared memory.

        The body is copied: it may be written to its client when another call has the slice. Raises
        GatewayError as ``read_outputs``.
        """
        if self.outputs is None or status != _OK:
            return head, document
        body = self.read_outputs(bytes(document))
        return self.form.complete_head(head, body), b"".join(body)

    def read_outputs(self, document: bytes) -> Chunks:
        """Return a body with its outputs; see ``SharedMemoryForm.read_outputs``."""
        assert self.outputs is not None
        return self.form.read_outputs(document, self.outputs.view)

    def tell(self, record: CallRecord) -> None:
        """Record how the tensors went."""
        for tensors, reason in self._reasons.items():
            record.add_lane(tensors, reason)

    def end_call(self) -> None:
        """Give back the slices; the server may still hold some."""
        slices, self.inputs, self.outputs = self.slices, None, None
        for each in slices:
            if each is not self._placed:  # the client's call gives that back
                each.end_call()


class SharedMemoryCall:
    """The tensors of a streamed call, at whatever endpoints it is tried.

    ``request`` is what goes over the socket; once the inputs are in a slice, its body is there, so
    that another endpoint can get it: slices stay until ``release``. Large copies take time slices
    of ``scheduler``. Outputs are read from their slice if it ``lends_memory``, else copied.
    """

    def __init__(
        self,
        request: UpstreamRequest,
        form: SharedMemoryForm,
        model: str,
        scheduler: ConversionScheduler,
        placed: RequestSlice | None = None,
        lends_memory: bool = False,
    ) -> None:
        self.request = request
        self._lends_memory: Final = lends_memory
        self._placed: Final = placed
        self._form: Final = form
        self._model: Final = model
        self._scheduler: Final = scheduler
        self._attempts: list[SharedMemoryAttempt] = []

    def release(self) -> None:
        """Give back all slices; the server may still hold some."""
        attempts, self._attempts = self._attempts, []
        for each in attempts:
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
        shared = SharedMemoryAttempt(lane, self._form, self._model, self._placed)
        self._attempts.append(shared)
        try:
            is_copied = shared.take_inputs()
            if shared.inputs is not None:
                await self._fill(shared, on_start, on_piece, is_copied)
            shared.take_outputs()
            if not shared.slices:
                return None
            return await self._send(shared, attempt, send)
        finally:
            shared.tell(attempt.record)

    async def _send(
        self, shared: SharedMemoryAttempt, attempt: Attempt, send: SendRequest
    ) -> UpstreamResponse | None:
        try:
            response = await send(self._write(shared), shared.slices)
        except StaleConnectionError:
            if not self.request.is_idempotent:
                raise
            # The first one may still run, and write to the slices: they stay in quarantine.
            shared.give_up(STALE, attempt.record)
            return None
        if shared.inputs is not None:
            attempt.record.sent_bytes += self._form.tensors.input_size
        return await finish_response(response, shared, attempt, self._lends_memory)

    async def _fill(
        self,
        shared: SharedMemoryAttempt,
        on_start: Callable[[], None],
        on_piece: Callable[[bytes | memoryview], None],
        is_copied: bool,
    ) -> None:
        """Read the inputs, and copy them into a slice if they do not come there by themselves."""
        inputs, data = shared.input_data, self._form.tensors.data
        if isinstance(data, Sequence):
            for _ in shared.copy_inputs() if is_copied else ():
                if len(inputs) > _COPIED_AT_ONCE:
                    await self._scheduler.next_slice()  # the event loop is for other calls, too
            return
        rest = inputs
        on_start()
        async for piece in data:
            on_piece(piece)
            if is_copied:
                rest = _fill_start(rest, piece)
        on_piece(b"")
        self.request = replace(self.request, body=self._form.set_inputs(inputs))

    def _write(self, shared: SharedMemoryAttempt) -> UpstreamRequest:
        template, lines, body = shared.write()
        headers = CIMultiDict([*template.headers, *parse_lines(lines)])
        # The connection does not send it again after a close: see ``STALE``.
        return replace(self.request, headers=headers, body=body, is_idempotent=False)


async def finish_response(
    response: UpstreamResponse, shared: SharedMemoryAttempt, attempt: Attempt, lends_memory: bool
) -> UpstreamResponse | None:
    """Return a response as it is without shared memory; see ``UpstreamResponse.lends_memory``.

    None if the server did not know the region: nothing ran then. The response is closed on errors.
    Raises GatewayError (502) if the outputs are not where they were asked for.
    """
    with closed_on_error(response), name_server_in_errors(attempt.endpoint.name):
        response, status, error = await shared.form.receive_error(response)
        if shared.goes_over_socket(status, error, attempt.record):
            response.close()
            return None
        if shared.outputs is not None and status == _OK:
            body = shared.read_outputs(await _read_document(response))
            headers = shared.form.complete_headers(response.headers, body)
            return _OutputsResponse(response, headers, body, lends_memory)
    return response


async def _read_document(response: UpstreamResponse) -> bytes:
    document = bytearray()
    while piece := await response.read():
        document += piece
        if len(document) > MAX_SERVER_DOCUMENT:
            break
    return bytes(document)


def _place(taken: Slice | None, start: int = 0) -> Place | None:
    return None if taken is None else Place(taken.region, taken.offset + start)


def _is_lent(data: Sequence[bytes | memoryview]) -> bool:
    """Tell whether some of the data are in a slice."""
    return any(isinstance(x, memoryview) and isinstance(x.obj, mmap) for x in data)


def _fill_start(memory: memoryview, piece: bytes | memoryview) -> memoryview:
    """Copy a piece to the start of the memory; return the rest of that."""
    memory[: len(piece)] = piece
    return memory[len(piece) :]


class _OutputsResponse(WrappedResponse):
    """A response whose outputs are in a slice; ``body`` has views of them."""

    def __init__(
        self,
        response: UpstreamResponse,
        headers: CIMultiDict[str],
        body: Sequence[bytes | memoryview],
        lends_memory: bool,
    ) -> None:
        super().__init__(response)
        self.lends_memory = lends_memory
        self.headers = CIMultiDictProxy(headers)
        self._pieces = deque(part for each in body for part in split(memoryview(each), MAX_WINDOW))
        self._size = sum(map(len, body))
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
        """Return the next piece of the body, copied unless the memory is lent.

        Its reader may write it when the call is over: the slice may have another call's bytes then.
        """
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self._read_bytes += len(piece)
        return piece if self.lends_memory else bytes(piece)
