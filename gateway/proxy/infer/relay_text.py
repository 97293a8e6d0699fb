"""Sends the text of a response while it is converted."""

from __future__ import annotations

from collections import deque
from typing import Final

from gateway.codec.elements.encode import OffloadedText, TextChunk
from gateway.codec.v2.buffered_response import ConvertedResponse
from gateway.codec.v2.response import ResponseConverter
from gateway.errors import GatewayError, strip_tracebacks
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import Chunks, ResponseRelay
from gateway.proxy.headers import with_body
from gateway.sizes import CONVERT_CHUNK, ENCODE_CHUNK, MAX_FAST_RESPONSE

_MAX_QUEUED_PARTS: Final = 2
"""Parts of a response that wait for an offloaded part before them: up to 2 MiB of memory."""


async def send_converted(relay: ResponseRelay, converted: ConvertedResponse) -> None:
    """Send a converted response that is fully buffered."""
    changed = {} if converted.content_type is None else {"Content-Type": converted.content_type}
    if converted.header_size is not None:
        changed[HEADER_LENGTH] = str(converted.header_size)
    relay.response.record.response_elements = converted.elements
    headers = with_body(relay.upstream_response.headers, changed)
    await relay.send_body(converted.body, headers)


async def relay_text(relay: ResponseRelay, converter: ResponseConverter, chunks: Chunks) -> None:
    """Convert a response and send its text while it arrives; less than a chunk is sent at once.

    Threads may convert parts of it. Raises GatewayError (502, 406).
    """
    with relay.reserve() as reservation:
        await _TextRelay(relay, converter, reservation).run(chunks)


class _TextRelay:
    def __init__(
        self, relay: ResponseRelay, converter: ResponseConverter, reservation: Reservation
    ) -> None:
        self._relay = relay
        self._converter = converter
        self._reservation = reservation
        self._parts: deque[TextChunk | OffloadedText] = deque()
        """What is converted, or will be, in order."""
        self._waiting = bytearray()
        """Text of less than a chunk, which waits for more."""

    async def run(self, chunks: Chunks) -> None:
        """Convert and send everything."""
        failure: GatewayError | None = None
        try:
            await self._convert(chunks)
            rest = self._converter.finish()
        except GatewayError as error:
            failure = strip_tracebacks(error)
        if failure is not None:
            await self._check_parts()
            raise failure
        await self._send_finished(0)
        unscheduled = 0
        for text in rest:
            await self._send(text)
            unscheduled += len(text)
            if unscheduled >= ENCODE_CHUNK:
                unscheduled = 0
                await self._relay.destination.scheduler.next_slice()
        await self._end()

    async def _convert(self, chunks: Chunks) -> None:
        """Convert the chunks, and send what is finished.

        Time slices are taken by the bytes read, not by the text: buffered rows give no text for a
        long time, a server's data may all be there without a pause, and to send what threads have
        converted takes time, too.
        """
        destination, converter = self._relay.destination, self._converter
        offloader = destination.offloader_for(self._relay.upstream_response.content_length)
        async for chunk in chunks:
            position = 0
            while position < len(chunk):
                end = position + self._piece_size()
                self._parts.extend(converter.parts(chunk[position:end], offloader))
                position = end
                self._reserve()
                await self._send_finished(_MAX_QUEUED_PARTS)
                await destination.scheduler.next_slice()

    def _piece_size(self) -> int:
        """Return the bytes of a response to convert at once: more if they are numbers alone."""
        if self._relay.form is not None:
            return ENCODE_CHUNK
        return MAX_FAST_RESPONSE if self._converter.has_only_numbers else CONVERT_CHUNK

    async def _check_parts(self) -> None:
        """Raise the error of the first part that has one: it stands before what follows it."""
        for part in self._parts:
            if isinstance(part, OffloadedText):
                await part.future.wait()
                part.text()

    def _reserve(self) -> None:
        # Text that waits is less than a chunk.
        buffered = CONVERT_CHUNK + self._converter.buffered_bytes
        for part in self._parts:
            # What is offloaded becomes up to four times as many bytes.
            buffered += 5 * part.size if isinstance(part, OffloadedText) else len(part)
        if self._relay.response.started:
            self._reservation.resize_unchecked(buffered)
        else:
            self._reservation.resize(buffered)

    async def _send_finished(self, max_left: int) -> None:
        """Send the finished parts in order, and wait for parts beyond ``max_left``."""
        while self._parts:
            part = self._parts[0]
            if isinstance(part, OffloadedText):
                if not part.future.done:
                    if len(self._parts) <= max_left:
                        return
                    await part.future.wait()
                text = part.text()
            else:
                text = part
            self._parts.popleft()
            await self._send(text)

    async def _send(self, text: TextChunk) -> None:
        """Send text, once it is a chunk; a large one is not copied."""
        if self._waiting or len(text) < CONVERT_CHUNK:
            self._waiting += text
            if len(self._waiting) < CONVERT_CHUNK:
                return
            text = bytes(self._waiting)
            self._waiting.clear()
        relay = self._relay
        if not relay.response.started:
            # The head is read by now, unless there is not even text before the first output.
            relay.response.record.response_elements = self._converter.element_count
            changed = {"Content-Type": "application/json"}
            await relay.start(with_body(relay.upstream_response.headers, changed))
        relay.deadline.expect_client()
        await relay.response.write(text)

    async def _end(self) -> None:
        """End the response; text of less than a chunk is all of it if nothing was sent."""
        relay, text = self._relay, bytes(self._waiting)
        if not relay.response.started:
            elements = self._converter.element_count
            await send_converted(relay, ConvertedResponse(text, elements=elements))
            return
        if text:
            relay.deadline.expect_client()
            await relay.response.write(text)
        await relay.response.finish()
