"""Converts the responses of servers that speak binary into the encoding that the client wants."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from multidict import CIMultiDictProxy

from gateway.codec.elements.encode import OffloadedText, TextChunk
from gateway.codec.json.header_length_check import HeaderLengthCheck
from gateway.codec.v2.fast_response import fast_convert_response
from gateway.codec.v2.response import ResponseConverter, json_converter
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.response_header import (
    check_no_binary_outputs,
    parse_response_header,
    read_outputs,
)
from gateway.proxy.body_io import Chunks, read_response, slices, write
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.infer.buffered_response import (
    ResponseRelay,
    new_converter,
    relay_encoded,
    relay_in_encoding,
)
from gateway.proxy.interfaces import Destination
from gateway.proxy.passthrough import relay_rewritten
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.transport import UpstreamResponseHead

_EMPTY_SHAPE = re.compile(rb'"shape"\s*:\s*\[(?:\s*[0-9]+\s*,)*\s*0\s*[],]')
"""The shape of an output without elements."""

_MAX_QUEUED_PARTS = 10
"""Parts of a response, and commas, that wait for an offloaded part before them."""


async def convert_response(relay: ResponseRelay) -> None:
    """Convert a server's response into the client's encoding; errors pass untouched.

    A response that is in that encoding already passes untouched, too.
    """
    relay = with_requested_base64(relay)
    honors_encoding = relay.destination.upstream.dialect.honors_output_encoding
    with name_endpoint_in_errors(relay.url):
        is_error = relay.upstream_response.status != 200
        if is_error or (relay.encoding.all_binary and honors_encoding):
            await _pass_binary(relay)
        elif honors_encoding:
            await _convert_binary(relay)
        else:
            await _convert_unsure(relay)


async def _pass_binary(relay: ResponseRelay) -> None:
    """Pass an error, or a response that the client wants in binary."""
    headers = relay.upstream_response.headers
    # The gateway cannot inspect a compressed response.
    is_opaque = HEADER_LENGTH in headers or "Content-Encoding" in headers
    if relay.upstream_response.status != 200 or is_opaque:
        await relay.pass_untouched()
        return
    await relay_rewritten(
        relay.upstream_response,
        check_all_json(relay.chunks()),
        relay.response,
        _check_document,
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


def with_requested_base64(relay: ResponseRelay) -> ResponseRelay:
    """Add the outputs that a request wants as base64 to the policies."""
    destination = destination_with_base64(relay.destination, relay.encoding)
    return relay if destination is relay.destination else replace(relay, destination=destination)


def destination_with_base64(destination: Destination, encoding: OutputEncoding) -> Destination:
    """Return the destination with the requested base64 outputs in its policies."""
    if not encoding.as_base64:
        return destination
    return replace(
        destination, policies=replace(destination.policies, as_base64=encoding.as_base64)
    )


async def _convert_binary(relay: ResponseRelay) -> None:
    """Convert a response whose outputs are binary."""
    cap = relay.destination.limits.max_inference_header_bytes
    header_size = response_header_size(relay.upstream_response, cap)
    if header_size is None:
        await relay_rewritten(
            relay.upstream_response,
            check_all_json(relay.chunks()),
            relay.response,
            partial(with_empty_data, encoding=relay.encoding, destination=relay.destination),
            cap,
            relay.destination,
            relay.deadline,
        )
    elif relay.encoding.all_json:
        await _relay_as_json(relay, header_size)
    else:
        await relay_encoded(relay, relay.chunks(), header_size)


async def _convert_unsure(relay: ResponseRelay) -> None:
    """Convert a response whose outputs may be JSON although binary was requested."""
    # The header may contain data, which counts as buffered rather than as header.
    header_size = response_header_size(relay.upstream_response, None)
    text_is_fine = header_size is not None or not relay.destination.policies.any_base64
    is_within_cap = (header_size or 0) <= relay.destination.limits.max_inference_header_bytes
    if relay.encoding.all_json and text_is_fine and is_within_cap:
        await _convert_binary(relay)
        return
    chunks = relay.chunks()
    if header_size is None:
        chunks = check_all_json(chunks)
    await relay_in_encoding(relay, chunks, header_size)


def name_endpoint(url: str, error: GatewayError) -> GatewayError:
    """Add the endpoint to the error of an invalid response: codecs do not know it."""
    if error.kind is ErrorKind.BAD_RESPONSE and url not in error.message:
        return bad_response(f"{url}: {error.message}")
    return error


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


def response_header_size(head: UpstreamResponseHead, cap: int | None) -> int | None:
    """Return the size of the JSON before a response's tensors; None without tensors.

    Raises GatewayError (502) for an invalid size, and above the cap if there is one.
    """
    return parse_header_size(head.headers, cap)


def parse_header_size(headers: CIMultiDictProxy[str], cap: int | None) -> int | None:
    """Parse the header length of a response, as ``response_header_size``."""
    # Servers differ in Content-Type: only this header identifies a binary response.
    values = headers.getall(HEADER_LENGTH, [])
    if not values:
        return None
    value = ", ".join(values)  # two values are no number
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise bad_response(f"the server's response has {HEADER_LENGTH}: {value[:40]!r}")
    if cap is not None and int(value) > cap:
        raise bad_response(
            f"the server's response has {value} bytes of JSON before the tensors; "
            f"at most {cap} are taken (limits.max_inference_header_bytes)"
        )
    return int(value)


async def _relay_as_json(relay: ResponseRelay, header_size: int) -> None:
    """Write all binary outputs as JSON, while the response arrives unless it is small."""
    response, destination, deadline = relay.response, relay.destination, relay.deadline
    upstream_response = relay.upstream_response
    headers = with_body(upstream_response.headers, {"Content-Type": "application/json"})
    size = upstream_response.content_length
    if size is not None and size <= CONVERT_CHUNK:
        body = await read_response(upstream_response, relay.url, deadline)
        text = convert_to_json(body, header_size, destination)
        deadline.expect_client()
        await response.send(200, upstream_response.reason, headers, text)
        return
    converter = _new_json_converter(header_size, destination)
    offloader = destination.offloader_for(size)
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


def convert_to_json(body: bytes, header_size: int, destination: Destination) -> bytes:
    """Write a buffered binary response as JSON; raises GatewayError."""
    text = fast_convert_response(body, header_size)
    if text is None:
        converter = _new_json_converter(header_size, destination)
        text = converter.text(body)
        converter.finish()
    return text


def _new_json_converter(header_size: int, destination: Destination) -> ResponseConverter[None]:
    limits = destination.limits
    return json_converter(
        header_size,
        destination.policies,
        limits.max_inference_header_bytes,
        limits.max_buffered_body_bytes,
    )


def with_empty_data(document: bytes, encoding: OutputEncoding, destination: Destination) -> bytes:
    """Return a response without tensors behind it, with the empty data that the client wants.

    If every binary output is empty, Triton sends sizes of 0 and no data; OpenVINO Model Server
    sends no sizes either. A server may send text although binary was requested; it becomes base64
    if that is wanted. Raises GatewayError (502) if the response promises binary tensors.
    """
    check_no_binary_outputs(document)
    may_have_text = not destination.upstream.dialect.honors_output_encoding
    rewrite = _with_base64 if destination.policies.any_base64 and may_have_text else _with_data
    try:
        return rewrite(document, encoding, destination)
    except GatewayError:
        return document  # unknown to the gateway: the client gets what the server sent


def _with_data(document: bytes, encoding: OutputEncoding, destination: Destination) -> bytes:
    if b'"binary_data_size"' not in document and not _EMPTY_SHAPE.search(document):
        return document
    outputs = read_outputs(parse_response_header(document))
    if all(output.binary_size is None for output in outputs):
        return document
    if encoding.all_json:
        return convert_to_json(document, len(document), destination)
    converter = new_converter(len(document), encoding, destination)
    converter.feed(document)
    return converter.finish()[0]


def _with_base64(document: bytes, encoding: OutputEncoding, destination: Destination) -> bytes:
    converter = new_converter(None, encoding, destination)
    converter.feed(document, last=True)
    return converter.finish()[0]
