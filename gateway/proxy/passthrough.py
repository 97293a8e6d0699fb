"""Passes requests and responses through untouched, streamed in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.codec.json.body_checks import NestingCheck
from gateway.codec.response_form import ResponseForm
from gateway.codec.v2.tensor_check import (
    BodyEnd,
    NoTensorsError,
    TensorCheck,
    last_byte,
    tensor_check,
)
from gateway.errors import ServerName, name_server_in_errors
from gateway.protocol.messages import ALL_BINARY, OutputEncoding, may_name_sequence
from gateway.protocol.operations import QUERIES, OperationKind
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.retry import read_start, send_call
from gateway.proxy.body_io import (
    Chunks,
    ClientBody,
    coalesce,
    feed_each,
    prepend,
    read_first,
    relay_chunks,
    response_chunks,
    stream,
    write,
)
from gateway.proxy.destination import Destination
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse
from gateway.proxy.server_dialect import headers_with_type
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.content_decoding import decode_response
from gateway.upstream.transport import Body, UpstreamRequest, UpstreamResponse


async def passthrough(
    call: Call, target: str | None = None, inference: OperationKind | None = None
) -> None:
    """Pass a request to a server and the response back; ``target`` replaces the request's own.

    With a ``target`` any server gets it, whatever models it has. If the request infers,
    ``inference`` is its kind; then a response without tensors raises GatewayError (502).
    """
    request, destination, deadline = call.request, call.destination, call.deadline
    body = ClientBody(request, destination.limits.max_request_bytes, deadline)
    dialect = destination.upstream.dialect_state.dialect
    limits_chunks = dialect is None or dialect.limits_chunks
    headers = await headers_with_type(request, destination.upstream, deadline)
    max_depth = destination.limits.max_json_depth
    with call.reserve() as reservation:
        checked = await checked_body(
            request, body, max_depth, reservation, limits_chunks=limits_chunks
        )
        upstream_request = UpstreamRequest(
            request.method,
            target or request.target,
            headers,
            checked,
            is_idempotent=_is_idempotent(call, checked),
        )
        async with send_call(call, upstream_request, to_any=target is not None) as upstream_call:
            received, server = upstream_call.response, upstream_call.server
            if call.response.is_grpc:  # the gateway reads it
                ratio = destination.limits.max_decompression_ratio
                received = decode_response(received, server, ratio)
            relay = ResponseRelay(received, server, call.response, destination, deadline)
            if inference is None:
                await relay_response(relay)
            else:
                await relay_tensors(relay, inference)


def _is_idempotent(call: Call, body: Body) -> bool:
    """Tell whether a server may execute a request twice; see UpstreamRequest.

    A V1 prediction for a V1 server is not parsed. If in doubt, it is not idempotent: its body is
    streamed or compressed, or may write the name of a sequence parameter with escapes.
    """
    if call.operation.kind in QUERIES:
        return True
    is_predict = call.operation.kind is OperationKind.PREDICT
    if not is_predict or not isinstance(body, tuple) or "Content-Encoding" in call.request.headers:
        return False
    return not any(may_name_sequence(bytes(piece)) for piece in body)


async def checked_body(
    request: ClientRequest,
    body: ClientBody,
    max_depth: int,
    reservation: Reservation,
    *,
    limits_chunks: bool,
) -> Body:
    """Return the body to send: None without a body, fully buffered if small, else as it arrives.

    A buffered body can be retried. A chunked body is coalesced if the server ``limits_chunks``.
    Raises GatewayError: 400 for JSON nested too deep, before the server has all of it, and 503 if
    too much is buffered.
    """
    if body.size == 0:
        # A Content-Length of 0 is passed on with an empty body, its absence with none.
        return (b"",) if "Content-Length" in request.headers else None
    if body.size is not None and body.size <= CONVERT_CHUNK:
        buffered = await body.read_all(reservation)
        NestingCheck(max_depth).feed(buffered)
        return (buffered,)
    chunks = feed_each(body.read_rest(), NestingCheck(max_depth).feed)
    return coalesce(chunks) if limits_chunks and body.size is None else chunks


@dataclass(frozen=True, slots=True)
class ResponseRelay:
    """A server's response on its way to the client, with the encoding that the client wants.

    It is written in ``form``, from a binary one, or as the protocol says without a form.
    """

    upstream_response: UpstreamResponse
    server: ServerName
    response: ClientResponse
    destination: Destination
    deadline: Deadline
    encoding: OutputEncoding = ALL_BINARY
    form: ResponseForm | None = None

    def reserve(self) -> Reservation:
        """Return a reservation for what is buffered of the response."""
        return self.destination.memory_budget.reserve(self.response.record.reserved)

    def chunks(self) -> Chunks:
        """Yield the body of the server's response as it arrives."""
        return response_chunks(self.upstream_response, self.server, self.deadline)

    async def read_all(self) -> bytes:
        """Return the whole body of the server's response."""
        self.deadline.expect_server(self.server)
        body = await self.upstream_response.read()
        if len(body) == self.upstream_response.content_length:
            return bytes(body)
        if not body:
            return b""
        return b"".join((body, *[chunk async for chunk in self.chunks()]))

    async def send_body(self, body: bytes, headers: CIMultiDict[str]) -> None:
        """Send a response that is fully buffered, with the server's status."""
        received = self.upstream_response
        self.deadline.expect_client()
        await self.response.send(received.status, received.reason, headers, body)

    async def start(self, headers: CIMultiDict[str]) -> None:
        """Start the response, with the server's status."""
        received = self.upstream_response
        await self.response.start(received.status, received.reason, headers)


async def relay_response(
    relay: ResponseRelay, chunks: Chunks | None = None, check: TensorCheck | None = None
) -> None:
    """Pass a response to the client as it arrives; ``chunks`` replace its body.

    With a ``check``, it starts once the body has begun, or once a small one is complete. Raises
    GatewayError (502) if the check refuses it, before the client has all of it.
    """
    if check is not None:
        chunks = await _checked_chunks(relay, chunks, check)
    headers = end_to_end(relay.upstream_response.headers)
    size = relay.upstream_response.content_length
    if size is not None and "Content-Length" not in headers:
        headers["Content-Length"] = str(size)  # of chunks that are all there
    await relay.start(headers)
    await relay_chunks(chunks or relay.chunks(), relay.response, relay.deadline)


async def _checked_chunks(
    relay: ResponseRelay, chunks: Chunks | None, check: TensorCheck
) -> Chunks:
    size = relay.upstream_response.content_length
    if chunks is None and size is not None and size <= CONVERT_CHUNK:
        body = await relay.read_all()
        check.check_whole(body)
        return stream((body,))
    chunks, end = await check_start(chunks or relay.chunks(), check, size)
    return check_end(chunks, end, size)


async def check_start(
    chunks: Chunks, check: TensorCheck, size: int | None
) -> tuple[Chunks, BodyEnd]:
    """Return a body of this size, None if it is unknown, and what must hold at its end.

    Raises GatewayError (502) if its start shows that it does not hold its tensors.
    """
    first = await read_first(chunks, check.start_size)
    end = check.check_start(first[0] if len(first) == 1 else b"".join(first), size)
    return prepend(first, chunks), end


async def check_end(chunks: Chunks, end: BodyEnd, size: int | None) -> Chunks:
    """Yield a body; raises GatewayError (502) in place of its last chunk if it breaks off.

    A body of unknown size is complete only at its end: then the error comes after that chunk.
    """
    received, last = 0, b""
    async for chunk in chunks:
        received += len(chunk)
        last = last_byte(chunk) or last
        if received == size:
            end.check(received, last)
        yield chunk
    end.check(received, last)


async def relay_tensors(relay: ResponseRelay, kind: OperationKind) -> None:
    """Pass on the response to a request that infers, and passed untouched, as it arrives.

    Raises GatewayError (502) that names the server if it holds no tensors.
    """
    received = relay.upstream_response
    with name_server_in_errors(relay.server):
        try:
            check = tensor_check(received.status, received.headers, kind)
        except NoTensorsError as error:
            raise await quote_body(error, relay) from None
        await relay_response(relay, check=check)


async def quote_body(error: NoTensorsError, relay: ResponseRelay) -> NoTensorsError:
    """Return the error of a response with the start of its body, if that arrives soon."""
    relay.deadline.expect_server(relay.server)
    start = await read_start(relay.upstream_response)
    return error if start is None else error.quoting(start)


async def relay_rewritten(
    relay: ResponseRelay, chunks: Chunks, rewrite: Callable[[bytes], bytes], cap: int
) -> None:
    """Pass a successful response with its body rewritten; untouched if larger than ``cap``."""
    with relay.reserve() as reservation:
        first = await read_first(chunks, cap + 1, reservation)
        if sum(map(len, first)) <= cap:
            document = rewrite(b"".join(first))
            await relay.send_body(document, with_body(relay.upstream_response.headers, {}))
            return
        await relay.start(end_to_end(relay.upstream_response.headers))
        for chunk in first:
            await write(relay.response, chunk, relay.deadline)
        first.clear()
    await relay_chunks(chunks, relay.response, relay.deadline)
