"""Serves infer calls: the request in the server's encoding, the response in the client's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.codec.v2.json_request import JsonRequestConverter
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.operations import Operation, model_name_of
from gateway.protocol.request_features import RequestFeatures
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.infer.buffered_response import ResponseRelay
from gateway.proxy.infer.cloud_content_types import translate_cloud_type
from gateway.proxy.infer.convert_buffered_request import ConvertedRequest
from gateway.proxy.infer.convert_buffered_response import passes_as_json
from gateway.proxy.infer.convert_request import convert_request, model_metadata
from gateway.proxy.infer.convert_response import convert_response
from gateway.proxy.infer.json_upstream import json_body
from gateway.proxy.interfaces import Call, Destination
from gateway.proxy.retry import UpstreamCall
from gateway.upstream.transport import Body, UpstreamRequest


async def infer(call: Call) -> None:
    """Serve an infer request of any encoding: JSON, binary, mixed or raw binary."""
    call = replace(call, response=translate_cloud_type(call.request, call.response))
    with call.destination.memory_budget.reserve() as reservation:
        converted = await convert_request(call, reservation)
        reservation.resize(converted.buffered_size)
        await send_converted(call, converted)


@dataclass(frozen=True, slots=True)
class ServerForm:
    """What the headers of a converted request say.

    ``header_size`` is the size of the JSON before binary tensors, None for JSON alone. The client's
    Accept-Encoding stays unless the gateway ``reads_response``.
    """

    content_type: str
    header_size: int | None
    reads_response: bool


def write_for_server(
    converted: ConvertedRequest, destination: Destination
) -> tuple[ServerForm, Body]:
    """Write a converted request in the form that the server takes: binary, or JSON.

    Raises GatewayError (400) for what JSON cannot hold.
    """
    dialect, encoding = destination.upstream.dialect, converted.encoding
    if dialect.binary:
        reads_response = not (encoding.all_binary and dialect.honors_output_encoding)
        form = ServerForm("application/octet-stream", converted.header_size, reads_response)
        return form, converted.body

    def new_codec() -> JsonRequestConverter:
        return JsonRequestConverter(
            converted.header_size,
            destination.policies,
            converted.input_encodings,
            encoding.as_base64,
        )

    form = ServerForm("application/json", None, not passes_as_json(encoding, destination))
    return form, json_body(converted.body, converted.size, new_codec, destination.scheduler)


async def send_converted(call: Call, converted: ConvertedRequest) -> None:
    """Send a converted request to a server, and the response to the client.

    Raises GatewayError (400), before any server sees the request, as ``check_request``.
    """
    await check_request(call, converted.features)
    destination = call.destination
    form, body = write_for_server(converted, destination)
    changed = {"Content-Type": form.content_type}
    if form.header_size is not None:
        changed |= {"Content-Length": str(converted.size), HEADER_LENGTH: str(form.header_size)}
    headers = with_body(call.request.headers, changed)
    if form.reads_response:
        headers.popall("Accept-Encoding", None)
    request = UpstreamRequest(
        call.request.method, call.request.target, headers, body, waits_for_chunks=True
    )
    model = model_name_of(call.operation)
    async with UpstreamCall(
        destination, request, call.deadline, call.response.record, model=model
    ) as upstream_call:
        response = upstream_call.response
        check_metadata(response.status, call.operation, destination, converted)
        relay = ResponseRelay(
            response,
            upstream_call.url,
            call.response,
            converted.encoding,
            destination,
            call.deadline,
        )
        await convert_response(relay)


def check_metadata(
    status: int, operation: Operation, destination: Destination, converted: ConvertedRequest
) -> None:
    """Drop cached metadata after an error: the request may have been made from what is outdated."""
    upstream = destination.upstream
    if status != 200 and (converted.uses_metadata or upstream.dialect.binary_only_if_listed):
        upstream.metadata.invalidate(operation.model or "")


async def check_request(call: Call, features: RequestFeatures) -> None:
    """Refuse a request that its model does not accept, or that would crash its server.

    Raises GatewayError (400) that names the input, output or parameter, and what ``model_metadata``
    raises if that is needed.
    """
    declared = call.destination.declared_models.get(call.operation.model or "")
    if declared is not None:
        declared.check(features.inputs)
    if features.is_plain or not call.destination.upstream.dialect.triton_extensions:
        return
    if features.error:
        raise bad_request(features.error)
    _check_classification_inputs(features)
    await _check_classified_outputs(call, features)


def _check_classification_inputs(features: RequestFeatures) -> None:
    """Refuse classification without elements: Triton divides by their number, and crashes."""
    for tensor in features.inputs:
        if 0 in tensor.shape:
            raise bad_request(
                f"output '{features.classified_outputs[0]}': classification needs elements, and "
                f"input '{tensor.name}' of shape {list(tensor.shape)} has none"
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
