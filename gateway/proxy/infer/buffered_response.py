"""Answers of an infer exchange that are held, as their header must hold what comes later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from gateway.codec.v2.binary_response import BinaryResponseConverter
from gateway.codec.v2.response import MixedResponseConverter
from gateway.protocol.request_header import OutputEncoding
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import work_off
from gateway.proxy.body_io import write
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.interfaces import ClientResponse, Route
from gateway.sizes import ENCODE_CHUNK
from gateway.upstream.transport import UpstreamResponse

_Chunks = AsyncIterator[bytes | memoryview]


async def relay_in_binary(
    response: UpstreamResponse,
    chunks: _Chunks,
    answer: ClientResponse,
    form: OutputEncoding,
    route: Route,
    deadline: Deadline,
) -> None:
    """Pass on an answer that is all JSON, with the outputs wanted in binary form behind it.

    BYTES that are wanted as base64 become that.
    """
    limits = route.limits
    codec = BinaryResponseConverter(form, limits.header_bytes, limits.spool_bytes, route.policies)
    with route.held.reserve() as holding:
        async for chunk in chunks:
            for start in range(0, len(chunk), ENCODE_CHUNK):
                codec.feed(chunk[start : start + ENCODE_CHUNK])
                holding.resize(codec.buffered_bytes)
                await route.scheduler.next()
                await work_off(codec, holding, route.scheduler)
        codec.feed(b"", last=True)
        await work_off(codec, holding, route.scheduler)
        header, tensors = codec.finish()
        await _send(response, answer, header, tensors, deadline)


async def relay_mixed(
    response: UpstreamResponse,
    chunks: _Chunks,
    header_size: int,
    answer: ClientResponse,
    form: OutputEncoding,
    route: Route,
    deadline: Deadline,
) -> None:
    """Pass on an answer of JSON with tensors behind it, each output in the form that is wanted."""
    limits = route.limits
    codec = MixedResponseConverter(
        header_size, form, route.policies, limits.header_bytes, limits.spool_bytes
    )
    with route.held.reserve() as holding:
        async for chunk in chunks:
            for start in range(0, len(chunk), ENCODE_CHUNK):
                codec.feed(chunk[start : start + ENCODE_CHUNK])
                holding.resize(codec.buffered_bytes)
                await route.scheduler.next()
                await work_off(codec, holding, route.scheduler)
        header, tensors = codec.finish()
        await _send(response, answer, header, tensors, deadline)


async def _send(
    response: UpstreamResponse,
    answer: ClientResponse,
    header: bytes,
    tensors: Sequence[bytes | memoryview],
    deadline: Deadline,
) -> None:
    """Give an answer of a header, and tensors in binary form if there are any behind it."""
    changed = {"Content-Type": "application/json"}
    if any(tensors):
        changed = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    headers = with_body(response.headers, changed)
    headers["Content-Length"] = str(len(header) + sum(map(len, tensors)))
    await answer.start(200, response.reason, headers)
    for part in (header, *tensors):
        await write(answer, part, deadline)
    await answer.finish()
