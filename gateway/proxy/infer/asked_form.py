"""Answers of servers that may give an output in another form than was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.response import has_text_for_base64
from gateway.errors import GatewayError
from gateway.protocol.request_header import OutputEncoding
from gateway.protocol.response_header import has_encoding, parse_response_header
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import write
from gateway.proxy.headers import end_to_end
from gateway.proxy.infer.buffered_response import relay_in_binary, relay_mixed
from gateway.proxy.interfaces import ClientResponse, Route
from gateway.upstream.transport import UpstreamResponse

_Chunks = AsyncIterator[bytes | memoryview]


async def relay_in_form(
    response: UpstreamResponse,
    chunks: _Chunks,
    header_size: int | None,
    answer: ClientResponse,
    form: OutputEncoding,
    route: Route,
    deadline: Deadline,
) -> None:
    """Pass on an answer of status 200, brought into the client's form where it is in another.

    ``header_size`` is the bytes of JSON before its tensors, None where there are none. Its first
    ``limits.header_bytes``, at most, are looked at before the client gets any.
    """
    if header_size is None:
        await relay_in_binary(response, chunks, answer, form, route, deadline)
        return
    with route.held.reserve() as holding:
        if header_size <= route.limits.header_bytes:
            first = await _first(chunks, header_size, holding)
            chunks = _with_first(first, chunks)
            if _is_in_form(b"".join(first)[:header_size], form, route.policies):
                await answer.start(200, response.reason, end_to_end(response.headers))
                async for chunk in chunks:
                    await write(answer, chunk, deadline)
                await answer.finish()
                return
        await relay_mixed(response, chunks, header_size, answer, form, route, deadline)


async def _first(chunks: _Chunks, size: int, holding: Reservation) -> list[bytes | memoryview]:
    """Take the first chunks, of so many bytes or more where there are."""
    first: list[bytes | memoryview] = []
    while size > 0 and (chunk := await anext(chunks, b"")):
        first.append(chunk)
        size -= len(chunk)
        holding.more(len(chunk))
    return first


async def _with_first(first: Sequence[bytes | memoryview], chunks: _Chunks) -> _Chunks:
    for chunk in first:
        yield chunk
    async for chunk in chunks:
        yield chunk


def _is_in_form(header: bytes, form: OutputEncoding, policies: JsonPolicies) -> bool:
    """Tell whether an answer is as the client wants it; what makes no sense is looked at closer."""
    try:
        fields = parse_response_header(header)
    except GatewayError:
        return False
    return has_encoding(fields, form) and not any(
        has_text_for_base64(entry, policies) for entry in fields.get("outputs", ())
    )
