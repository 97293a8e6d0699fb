"""An infer exchange: the request into the server's form, the answer into the client's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from gateway.codec.infer_request import InferRequest, InferRequestCodec
from gateway.codec.json_request import JsonRequest
from gateway.codec.policies import BytesAs
from gateway.codec.small_request import LARGEST, convert_small_request
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.exchange.attempts import Attempts
from gateway.exchange.base import ClientAnswer, ClientRequest, Route
from gateway.exchange.cloud_forms import in_ordinary_form
from gateway.exchange.deadline import Deadline
from gateway.exchange.headers import HEADER_LENGTH, header_length, with_body
from gateway.exchange.held import Holding
from gateway.exchange.infer_answer import relay_answer
from gateway.exchange.json_upstream import json_body, relay_json_answer
from gateway.exchange.listed_outputs import listing_outputs, model_metadata
from gateway.exchange.pump import CHUNK, ClientBody
from gateway.protocol.endpoints import Endpoint
from gateway.protocol.inference_header import AnswerForm
from gateway.protocol.raw_binary import raw_binary_preamble
from gateway.upstream.base import Body, UpstreamRequest

_ALL_BINARY = AnswerForm(binary_by_default=True, binary_by_output={})


@dataclass(frozen=True, slots=True)
class _Converted:
    """A request in binary form; ``size`` in bytes is the whole body's. See also InferRequest."""

    body: Body
    size: int
    header_size: int
    answer: AnswerForm
    written_as: Mapping[int, BytesAs] = field(default_factory=dict)


async def infer(
    request: ClientRequest,
    answer: ClientAnswer,
    asked: Endpoint,
    route: Route,
    deadline: Deadline,
) -> None:
    """Answer an infer request of any form: JSON, binary, mixed or raw binary."""
    answer = in_ordinary_form(request, answer)
    length = header_length(request.headers)
    body = ClientBody(request, route.limits.request_bytes, deadline)
    with route.held.holding() as holding:
        if length == 0:
            converted = await _convert_raw(body, asked, route, deadline, holding)
        else:
            converted = await _convert(body, length, asked, route, deadline, holding)
        if route.upstream.dialect.binary:
            upstream_request, relay = _upstream_request(request, converted), relay_answer
        else:
            upstream_request, relay = _json_request(request, converted, route), relay_json_answer
        async with Attempts(route, upstream_request, deadline, model=asked.model) as attempt:
            response = attempt.response
            by_metadata = length == 0 or route.upstream.dialect.lists_outputs
            if by_metadata and response.status != 200:
                # The header may have been made from metadata that is no longer true.
                route.upstream.metadata.drop(asked.model or "")
            await relay(response, answer, converted.answer, route, attempt.url, deadline)


def _upstream_request(request: ClientRequest, converted: _Converted) -> UpstreamRequest:
    changed = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(converted.size),
        HEADER_LENGTH: str(converted.header_size),
    }
    headers = with_body(request.headers, changed)
    if not converted.answer.all_binary:
        # The answer has to be read here.
        headers.popall("Accept-Encoding", None)
    return UpstreamRequest(request.method, request.target, headers, converted.body)


def _json_request(request: ClientRequest, converted: _Converted, route: Route) -> UpstreamRequest:
    """Make the request for a server that takes JSON only."""

    def writer() -> JsonRequest:
        written_as, as_base64 = converted.written_as, converted.answer.as_base64
        return JsonRequest(converted.header_size, route.policies, written_as, as_base64)

    headers = with_body(request.headers, {"Content-Type": "application/json"})
    if not converted.answer.all_json:
        # The answer has to be read here.
        headers.popall("Accept-Encoding", None)
    body = json_body(converted.body, converted.size, writer, route.turns)
    return UpstreamRequest(request.method, request.target, headers, body)


async def _convert(
    body: ClientBody,
    length: int | None,
    asked: Endpoint,
    route: Route,
    deadline: Deadline,
    holding: Holding,
) -> _Converted:
    """Convert a request whose JSON part has this length, or is all of the body."""
    if length is None and body.size == 0:
        raise bad_request("the request has no body")
    if length is not None and body.size is not None and length > body.size:
        raise bad_request(f"{HEADER_LENGTH} is {length}, but the body has {body.size} bytes")
    if length is None and body.size is not None and body.size <= LARGEST:
        small = convert_small_request(await body.whole(), route.limits.json_depth)
        if small is not None and body.size <= route.limits.header_bytes:
            old = small.body[: small.header_size]
            header = await listing_outputs(old, small.answer, asked, route, deadline)
            whole = small.body if header is old else header + small.body[len(old) :]
            return _Converted((whole,), len(whole), len(header), small.answer)
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
    header = await listing_outputs(request.header, request.answer, asked, route, deadline)
    request = replace(request, header=header)
    length = request.content_length
    held = _held_body(request) or await _whole(_streamed_body(request, body), length)
    return _Converted(held, length, len(request.header), request.answer, request.written_as)


async def _read_json(
    body: ClientBody, length: int | None, route: Route, holding: Holding
) -> InferRequest:
    lender = route.lender_for(body.size)
    codec = InferRequestCodec(route.limits.header_bytes, route.limits.json_depth, lender)
    missing = length
    work = 0
    while missing is None or missing:
        text = await body.read(codec.room if missing is None else min(codec.room, missing))
        if not text:
            break
        codec.feed(text)
        if missing is not None:
            missing -= len(text)
        work += len(text)
        if work >= CHUNK:
            work = 0
            holding.is_now(codec.held)
            await route.turns.next()
    if missing:
        raise bad_request(f"the body ends {missing} bytes before {HEADER_LENGTH} says")
    codec.feed(b"", last=True)
    while True:
        while codec.work():
            holding.is_now(codec.held)
            await route.turns.next()
        if codec.loan is None:
            return codec.finish()
        await codec.loan.wait()


def _held_body(request: InferRequest) -> Body:
    """Give the whole body, where nothing of it is still to come from the client."""
    chunks = [request.header]
    for part in request.tensors:
        if isinstance(part, int):
            if part:
                return None
        else:
            chunks += part
    return [b"".join(chunks)] if request.content_length <= CHUNK else chunks


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
    return chunks if length > CHUNK else [b"".join([chunk async for chunk in chunks])]


async def _check_end(body: ClientBody) -> None:
    if await body.read():
        raise bad_request("the body goes on after all that its header says")


async def _convert_raw(
    body: ClientBody, asked: Endpoint, route: Route, deadline: Deadline, holding: Holding
) -> _Converted:
    """Put the header that a raw binary request lacks before its bytes."""
    model = await model_metadata(asked, route, deadline)
    chunks: list[bytes | memoryview] | None = None
    size = body.size
    if size is None:
        chunks = await _spool(body, route.limits.spool_bytes, holding)
        size = sum(map(len, chunks))
    try:
        preamble = raw_binary_preamble(model, size)
    except GatewayError:
        # The model may have changed since: only what it takes now is a reason to refuse.
        route.upstream.metadata.drop(asked.model or "")
        model = await model_metadata(asked, route, deadline)
        preamble = raw_binary_preamble(model, size)
    header = await listing_outputs(preamble.header, _ALL_BINARY, asked, route, deadline)
    start = header + preamble.prefix
    length = len(start) + size
    held = [start, *chunks] if chunks is not None else await _whole(_after(start, body), length)
    return _Converted(held, length, len(header), _ALL_BINARY)


async def _spool(body: ClientBody, cap: int, holding: Holding) -> list[bytes | memoryview]:
    chunks: list[bytes | memoryview] = []
    size = 0
    async for chunk in body.rest():
        size += len(chunk)
        if size > cap:
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                f"a raw binary request without Content-Length, or compressed, is held, and is "
                f"larger than {cap} bytes (limits.spool_bytes); send a Content-Length",
            )
        holding.is_now(size)
        chunks.append(chunk)
    return chunks


async def _after(start: bytes, body: ClientBody) -> AsyncIterator[bytes | memoryview]:
    yield start
    async for chunk in body.rest():
        yield chunk
