"""Serves infer calls: the request in the server's encoding, the response in the client's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.json_request import JsonRequestWriter
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.dialects import Dialect
from gateway.protocol.messages import InferRequestHead, RequestFeatures
from gateway.protocol.operations import model_name_of
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.infer.buffered_response import ResponseRelay, prepend
from gateway.proxy.infer.cloud_content_types import translate_cloud_type
from gateway.proxy.infer.convert_request import (
    ReceivedRequest,
    model_metadata,
    outputs_to_list,
    receive_request,
)
from gateway.proxy.infer.convert_response import convert_response
from gateway.proxy.infer.json_upstream import convert_json_response, json_body, passes_as_json
from gateway.proxy.interfaces import Call, ClientRequest, Destination
from gateway.proxy.retry import UpstreamCall
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.transport import Body, UpstreamRequest


async def infer(call: Call) -> None:
    """Serve an infer request of any encoding: JSON, binary, mixed or raw binary."""
    call = replace(call, response=translate_cloud_type(call.request, call.response))
    with call.destination.memory_budget.reserve() as reservation:
        received = await receive_request(call, reservation)
        reservation.resize(received.buffered_size)
        await send_request(call, received)


async def send_request(call: Call, received: ReceivedRequest) -> None:
    """Send a request in the server's form, and the response to the client.

    Raises GatewayError (400), before any server sees the request, as ``check_request``.
    """
    head = received.request.head
    await check_request(call, head)
    destination = call.destination
    dialect = destination.upstream.dialect
    if dialect.binary:
        unlisted = await outputs_to_list(call, received.request)
        upstream_request = _binary_request(call.request, received, unlisted, dialect)
        convert = convert_response
    else:
        upstream_request = _json_request(call.request, received, destination)
        convert = convert_json_response
    model = model_name_of(call.operation)
    async with UpstreamCall(
        destination, upstream_request, call.deadline, model=model
    ) as upstream_call:
        response = upstream_call.response
        if response.status != 200 and (received.uses_metadata or dialect.binary_only_if_listed):
            # The request may have been made from outdated metadata.
            destination.upstream.metadata.invalidate(call.operation.model or "")
        relay = ResponseRelay(
            response,
            upstream_call.url,
            call.response,
            head.output_encoding,
            destination,
            call.deadline,
        )
        await convert(relay)


def _binary_request(
    request: ClientRequest, received: ReceivedRequest, unlisted: tuple[str, ...], dialect: Dialect
) -> UpstreamRequest:
    header = write_binary_header(received.request, unlisted)
    size = len(header) + received.request.data_size
    changed = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(size),
        HEADER_LENGTH: str(len(header)),
    }
    headers = with_body(request.headers, changed)
    if not (received.request.head.output_encoding.all_binary and dialect.honors_output_encoding):
        # The gateway reads the response.
        headers.popall("Accept-Encoding", None)
    body: Body
    if isinstance(received.body, AsyncIterator):
        body = prepend([header], received.body)
    else:
        body = [header, *received.body]
        if size <= CONVERT_CHUNK:
            body = [b"".join(body)]
    return UpstreamRequest(request.method, request.target, headers, body)


def _json_request(
    request: ClientRequest, received: ReceivedRequest, destination: Destination
) -> UpstreamRequest:
    """Return the request for a server that accepts only JSON."""

    def new_writer() -> JsonRequestWriter:
        return JsonRequestWriter(received.request, destination.policies)

    headers = with_body(request.headers, {"Content-Type": "application/json"})
    if not passes_as_json(received.request.head.output_encoding, destination):
        # The gateway reads the response.
        headers.popall("Accept-Encoding", None)
    size = received.request.data_size
    body = json_body(received.body, size, new_writer, destination.scheduler)
    return UpstreamRequest(request.method, request.target, headers, body)


async def check_request(call: Call, head: InferRequestHead) -> None:
    """Refuse a request that would crash its server.

    Raises GatewayError (400) that names the output or parameter, and what ``model_metadata``
    raises if that is needed.
    """
    features = head.features
    if features.is_plain or not call.destination.upstream.dialect.triton_extensions:
        return
    if features.error:
        raise bad_request(features.error)
    _check_classification_inputs(head)
    await _check_classified_outputs(call, features)


def _check_classification_inputs(head: InferRequestHead) -> None:
    """Refuse classification without elements: Triton divides by their number, and crashes."""
    for tensor in head.inputs:
        if 0 in tensor.shape:
            raise bad_request(
                f"output '{head.features.classified_outputs[0]}': classification needs elements, "
                f"and input '{tensor.name}' of shape {list(tensor.shape)} has none"
            )


async def _check_classified_outputs(call: Call, features: RequestFeatures) -> None:
    """Refuse classification of strings: Triton crashes as it compares them."""
    model = call.operation.model
    outputs = (await model_metadata(call)).outputs
    if not outputs:
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"classification of output '{features.classified_outputs[0]}': the server does not "
            f"say what outputs model '{model}' has",
        )
    datatypes = {output.name: output.datatype for output in outputs}
    for name in features.classified_outputs:
        # The server refuses an output that the model does not have.
        if name in datatypes and datatypes[name].family is Family.TEXT:
            raise bad_request(
                f"output '{name}' of model '{model}' is {datatypes[name].name}, which "
                "cannot be classified"
            )
