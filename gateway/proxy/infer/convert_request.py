"""Converts infer requests of every encoding into the binary form, and checks them."""

from __future__ import annotations

import sys
from dataclasses import replace

from gateway.codec.v2.fast_request import MAX_FAST_REQUEST
from gateway.codec.v2.request import (
    MAX_CACHED_HEADER,
    InferRequest,
    InferRequestConverter,
    header_without_data,
)
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.declared_model import complete_metadata
from gateway.protocol.operations import model_name_of
from gateway.protocol.request_header import OutputEncoding, list_outputs
from gateway.protocol.tensors import ModelMetadata
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.admission.memory_budget import Reservation, run_steps
from gateway.proxy.body_io import Chunks, ClientBody, buffer_chunks
from gateway.proxy.headers import HEADER_LENGTH, header_length
from gateway.proxy.infer.convert_buffered_request import (
    ALL_BINARY,
    NO_FEATURES,
    ConvertedRequest,
    cached_metadata,
    convert_buffered_request,
    make_cached_preamble,
    needs_listed_outputs,
)
from gateway.proxy.interfaces import Call, Destination
from gateway.proxy.retry import use_reachable_endpoint
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.member import Outcome
from gateway.upstream.transport import Body, UpstreamEndpoint

_UNKNOWN_SIZE = sys.maxsize
"""The size of a body without a length."""

_FIRST_SERVER_ERROR = 500
_NOT_IMPLEMENTED = 501


async def convert_request(call: Call, reservation: Reservation) -> ConvertedRequest:
    """Convert a request into binary form; binary tensors at its end may still be to come.

    Raises GatewayError: 400 for an invalid request, 413 over a cap.
    """
    length = header_length(call.request.headers)
    body = ClientBody(call.request, call.destination.limits.max_request_bytes, call.deadline)
    if length is not None and body.size is not None and length > body.size:
        raise bad_request(f"{HEADER_LENGTH} is {length}, but the body has {body.size} bytes")
    if _is_converted_at_once(call, body.size, length):
        content = await body.read_all(reservation)
        if len(content) > MAX_UNSCHEDULED:
            await call.destination.scheduler.next_slice()
        converted = convert_buffered_request(call.operation, call.destination, length, content)
        if converted is not None:
            return converted
    if length == 0:
        return await _convert_raw_binary(call, body, reservation)
    return await _convert_json(call, body, length, reservation)


def _is_converted_at_once(call: Call, size: int | None, length: int | None) -> bool:
    """Tell whether a body is small enough to be read whole before it is converted."""
    if length == 0 and cached_metadata(call.operation, call.destination) is None:
        return False  # an unknown model is refused before the body is read
    return size is not None and 0 < size <= (MAX_FAST_REQUEST if length is None else CONVERT_CHUNK)


async def _convert_json(
    call: Call, body: ClientBody, length: int | None, reservation: Reservation
) -> ConvertedRequest:
    """Convert a request whose JSON has this length, or is the whole body."""
    if length is None and body.size == 0:
        raise bad_request("the request has no body")
    request = await _read_json(body, length, call.destination, reservation)
    _check_binary_size(request, body, length)
    if body.size is None and not request.expected_size:
        await _check_end(body)
    header = await list_all_outputs(call, request.header, request.output_encoding)
    if header is not request.header:
        request = replace(request, header=header)
    size = request.content_length
    return ConvertedRequest(
        _buffered_body(request) or await _join_if_small(_stream_body(request, body), size),
        size,
        len(header),
        request.output_encoding,
        request.features,
        request.input_encodings,
    )


def _check_binary_size(request: InferRequest, body: ClientBody, length: int | None) -> None:
    """Compare the bytes after the JSON with the sizes that the JSON states."""
    following = None if length is None or body.size is None else body.size - length
    if following is not None and following != request.expected_size:
        raise bad_request(
            f"{following} bytes follow the request's JSON, "
            f"its binary_data_size parameters add up to {request.expected_size}"
        )
    if length is None and request.expected_size:
        raise bad_request(
            f"an input has binary_data_size, but the request has no {HEADER_LENGTH} header"
        )


async def _read_json(
    body: ClientBody, length: int | None, destination: Destination, reservation: Reservation
) -> InferRequest:
    limits = destination.limits
    missing = _UNKNOWN_SIZE if length is None else length
    text = await body.read(min(CONVERT_CHUNK, missing))
    if len(text) == length and length <= min(MAX_CACHED_HEADER, limits.max_inference_header_bytes):
        request = header_without_data(bytes(text), limits.max_json_depth, limits.max_tensors)
        if request is not None:
            return request
    codec = InferRequestConverter(
        limits.max_inference_header_bytes,
        limits.max_json_depth,
        destination.offloader_for(body.size),
        limits.max_tensors,
    )
    size = body.size if length is None else length
    may_skip_slice = size is not None and size <= MAX_UNSCHEDULED
    unscheduled = 0
    while text:
        codec.feed(text)
        missing -= len(text)
        unscheduled += len(text)
        while codec.step() or unscheduled >= CONVERT_CHUNK:
            if not may_skip_slice:
                unscheduled = 0
                reservation.resize(codec.buffered_bytes)
                await destination.scheduler.next_slice()
            may_skip_slice = False  # even a small request gets no second step for free
        text = await body.read(min(codec.preferred_read_size, missing)) if missing else b""
    if missing and length is not None:
        raise bad_request(f"the body is {missing} bytes shorter than {HEADER_LENGTH} declares")
    codec.feed(b"", last=True)
    while True:
        await run_steps(codec, reservation, destination.scheduler)
        if codec.future is None:
            return codec.finish()
        await codec.future.wait()


def _buffered_body(request: InferRequest) -> Body:
    """Return the whole body if none of it is still to come from the client."""
    chunks = [request.header]
    for part in request.tensors:
        if isinstance(part, int):
            if part:
                return None
        else:
            chunks += part
    return [b"".join(chunks)] if request.content_length <= CONVERT_CHUNK else chunks


async def _stream_body(request: InferRequest, body: ClientBody) -> Chunks:
    yield request.header
    missing = request.expected_size
    for part in request.tensors:
        if not isinstance(part, int):
            for chunk in part:
                yield chunk
            continue
        async for piece in body.read_exactly(part):
            missing -= len(piece)
            if not missing:
                # Checked before the server has the whole request.
                await _check_end(body)
            yield piece


async def _join_if_small(chunks: Chunks, size: int) -> Body:
    """Join the chunks of a small body: a buffered body can be retried."""
    return chunks if size > CONVERT_CHUNK else [b"".join([chunk async for chunk in chunks])]


async def _check_end(body: ClientBody) -> None:
    if await body.read():
        raise bad_request("the body is longer than its inference header declares")


async def _convert_raw_binary(
    call: Call, body: ClientBody, reservation: Reservation
) -> ConvertedRequest:
    """Put the missing header before the bytes of a raw binary request."""
    model = await model_metadata(call)
    chunks: list[bytes] | None = None
    size = body.size
    if size is None:
        cap = call.destination.limits.max_buffered_body_bytes
        chunks = await buffer_chunks(body.read_rest(), reservation, cap, _raw_binary_too_large)
        size = sum(map(len, chunks))
    try:
        preamble = make_cached_preamble(model, size)
    except GatewayError:
        # The model may have changed: only its current metadata is a reason to refuse.
        call.destination.upstream.metadata.invalidate(call.operation.model or "")
        model = await model_metadata(call)
        preamble = make_cached_preamble(model, size)
    header = await list_all_outputs(call, preamble.header, ALL_BINARY)
    start = header + preamble.prefix
    size += len(start)
    if chunks is not None:
        content: Body = [start, *chunks]
    else:
        content = await _join_if_small(_prepend(start, body), size)
    return ConvertedRequest(content, size, len(header), ALL_BINARY, NO_FEATURES, uses_metadata=True)


def _raw_binary_too_large(cap: int) -> GatewayError:
    return GatewayError(
        ErrorKind.TOO_LARGE,
        f"a raw binary request without Content-Length, or compressed, is buffered, and is "
        f"larger than {cap} bytes (limits.max_buffered_body_bytes); send a Content-Length",
    )


async def _prepend(start: bytes, body: ClientBody) -> Chunks:
    yield start
    async for chunk in body.read_rest():
        yield chunk


async def model_metadata(call: Call) -> ModelMetadata:
    """Return the metadata of the call's model, from the cache or a server.

    The declared metadata fills what the server leaves out. Raises UpstreamResponseError if the
    server refuses and nothing is declared, and GatewayError if it fails.
    """
    upstream, operation, deadline = call.destination.upstream, call.operation, call.deadline
    name = operation.model or ""
    has_config = upstream.dialect.has_config
    declared = call.destination.declared_models.get(name)

    async def fetch(endpoint: UpstreamEndpoint) -> ModelMetadata:
        deadline.expect_server(endpoint.url)
        try:
            return await upstream.metadata.get(name, operation.version, endpoint, has_config)
        except UpstreamResponseError as error:
            is_failure = error.status >= _FIRST_SERVER_ERROR and error.status != _NOT_IMPLEMENTED
            if declared is None or is_failure:
                raise
            return declared.metadata

    model = model_name_of(operation)
    lease, metadata = await use_reachable_endpoint(
        upstream, fetch, deadline, call.response.record, model
    )
    lease.release(Outcome.SUCCEEDED)
    return complete_metadata(metadata, declared)


async def list_all_outputs(call: Call, header: bytes, encoding: OutputEncoding) -> bytes:
    """Return a request's header with all outputs listed, if the server needs that for binary.

    The header stays as it is if the client lists outputs itself. It also stays if the server does
    not tell its outputs: then they come as JSON.
    """
    if not needs_listed_outputs(call.destination, encoding):
        return header
    try:
        outputs = (await model_metadata(call)).outputs
    except UpstreamResponseError:
        outputs = ()  # the server's response to the request itself tells what is wrong
    except GatewayError as error:
        if error.kind is not ErrorKind.BAD_RESPONSE:
            raise
        outputs = ()
    names = [output.name for output in outputs]
    return list_outputs(header, names) if names else header
