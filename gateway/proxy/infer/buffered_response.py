"""Infer responses that must be buffered: their header depends on what comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.protocol.messages import OutputEncoding
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation, run_steps
from gateway.proxy.body_io import Chunks, prepend, response_chunks, slices, write_all
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.infer.convert_buffered_response import has_requested_encoding, new_converter
from gateway.proxy.interfaces import ClientResponse, Destination
from gateway.proxy.passthrough import relay_response
from gateway.sizes import ENCODE_CHUNK
from gateway.upstream.transport import UpstreamResponse


@dataclass(frozen=True, slots=True)
class ResponseRelay:
    """A server's response on its way to the client, with the encoding that the client wants."""

    upstream_response: UpstreamResponse
    url: str
    response: ClientResponse
    encoding: OutputEncoding
    destination: Destination
    deadline: Deadline

    def chunks(self) -> Chunks:
        """Yield the body of the server's response."""
        return response_chunks(self.upstream_response, self.url, self.deadline)

    async def pass_untouched(self, chunks: Chunks | None = None) -> None:
        """Pass the response to the client as it arrives; ``chunks`` replace its body."""
        await relay_response(self.upstream_response, self.response, self.url, self.deadline, chunks)


async def relay_encoded(relay: ResponseRelay, chunks: Chunks, header_size: int | None) -> None:
    """Convert each output to the requested encoding.

    ``header_size`` is the size of the JSON before tensors, None without tensors.
    """
    destination = relay.destination
    converter = new_converter(header_size, relay.encoding, destination)
    scheduler = destination.scheduler
    with destination.memory_budget.reserve() as reservation:
        async for piece in slices(chunks, ENCODE_CHUNK, scheduler):
            converter.feed(piece)
            reservation.resize(converter.buffered_bytes)
            await run_steps(converter, reservation, scheduler)
        if header_size is None:
            converter.feed(b"", last=True)
            await run_steps(converter, reservation, scheduler)
        await _send(relay, *converter.finish())


async def relay_in_encoding(relay: ResponseRelay, chunks: Chunks, header_size: int | None) -> None:
    """Pass a response of status 200, converted unless it is in the requested encoding already.

    ``header_size`` is the size of the JSON before its tensors, None without tensors. Up to
    ``limits.max_inference_header_bytes`` of it are inspected before the client gets anything.
    """
    if header_size is None:
        await relay_encoded(relay, chunks, None)
        return
    destination = relay.destination
    with destination.memory_budget.reserve() as reservation:
        if header_size <= destination.limits.max_inference_header_bytes:
            first = await _read_first(chunks, header_size, reservation)
            chunks = prepend(first, chunks)
            header = b"".join(first)[:header_size]
            if has_requested_encoding(header, relay.encoding, destination):
                await relay.pass_untouched(chunks)
                return
        await relay_encoded(relay, chunks, header_size)


async def _send(relay: ResponseRelay, header: bytes, tensors: Sequence[bytes | memoryview]) -> None:
    """Send a header, with binary tensors behind it if there are any."""
    changed = {"Content-Type": "application/json"}
    if any(tensors):
        changed = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    headers = with_body(relay.upstream_response.headers, changed)
    headers["Content-Length"] = str(len(header) + sum(map(len, tensors)))
    await relay.response.start(200, relay.upstream_response.reason, headers)
    await write_all(relay.response, (header, *tensors), relay.deadline)
    await relay.response.finish()


async def _read_first(
    chunks: Chunks, size: int, reservation: Reservation
) -> list[bytes | memoryview]:
    """Read the first chunks, ``size`` bytes or more if there are so many."""
    first: list[bytes | memoryview] = []
    while size > 0 and (chunk := await anext(chunks, b"")):
        first.append(chunk)
        size -= len(chunk)
        reservation.grow(len(chunk))
    return first
