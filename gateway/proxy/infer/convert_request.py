"""Reads infer requests of every encoding, and writes them for servers that accept only JSON."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar

from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.json_writer import JsonRequestWriter
from gateway.codec.v2.request import MAX_CACHED_HEADER, InferRequestReader, read_without_data
from gateway.codec.v2.shared_memory import SharedTensors, certain_output_sizes
from gateway.errors import ErrorKind, GatewayError, ModelMismatchError, bad_request
from gateway.protocol.declared_model import complete_metadata
from gateway.protocol.messages import InferRequest, TensorData
from gateway.protocol.operations import Operation, model_name_of
from gateway.protocol.raw_binary import read_raw_binary
from gateway.protocol.request_features import check_classified_inputs, check_classified_outputs
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.tensors import ModelMetadata
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation, run_steps
from gateway.proxy.attempts.attempt import Attempt
from gateway.proxy.attempts.retry import RetryState
from gateway.proxy.body_io import Chunks, ClientBody, buffer_chunks, slices, stream
from gateway.proxy.destination import Destination
from gateway.proxy.infer.convert_buffered_request import (
    ReceivedRequest,
    cached_metadata,
    cached_outputs_to_list,
    own_region_error,
    read_buffered,
)
from gateway.proxy.interfaces import Call
from gateway.routing.retry import SAFE_RETRIES_ONLY
from gateway.sizes import CONVERT_CHUNK, ENCODE_CHUNK, MAX_FAST_REQUEST, MAX_UNSCHEDULED
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.member import Outcome
from gateway.upstream.transport import Body

_Shared = TypeVar("_Shared", bound=SharedTensors)

_FIRST_SERVER_ERROR = 500
_NOT_IMPLEMENTED = 501


async def receive_request(
    call: Call, length: int | None, reservation: Reservation
) -> ReceivedRequest:
    """Read a request; binary tensors at its end may still be to come.

    ``length`` is its Inference-Header-Content-Length. Raises GatewayError: 400 for an invalid
    request, 413 over a cap.
    """
    if (read := call.request.infer_request) is not None:
        return ReceivedRequest(read, read.chunks)
    body = ClientBody(call.request, call.destination.limits.max_request_bytes, call.deadline)
    if length is not None and body.size is not None and length > body.size:
        raise bad_request(f"{HEADER_LENGTH} is {length}, but the body has {body.size} bytes")
    if _is_read_at_once(call, body.size, length):
        content = await body.read_all(reservation)
        if len(content) > MAX_UNSCHEDULED:
            await call.destination.scheduler.next_slice()
        received = read_buffered(call.operation, call.destination, length, content)
        if received is not None:
            return received
    if length == 0:
        return await _receive_raw_binary(call, body, reservation)
    if length is None and body.size == 0:
        raise bad_request("the request has no body")
    request = await _read_json(body, length, call.destination, reservation)
    _check_binary_size(request, body, length)
    if body.size is None and not request.missing_size:
        await _check_end(body)
    return ReceivedRequest(request, await _data(request, body))


def _is_read_at_once(call: Call, size: int | None, length: int | None) -> bool:
    """Tell whether a body is small enough to be read whole before it is converted."""
    if length == 0 and cached_metadata(call.operation, call.destination) is None:
        return False  # an unknown model is refused before the body is read
    return size is not None and 0 < size <= (MAX_FAST_REQUEST if length is None else CONVERT_CHUNK)


def _check_binary_size(request: InferRequest, body: ClientBody, length: int | None) -> None:
    """Compare the bytes after the JSON with the sizes that the JSON states."""
    following = None if length is None or body.size is None else body.size - length
    if following is not None and following != request.missing_size:
        raise bad_request(
            f"{following} bytes follow the request's JSON, "
            f"its binary_data_size parameters add up to {request.missing_size}"
        )
    if length is None and request.missing_size:
        raise bad_request(
            f"an input has binary_data_size, but the request has no {HEADER_LENGTH} header"
        )


async def _read_json(
    body: ClientBody, length: int | None, destination: Destination, reservation: Reservation
) -> InferRequest:
    limits = destination.limits
    first = await body.read(CONVERT_CHUNK if length is None else min(CONVERT_CHUNK, length))
    if len(first) == length and length <= min(MAX_CACHED_HEADER, limits.max_inference_header_bytes):
        request = read_without_data(bytes(first), limits.max_json_depth, limits.max_tensors)
        if request is not None:
            return request
    reader = InferRequestReader(
        limits.max_inference_header_bytes,
        limits.max_json_depth,
        destination.offloader_for(body.size),
        limits.max_tensors,
    )
    await feed_body(reader, body, destination.scheduler, reservation, first, length)
    while reader.future is not None:
        await reader.future.wait()
        await run_steps(reader, reservation, destination.scheduler)
    if reader.header_size > CONVERT_CHUNK:
        await destination.scheduler.next_slice()  # the header was parsed in this one
    return reader.finish()


async def feed_body(
    reader: InferRequestReader | PredictRequestReader,
    body: ClientBody,
    scheduler: ConversionScheduler,
    reservation: Reservation,
    text: bytes | memoryview = b"",
    length: int | None = None,
) -> None:
    """Have a reader read a body, or its first ``length`` bytes, a time slice for each chunk.

    ``text`` has been read already. Raises GatewayError: 400 as the reader does and for a body that
    is too short, 503 if too much is buffered.
    """
    missing = sys.maxsize if length is None else length
    size = body.size if length is None else length
    may_skip_slice = size is not None and size <= MAX_UNSCHEDULED
    unscheduled = 0
    text = text or await body.read_joined(min(reader.preferred_read_size, missing))
    while text:
        reader.feed(text)
        missing -= len(text)
        unscheduled += len(text)
        while reader.step() or unscheduled >= CONVERT_CHUNK:
            if not may_skip_slice:
                unscheduled = 0
                reservation.resize(reader.buffered_bytes)
                await scheduler.next_slice()
            may_skip_slice = False  # even a small request gets no second step for free
        text = await body.read_joined(min(reader.preferred_read_size, missing)) if missing else b""
    if missing and length is not None:
        raise bad_request(f"the body is {missing} bytes shorter than {HEADER_LENGTH} declares")
    reader.feed(b"", last=True)
    await run_steps(reader, reservation, scheduler)


async def _data(request: InferRequest, body: ClientBody) -> Sequence[bytes | memoryview] | Chunks:
    """Return the data of the tensors; what is still to come is read now if it is little.

    A buffered body can be sent again.
    """
    if request.missing_size:
        chunks = _stream_data(request, body)
        if request.data_size > CONVERT_CHUNK:
            return chunks
        return [b"".join([chunk async for chunk in chunks])]
    return request.chunks


async def _stream_data(request: InferRequest, body: ClientBody) -> Chunks:
    missing = request.missing_size
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


async def _check_end(body: ClientBody) -> None:
    if await body.read():
        raise bad_request("the body is longer than its inference header declares")


async def _receive_raw_binary(
    call: Call, body: ClientBody, reservation: Reservation
) -> ReceivedRequest:
    """Read a request whose body is the data of the model's only input."""
    model = await model_metadata(call)
    data: TensorData | None = body.size
    if data is None:
        cap = call.destination.limits.max_buffered_body_bytes
        data = await buffer_chunks(body.read_rest(), reservation, cap, _raw_binary_too_large)
    try:
        request = read_raw_binary(model, data)
    except ModelMismatchError:
        request = read_raw_binary(await current_metadata(call), data)
    return ReceivedRequest(
        request, await _data(request, body), uses_metadata=True, is_raw_binary=True
    )


def _raw_binary_too_large(cap: int) -> GatewayError:
    return GatewayError(
        ErrorKind.TOO_LARGE,
        f"a raw binary request without Content-Length, or compressed, is buffered, and is "
        f"larger than {cap} bytes (limits.max_buffered_body_bytes); send a Content-Length",
    )


async def current_metadata(call: Call) -> ModelMetadata:
    """Return the metadata of the call's model, which may have changed, to refuse a request by."""
    operation = call.operation
    call.destination.upstream.metadata.recheck(operation.model or "", operation.version)
    return await model_metadata(call)


async def model_metadata(call: Call) -> ModelMetadata:
    """Return the metadata of the call's model, from the cache or a server.

    The declared metadata fills what the server leaves out. Raises UpstreamResponseError if the
    server refuses and nothing is declared, and GatewayError if it fails.
    """
    # A lease for nothing would take the endpoint's turn: all calls would go to the other ones.
    cached = cached_metadata(call.operation, call.destination)
    if cached is not None:
        return cached
    upstream, operation, deadline = call.destination.upstream, call.operation, call.deadline
    name = operation.model or ""
    has_config = upstream.dialect.has_config
    declared = call.destination.declared_models.get(name)

    async def fetch(attempt: Attempt) -> ModelMetadata:
        endpoint = attempt.endpoint
        deadline.expect_server(endpoint.name)
        try:
            return await upstream.metadata.get(name, operation.version, endpoint, has_config)
        except UpstreamResponseError as error:
            is_failure = error.status >= _FIRST_SERVER_ERROR and error.status != _NOT_IMPLEMENTED
            if declared is None or is_failure:
                raise
            return declared.metadata

    reachable = RetryState(upstream, SAFE_RETRIES_ONLY, [], model_name_of(operation))
    attempt, metadata = await reachable.reach(fetch, deadline, call.response.record)
    attempt.end(Outcome.SUCCEEDED)
    return complete_metadata(metadata, declared)


async def outputs_to_list(call: Call, request: InferRequest) -> tuple[str, ...]:
    """Return the outputs that a request must list so that the server sends them in binary.

    There are none if the client lists outputs itself. If the server does not tell its outputs,
    there are none either: then they come as JSON.
    """
    cached = cached_outputs_to_list(call.operation, call.destination, request.head)
    if cached is not None:
        return cached
    try:
        outputs = (await model_metadata(call)).outputs
    except UpstreamResponseError:
        return ()  # the server's response to the request itself tells what is wrong
    except GatewayError as error:
        if error.kind is not ErrorKind.BAD_RESPONSE:
            raise
        return ()
    return tuple(output.name for output in outputs)


def fetched_metadata(operation: Operation, destination: Destination) -> ModelMetadata | None:
    """Return the metadata of a request's model if it is cached, else fetch it for later calls."""
    model, upstream = cached_metadata(operation, destination), destination.upstream
    if model is None and operation.model is not None and upstream.pool.endpoints:
        endpoint, has_config = upstream.pool.endpoints[0], upstream.dialect.has_config
        upstream.metadata.prefetch(operation.model, operation.version, endpoint, has_config)
    return model


def shared_tensors(
    operation: Operation,
    destination: Destination,
    request: InferRequest,
    make: Callable[[Mapping[str, int]], _Shared],
) -> _Shared | None:
    """Return the tensors of a request that may go through shared memory; None if they may not.

    ``make`` gets the sizes of its outputs. They are certain once the metadata are cached, for which
    no call waits: they are fetched, so ask only while the upstream has shared memory.
    """
    tensors = make(certain_output_sizes(request, fetched_metadata(operation, destination)))
    largest = max(tensors.input_size, tensors.output_size)
    return tensors if largest >= destination.upstream.min_shared_bytes else None


async def check_request(call: Call, received: ReceivedRequest) -> None:
    """Refuse a request that its model does not accept, or that would crash its server.

    Raises GatewayError (400) that names the input, output or parameter, and what ``model_metadata``
    raises if that is needed.
    """
    head = received.request.head
    if error := own_region_error(received.request, call.destination.upstream):
        raise bad_request(error)
    declared = call.destination.declared_models.get(call.operation.model or "")
    if declared is not None and not received.is_raw_binary:
        declared.check(head.inputs)
    features = head.features
    if features.is_plain or not call.destination.upstream.dialect.triton_extensions:
        return
    if features.error:
        raise bad_request(features.error)
    check_classified_inputs(head)
    outputs = (await model_metadata(call)).outputs
    check_classified_outputs(features, outputs, call.operation.model)


_MAX_BUFFERED = 16 * 1024
"""Bytes of a binary request that is written in one go; its JSON is mostly four times as large."""
_MAX_BUFFERED_PIECES = 64
"""Pieces of it: one for each tensor, which takes some 20 us, however small it is."""


def json_body(
    body: Sequence[bytes | memoryview] | Chunks, request: InferRequest, destination: Destination
) -> Body:
    """Write a request as JSON; ``body`` is the data of its tensors.

    A small buffered request is written in one go; raises GatewayError (400) for what JSON cannot
    hold. A larger one is written while it is sent, anew for each attempt. A streamed request is
    written as it arrives.
    """

    async def write(chunks: Chunks) -> AsyncIterator[bytes]:
        writer = JsonRequestWriter(request, destination.policies)
        async for piece in slices(chunks, ENCODE_CHUNK, destination.scheduler):
            yield writer.feed(piece)
        yield writer.finish()

    if isinstance(body, AsyncIterator):
        return write(body)
    if request.data_size > _MAX_BUFFERED or len(body) > _MAX_BUFFERED_PIECES:
        return _Repeatable(lambda: write(stream(map(memoryview, body))))
    writer = JsonRequestWriter(request, destination.policies)
    text = b"".join([writer.feed(data) for data in body])
    return [text + writer.finish()]


class _Repeatable(AsyncIterable[bytes]):
    """A body that can be sent more than once, as each iteration starts it anew."""

    def __init__(self, start: Callable[[], AsyncIterator[bytes]]) -> None:
        self._start = start

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Start the body."""
        return self._start()
