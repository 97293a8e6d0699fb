"""Converts the responses of servers into the encoding that the client wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from gateway.codec.elements.encode import OffloadedText, TextChunk
from gateway.codec.json.header_length_check import HeaderLengthCheck
from gateway.errors import GatewayError
from gateway.protocol.response_header import check_no_binary_outputs
from gateway.proxy.body_io import Chunks, read_response, slices, write
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.infer.buffered_response import (
    ResponseRelay,
    relay_encoded,
    relay_in_encoding,
)
from gateway.proxy.infer.convert_buffered_response import (
    becomes_json,
    convert_buffered_response,
    convert_large_response,
    destination_with_base64,
    name_endpoint,
    new_json_converter,
    parse_header_size,
    passes_untouched,
    with_empty_data,
)
from gateway.proxy.passthrough import relay_rewritten
from gateway.sizes import CONVERT_CHUNK, MAX_FAST_RESPONSE
from gateway.upstream.transport import UpstreamResponse

_MAX_QUEUED_PARTS = 10
"""Parts of a response, and commas, that wait for an offloaded part before them."""


async def convert_response(relay: ResponseRelay) -> None:
    """Convert a server's response into the client's encoding; errors pass untouched.

    A response that is in that encoding already passes untouched, too. A small response is
    converted at once, a larger one while it arrives.
    """
    response, destination = relay.upstream_response, relay.destination
    size = response.content_length
    with name_endpoint_in_errors(relay.url):
        if passes_untouched(response.status, response.headers, relay.encoding, destination):
            await relay.pass_untouched()
        elif size is not None and size <= CONVERT_CHUNK:
            await _convert_buffered(relay)
        elif size is not None and size <= MAX_FAST_RESPONSE:
            await _convert_large(relay)
        else:
            await _convert_streamed(_with_requested_base64(relay))


async def _convert_buffered(relay: ResponseRelay) -> None:
    response = relay.upstream_response
    body = await read_response(response, relay.url, relay.deadline)
    converted = convert_buffered_response(
        response.status, response.headers, body, relay.encoding, relay.destination
    )
    relay.deadline.expect_client()
    if converted is None:
        await relay.response.send(200, response.reason, end_to_end(response.headers), body)
    else:
        headers = converted.headers(response.headers)
        await relay.response.send(200, response.reason, headers, converted.body)


async def _convert_large(relay: ResponseRelay) -> None:
    """Convert a response of numbers at once, as the fast path does, and any other in parts."""
    response = relay.upstream_response
    body = await read_response(response, relay.url, relay.deadline)
    converted = convert_large_response(response.headers, body, relay.encoding, relay.destination)
    if converted is None:
        relay = replace(relay, upstream_response=_ReadResponse(response, body))
        await _convert_streamed(_with_requested_base64(relay))
        return
    relay.deadline.expect_client()
    headers = converted.headers(response.headers)
    await relay.response.send(200, response.reason, headers, converted.body)


class _ReadResponse(UpstreamResponse):
    """A response whose body was read, to be read again."""

    def __init__(self, response: UpstreamResponse, body: bytes) -> None:
        self.status = response.status
        self.reason = response.reason
        self.headers = response.headers
        self._response = response
        self._body = body

    @property
    def content_length(self) -> int | None:
        """Return the size of the body."""
        return self._response.content_length

    async def read(self) -> bytes:
        """Return the body once, then nothing."""
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """Close the response."""
        self._response.close()


async def _convert_streamed(relay: ResponseRelay) -> None:
    dialect = relay.destination.upstream.dialect
    if not dialect.binary:
        await relay_encoded(relay, relay.chunks(), None)
    elif not dialect.honors_output_encoding:
        await _convert_unsure(relay)
    elif relay.encoding.all_binary:
        await _relay_rewritten(relay, _check_document)
    else:
        await _convert_binary(relay)


async def _relay_rewritten(relay: ResponseRelay, rewrite: Callable[[bytes], bytes]) -> None:
    """Pass a response that should be all JSON; see ``relay_rewritten``."""
    await relay_rewritten(
        relay.upstream_response,
        check_all_json(relay.chunks()),
        relay.response,
        rewrite,
        relay.destination.limits.max_inference_header_bytes,
        relay.destination,
        relay.deadline,
    )


def _check_document(document: bytes) -> bytes:
    """Return a response untouched; raises GatewayError (502) if it promises binary tensors."""
    check_no_binary_outputs(document)
    return document


async def check_all_json(chunks: Chunks) -> Chunks:
    """Yield a response without a header length; raises GatewayError (502) if tensors follow."""
    check = HeaderLengthCheck()
    async for chunk in chunks:
        check.feed(chunk)
        yield chunk


def _with_requested_base64(relay: ResponseRelay) -> ResponseRelay:
    """Add the outputs that a request wants as base64 to the policies."""
    destination = destination_with_base64(relay.destination, relay.encoding)
    return relay if destination is relay.destination else replace(relay, destination=destination)


async def _convert_binary(relay: ResponseRelay) -> None:
    """Convert a response whose outputs are binary."""
    cap = relay.destination.limits.max_inference_header_bytes
    header_size = parse_header_size(relay.upstream_response.headers, cap)
    if header_size is None:
        rewrite = partial(with_empty_data, encoding=relay.encoding, destination=relay.destination)
        await _relay_rewritten(relay, rewrite)
    elif relay.encoding.all_json:
        await _relay_as_json(relay, header_size)
    else:
        await relay_encoded(relay, relay.chunks(), header_size)


async def _convert_unsure(relay: ResponseRelay) -> None:
    """Convert a response whose outputs may be JSON although binary was requested."""
    # The header may contain data, which counts as buffered rather than as header.
    header_size = parse_header_size(relay.upstream_response.headers, None)
    if becomes_json(header_size, relay.encoding, relay.destination):
        await _convert_binary(relay)
        return
    chunks = relay.chunks()
    if header_size is None:
        chunks = check_all_json(chunks)
    await relay_in_encoding(relay, chunks, header_size)


@contextmanager
def name_endpoint_in_errors(url: str) -> Iterator[None]:
    """Add the endpoint to errors raised inside; see ``name_endpoint``."""
    try:
        yield
    except GatewayError as error:
        named = name_endpoint(url, error)
        if named is error:
            raise
        raise named from error


async def _relay_as_json(relay: ResponseRelay, header_size: int) -> None:
    """Write all binary outputs as JSON, while the response arrives."""
    response, destination = relay.response, relay.destination
    upstream_response = relay.upstream_response
    headers = with_body(upstream_response.headers, {"Content-Type": "application/json"})
    converter = new_json_converter(header_size, destination)
    offloader = destination.offloader_for(upstream_response.content_length)
    parts: deque[TextChunk | OffloadedText] = deque()
    with destination.memory_budget.reserve() as reservation:
        async for piece in slices(relay.chunks(), CONVERT_CHUNK, destination.scheduler):
            parts.extend(converter.parts(piece, offloader))
            reservation.resize_unchecked(converter.buffered_bytes + sum(map(_size_of, parts)))
            if parts and not response.started:
                await response.start(200, upstream_response.reason, headers)
            await _write_parts(relay, parts, _MAX_QUEUED_PARTS)
        converter.finish()
        await _write_parts(relay, parts, 0)
    await response.finish()


def _size_of(part: TextChunk | OffloadedText) -> int:
    """Estimate the bytes of a part; an offloaded part is in shared memory."""
    return CONVERT_CHUNK if isinstance(part, OffloadedText) else len(part)


async def _write_parts(
    relay: ResponseRelay, parts: deque[TextChunk | OffloadedText], max_left: int
) -> None:
    """Write the finished parts in order, and wait for parts beyond ``max_left``."""
    while parts:
        part = parts[0]
        if isinstance(part, OffloadedText):
            if not part.future.done and len(parts) <= max_left:
                return
            await part.future.wait()
            part = part.text()
        parts.popleft()
        if part:
            await write(relay.response, part, relay.deadline)
