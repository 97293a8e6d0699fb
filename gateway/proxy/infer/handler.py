"""Serves infer calls: the request in the server's encoding, the response in the client's."""

from __future__ import annotations

from dataclasses import replace

from gateway.errors import bad_request, name_server_in_errors
from gateway.protocol.operations import Operation, model_name_of
from gateway.protocol.request_features import check_classified_inputs, check_classified_outputs
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.v1 import V1ResponseLayout
from gateway.proxy.attempts.retry import UpstreamCall
from gateway.proxy.headers import with_body
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.convert_request import (
    model_metadata,
    outputs_to_list,
    receive_request,
)
from gateway.proxy.infer.convert_response import ResponseRelay, convert_response
from gateway.proxy.infer.grpc_upstream import grpc_infer_request, in_binary_form
from gateway.proxy.infer.server_form import check_metadata, write_for_server
from gateway.proxy.interfaces import Call
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.transport import UpstreamRequest

_TEXT_FORMS = ("json", "v1")
"""The forms of clients whose tensors are JSON."""


async def infer(call: Call) -> None:
    """Serve an infer request of any encoding: JSON, binary, mixed or raw binary."""
    with call.reserve() as reservation:
        received = await receive_request(call, reservation)
        reservation.resize(received.buffered_size)
        if received.request.head.memory > CONVERT_CHUNK:
            await call.destination.scheduler.next_slice()  # to check and write a thousand inputs
        await send_request(call, received, call.request.target)


async def send_request(
    call: Call, received: ReceivedRequest, target: str, layout: V1ResponseLayout | None = None
) -> None:
    """Send a request in the server's form, and the response to the client.

    ``layout`` is that of the response to a V1 client. Raises GatewayError (400), before any server
    sees the request, as ``check_request``.
    """
    await check_request(call, received)
    if call.destination.upstream.infers_over_grpc:
        await _send_over_grpc(call, received, layout)
        return
    destination = call.destination
    unlisted: tuple[str, ...] = ()
    if destination.upstream.dialect.binary:
        unlisted = await outputs_to_list(call, received.request)
    form, body = write_for_server(received, unlisted, destination)
    record = call.response.record
    record.server_form = form.name
    if form.is_converted(from_json=record.labels.client_form in _TEXT_FORMS):
        record.request_elements = received.request.head.element_count
    changed = {"Content-Type": form.content_type}
    if form.header_size is not None:
        changed |= {"Content-Length": str(form.size), HEADER_LENGTH: str(form.header_size)}
    headers = with_body(call.request.headers, changed)
    if form.reads_response or layout is not None:
        headers.popall("Accept-Encoding", None)
    upstream_request = UpstreamRequest(
        call.request.method,
        target,
        headers,
        body,
        waits_for_chunks=True,
        is_idempotent=received.is_idempotent,
    )
    await _exchange(call, upstream_request, received, layout)


async def _send_over_grpc(
    call: Call, received: ReceivedRequest, layout: V1ResponseLayout | None
) -> None:
    """Send a request as ModelInfer, and the response in the form that the client wants."""
    destination, record = call.destination, call.response.record
    record.server_form = "grpc"
    if record.labels.client_form in _TEXT_FORMS:
        record.request_elements = received.request.head.element_count
    with call.reserve() as reservation:
        headers = with_body(call.request.headers, {})
        upstream_request = await grpc_infer_request(
            received, call.operation, headers, destination, reservation
        )
        await _exchange(call, upstream_request, received, layout)


async def _exchange(
    call: Call,
    request: UpstreamRequest,
    received: ReceivedRequest,
    layout: V1ResponseLayout | None,
) -> None:
    """Send the request to a server, and the response to the client."""
    destination, record = call.destination, call.response.record
    model = model_name_of(call.operation)
    async with UpstreamCall(
        destination, request, call.deadline, record, model=model
    ) as upstream_call:
        relay = ResponseRelay(
            upstream_call.response,
            upstream_call.server,
            call.response,
            received.request.head.output_encoding,
            destination,
            call.deadline,
            layout,
        )
        await relay_infer(relay, received, call.operation, is_grpc=request.is_grpc)


async def relay_infer(
    relay: ResponseRelay, received: ReceivedRequest, operation: Operation, *, is_grpc: bool
) -> None:
    """Send the response to a request on to the client; ``is_grpc`` if it came over gRPC."""
    destination = relay.destination
    if not is_grpc:
        check_metadata(relay.upstream_response.status, operation, destination, received)
        await convert_response(relay)
        return
    relay.deadline.expect_server(relay.server)
    with relay.reserve() as reservation:
        with name_server_in_errors(relay.server):
            response = await in_binary_form(
                relay.upstream_response, received.request, relay.server, destination, reservation
            )
        check_metadata(response.status, operation, destination, received)
        over_grpc = destination.over_grpc()
        await convert_response(replace(relay, upstream_response=response, destination=over_grpc))


async def check_request(call: Call, received: ReceivedRequest) -> None:
    """Refuse a request that its model does not accept, or that would crash its server.

    Raises GatewayError (400) that names the input, output or parameter, and what ``model_metadata``
    raises if that is needed.
    """
    head = received.request.head
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
