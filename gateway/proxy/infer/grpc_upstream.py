"""Sends infer requests to servers over gRPC, and returns their responses in binary form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from multidict import CIMultiDict

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.infer import read_infer_response, write_infer_request
from gateway.codec.v2.buffered_response import write_binary_response_header
from gateway.errors import bad_request
from gateway.http1.head import HeadParser, ResponseHead
from gateway.protocol.dialects import GrpcForm
from gateway.protocol.grpc.framing import frame
from gateway.protocol.grpc.headers import GRPC_TYPE, WANTS_STATUS, is_grpc_field
from gateway.protocol.grpc.methods import INFERENCE_SERVICE
from gateway.protocol.messages import InferRequest, InferResponse, OutputTensor
from gateway.protocol.operations import Operation, decode_utf8_name
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.admission.request_slice import RequestSlice
from gateway.proxy.body_io import ResponseRelay, buffer_chunks, convert_message, too_large_to_buffer
from gateway.proxy.destination import Destination
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import cached
from gateway.upstream.grpc.endpoint import DocumentResponse, error_of, read_message
from gateway.upstream.transport import KEYED_RESPONSE_HEADERS, UpstreamRequest, UpstreamResponse

_too_large = partial(too_large_to_buffer, "a request for a server over gRPC")

_HEAD_PARSER: Final = HeadParser(KEYED_RESPONSE_HEADERS)


def infer_message(request: InferRequest, operation: Operation, form: GrpcForm) -> Chunks:
    """Write a ModelInfer request with all of its data.

    Raises GatewayError (400) for what protobuf cannot hold.
    """
    model = decode_utf8_name(operation.model or "", "model")
    version = decode_utf8_name(operation.version or "", "version")
    return write_infer_request(request, model, version, form.takes_raw)


def one_message_request(
    rpc: str, message: Chunks, headers: CIMultiDict[str], service: str = INFERENCE_SERVICE
) -> UpstreamRequest:
    """Return the request of an RPC with one message; ``headers`` are those of an HTTP client."""
    body = (frame(sum(map(len, message))), *message)
    return UpstreamRequest("POST", f"/{service}/{rpc}", grpc_headers(headers), body, is_grpc=True)


def grpc_headers(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """Return the headers of a gRPC call for those of an HTTP client."""
    passed = CIMultiDict(
        (name, value) for name, value in headers.items() if not is_grpc_field(name)
    )
    for name in ("Content-Length", "Accept-Encoding", HEADER_LENGTH, WANTS_STATUS):
        passed.popall(name, None)
    passed.update({"Content-Type": GRPC_TYPE, "TE": "trailers"})
    return passed


async def with_all_data(
    received: ReceivedRequest,
    destination: Destination,
    reservation: Reservation,
    placed: RequestSlice | None = None,
) -> InferRequest:
    """Return a request with all of its data; what is still to come is buffered.

    If the request is ``placed``, it is received into shared memory, and the data are a view of
    that. A message begins with its size. Raises GatewayError: 400 as the body does, 413 over the
    cap.
    """
    request, body = received.request, received.body
    if not isinstance(body, AsyncIterator):
        if not request.missing_size:
            return request
        data = memoryview(b"".join(body))
    elif placed is not None and request.missing_size == request.data_size:
        async for _ in body:
            pass
        data = placed.view[len(placed.view) - request.data_size :]
    else:
        cap = destination.limits.max_buffered_body_bytes
        data = memoryview(b"".join(await buffer_chunks(body, reservation, cap, _too_large)))
    tensors: list[Sequence[bytes | memoryview]] = []
    start = 0
    for tensor in request.head.inputs:
        if tensor.binary_size is not None:
            tensors.append((data[start : start + tensor.binary_size],))
            start += tensor.binary_size
    return InferRequest(request.head, request.id, tuple(tensors))


async def in_binary_form(
    relay: ResponseRelay, request: InferRequest, reservation: Reservation
) -> UpstreamResponse:
    """Read a ModelInfer response, and return it as it would be over HTTP in binary form.

    It has the outputs that the request lists: KServe sends all of them. Raises GatewayError: 502
    that names the server for an invalid one, 400 for a listed output that the model does not have.
    """
    response, server, limits = relay.upstream_response, relay.server, relay.destination.limits
    relay.deadline.expect_server(server)
    message = await read_message(
        response,
        limits.max_buffered_body_bytes,
        server,
        reservation.grow,
        limits.max_decompression_ratio,
    )
    if message is None:
        return DocumentResponse(*error_of(response, server))
    reservation.grow(len(message))
    cap = limits.max_inference_header_bytes
    header_size, body = await convert_message(len(message), binary_body, message, request, cap)
    return DocumentResponse(200, body, binary_head(header_size).headers)


def binary_body(
    message: bytes | memoryview, request: InferRequest, header_cap: int
) -> tuple[int, bytes]:
    """Return a ModelInfer response as the body of one in binary form, after its header's size.

    Raises GatewayError as above; it names no server.
    """
    read, tensors = read_infer_response(message, header_cap)
    if request.head.outputs:
        read, tensors = _listed(read, tensors, {output.name for output in request.head.outputs})
    header = write_binary_response_header(read)
    return len(header), b"".join((header, *(chunk for tensor in tensors for chunk in tensor)))


@cached(CACHED_HEADS)
def binary_head(header_size: int) -> ResponseHead:
    """Return the head of a response in binary form."""
    lines = b"Content-Type: application/octet-stream\r\n%b: %d" % (
        HEADER_LENGTH.encode(),
        header_size,
    )
    return _HEAD_PARSER.parse_response(b"HTTP/1.1 200 \r\n%b\r\n\r\n" % lines, "POST")


def _listed(
    response: InferResponse, tensors: list[Chunks], names: Collection[str]
) -> tuple[InferResponse, list[Chunks]]:
    """Return a response with these outputs alone, and their data."""
    head = response.head
    found = {output.name for output in head.outputs}
    for name in names:
        if name not in found:
            raise bad_request(f"output '{name}' is listed, but the model has none of this name")
    if all(output.name in names for output in head.outputs):
        return response, tensors
    data = iter(tensors)
    kept: list[OutputTensor] = []
    kept_data: list[Chunks] = []
    for output in head.outputs:
        chunks = None if output.binary_size is None else next(data)
        if output.name in names:
            kept.append(output)
            if chunks is not None:
                kept_data.append(chunks)
    listed = replace(head, outputs=tuple(kept), written={})
    return InferResponse(listed, response.id), kept_data
