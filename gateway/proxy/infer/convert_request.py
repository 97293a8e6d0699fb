"""An infer request of any form, brought into the binary form and checked."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from gateway.codec.policies import BytesEncoding
from gateway.codec.v2.fast_request import MAX_FAST_REQUEST, fast_convert_request
from gateway.codec.v2.request import (
    MAX_CACHED_HEADER,
    InferRequest,
    InferRequestConverter,
    header_without_data,
)
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.operations import Operation
from gateway.protocol.raw_binary import make_raw_binary_preamble
from gateway.protocol.request_features import RequestFeatures
from gateway.protocol.request_header import OutputEncoding
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation, work_off
from gateway.proxy.body_io import CHUNK_SIZE, ClientBody, kept
from gateway.proxy.headers import HEADER_LENGTH, header_length
from gateway.proxy.infer.listed_outputs import listing_outputs
from gateway.proxy.infer.metadata import model_metadata
from gateway.proxy.interfaces import ClientRequest, Route
from gateway.upstream.transport import Body

ALL_BINARY = OutputEncoding(binary_by_default=True, binary_by_output={})
_NO_FACTS = RequestFeatures(())

_UNKNOWN = sys.maxsize
"""The bytes of a body that does not say how many there are."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A request in binary form; ``size`` in bytes is the whole body's. See also InferRequest.

    ``facts`` are what the client's form says, of raw bytes nothing; ``by_metadata`` tells that the
    header was made by what a model's metadata says.
    """

    body: Body
    size: int
    header_size: int
    output_encoding: OutputEncoding
    features: RequestFeatures
    input_encodings: Mapping[int, BytesEncoding] = field(default_factory=dict)
    by_metadata: bool = False

    @property
    def held(self) -> int:
        """Give the bytes of it that are at hand."""
        return self.header_size if isinstance(self.body, AsyncIterable) else self.size


async def convert(
    request: ClientRequest, asked: Operation, route: Route, deadline: Deadline, holding: Reservation
) -> Converted:
    """Bring a request into binary form; binary tensors at its end may be still to come.

    Raises GatewayError: 400 for what is wrong with it, 413 over a cap.
    """
    length = header_length(request.headers)
    body = ClientBody(request, route.limits.request_bytes, deadline)
    if length == 0:
        return await _convert_raw(body, asked, route, deadline, holding)
    return await _convert_json(body, length, asked, route, deadline, holding)


async def _convert_json(
    body: ClientBody,
    length: int | None,
    asked: Operation,
    route: Route,
    deadline: Deadline,
    holding: Reservation,
) -> Converted:
    """Convert a request whose JSON part has this length, or is all of the body."""
    if length is None and body.size == 0:
        raise bad_request("the request has no body")
    if length is not None and body.size is not None and length > body.size:
        raise bad_request(f"{HEADER_LENGTH} is {length}, but the body has {body.size} bytes")
    largest = min(MAX_FAST_REQUEST, route.limits.header_bytes)
    if length is None and body.size is not None and body.size <= largest:
        text = await body.whole(holding)
        if len(text) > MAX_UNSCHEDULED:
            await route.scheduler.next()
        small = fast_convert_request(text, route.limits.json_depth, route.limits.max_tensors)
        if small is not None:
            old = small.body[: small.header_size]
            header = await listing_outputs(old, small.output_encoding, asked, route, deadline)
            whole = small.body if header is old else header + small.body[len(old) :]
            return Converted(
                (whole,), len(whole), len(header), small.output_encoding, small.features
            )
    request = await _read_json(body, length, route, holding)
    surplus = None if length is None or body.size is None else body.size - length
    if surplus is not None and surplus != request.expected_size:
        raise bad_request(
            f"{surplus} bytes follow the request's JSON, "
            f"its binary_data_size parameters add up to {request.expected_size}"
        )
    if length is None and request.expected_size:
        raise bad_request(
            f"an input has binary_data_size, but the request has no {HEADER_LENGTH} header"
        )
    if body.size is None and not request.expected_size:
        await _check_end(body)
    header = await listing_outputs(request.header, request.output_encoding, asked, route, deadline)
    if header is not request.header:
        request = replace(request, header=header)
    length = request.content_length
    held = _held_body(request) or await _whole(_streamed_body(request, body), length)
    return Converted(
        held,
        length,
        len(header),
        request.output_encoding,
        request.features,
        request.input_encodings,
    )


async def _read_json(
    body: ClientBody, length: int | None, route: Route, holding: Reservation
) -> InferRequest:
    missing = _UNKNOWN if length is None else length
    text = await body.read(min(CHUNK_SIZE, missing))
    if len(text) == length and length <= min(MAX_CACHED_HEADER, route.limits.header_bytes):
        alone = header_without_data(bytes(text), route.limits.json_depth, route.limits.max_tensors)
        if alone is not None:
            return alone
    codec = InferRequestConverter(
        route.limits.header_bytes,
        route.limits.json_depth,
        route.offloader_for(body.size),
        route.limits.max_tensors,
    )
    size = body.size if length is None else length
    is_small = size is not None and size <= MAX_UNSCHEDULED
    taken = 0
    while text:
        codec.feed(text)
        missing -= len(text)
        taken += len(text)
        while codec.step() or taken >= CHUNK_SIZE:
            if not is_small:
                taken = 0
                holding.resize(codec.buffered_bytes)
                await route.scheduler.next()
            is_small = False  # what there is to do beyond a share is too much at once
        text = await body.read(min(codec.preferred_read_size, missing)) if missing else b""
    if missing and length is not None:
        raise bad_request(f"the body ends {missing} bytes before {HEADER_LENGTH} says")
    codec.feed(b"", last=True)
    while True:
        await work_off(codec, holding, route.scheduler)
        if codec.future is None:
            return codec.finish()
        await codec.future.wait()


def _held_body(request: InferRequest) -> Body:
    """Give the whole body, where nothing of it is still to come from the client."""
    chunks = [request.header]
    for part in request.tensors:
        if isinstance(part, int):
            if part:
                return None
        else:
            chunks += part
    return [b"".join(chunks)] if request.content_length <= CHUNK_SIZE else chunks


async def _streamed_body(
    request: InferRequest, body: ClientBody
) -> AsyncIterator[bytes | memoryview]:
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
                # Said before the server has the whole request.
                await _check_end(body)
            yield piece


async def _whole(chunks: AsyncIterator[bytes | memoryview], length: int) -> Body:
    """Make one of a small body's chunks: what is at hand as a whole can be sent again."""
    return chunks if length > CHUNK_SIZE else [b"".join([chunk async for chunk in chunks])]


async def _check_end(body: ClientBody) -> None:
    if await body.read():
        raise bad_request("the body goes on after all that its header says")


async def _convert_raw(
    body: ClientBody, asked: Operation, route: Route, deadline: Deadline, holding: Reservation
) -> Converted:
    """Put the header that a raw binary request lacks before its bytes."""
    model = await model_metadata(asked, route, deadline)
    chunks: list[bytes] | None = None
    size = body.size
    if size is None:
        chunks = await _spool(body, route.limits.spool_bytes, holding)
        size = sum(map(len, chunks))
    try:
        preamble = make_raw_binary_preamble(model, size)
    except GatewayError:
        # The model may have changed since: only what it takes now is a reason to refuse.
        route.upstream.metadata.invalidate(asked.model or "")
        model = await model_metadata(asked, route, deadline)
        preamble = make_raw_binary_preamble(model, size)
    header = await listing_outputs(preamble.header, ALL_BINARY, asked, route, deadline)
    start = header + preamble.prefix
    length = len(start) + size
    held = [start, *chunks] if chunks is not None else await _whole(_after(start, body), length)
    return Converted(held, length, len(header), ALL_BINARY, _NO_FACTS, by_metadata=True)


async def _spool(body: ClientBody, cap: int, holding: Reservation) -> list[bytes]:
    chunks: list[bytes] = []
    size = 0
    async for chunk in kept(body.rest()):
        size += len(chunk)
        if size > cap:
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                f"a raw binary request without Content-Length, or compressed, is held, and is "
                f"larger than {cap} bytes (limits.spool_bytes); send a Content-Length",
            )
        holding.resize(size)
        chunks.append(chunk)
    return chunks


async def _after(start: bytes, body: ClientBody) -> AsyncIterator[bytes | memoryview]:
    yield start
    async for chunk in body.rest():
        yield chunk
