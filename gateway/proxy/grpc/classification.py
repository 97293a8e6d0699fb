"""Refuses classification of strings in calls that pass through: Triton 2.51 dies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Final

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.methods import find_method
from gateway.protocol.grpc.wire import MAX_MESSAGE, WireError, WireReader
from gateway.protocol.messages import RequestFeatures
from gateway.protocol.operations import quote_name
from gateway.protocol.request_features import check_classified_outputs
from gateway.proxy.body_io import Chunks
from gateway.proxy.filters.mirror import DiscardResponse
from gateway.proxy.grpc.request import GrpcRequest
from gateway.proxy.infer.convert_request import model_metadata
from gateway.proxy.interfaces import Call
from gateway.upstream.metadata_cache import UpstreamResponseError

_UNKNOWN_MODEL: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)


def marking_request(call: Call) -> GrpcRequest:
    """Return the request of a call, which marks outputs that may want classification.

    Requests that copy a body for a mirror, and their copies, are scanned once more.
    """
    request = call.request
    if not isinstance(request, GrpcRequest):
        # The sizes were checked before a rewrite may have added to them.
        limits = replace(call.destination.limits, max_request_bytes=MAX_MESSAGE)
        method = find_method(request.target.partition("?")[0])
        request = GrpcRequest(request, method, limits, call.destination.scheduler.next_slice)
        request.content_length = call.request.content_length
    request.marks_outputs = True
    return request


async def check_outputs(call: Call, request: GrpcRequest) -> None:
    """Check the messages that were read since the last check.

    Raises GatewayError (400) that names an output of strings that are to be classified, or 501 if
    the server does not say what outputs its model has.
    """
    for model, outputs in request.take_marked():
        await _check_message(call, *model, outputs)


async def check_chunks(call: Call, request: GrpcRequest, chunks: Chunks) -> Chunks:
    """Yield a request's body, without the end of a message that ``check_outputs`` refuses."""
    async for chunk in chunks:
        await check_outputs(call, request)
        yield chunk


async def _check_message(call: Call, model: str, version: str, outputs: list[bytes]) -> None:
    names = _classified(outputs)
    if not names:
        return
    operation = replace(
        call.operation, model=quote_name(model), version=quote_name(version) or None
    )
    # The record of the call is that of the attempt in progress.
    response = DiscardResponse(CallRecord("", ""))
    call = replace(call, operation=operation, response=response)
    try:
        known = (await model_metadata(call)).outputs
    except UpstreamResponseError as error:
        strip_tracebacks(error)
        if error.status in _UNKNOWN_MODEL:
            return  # so it says to the call itself
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"classification of output '{names[0]}': the server does not say what outputs "
            f"model '{model}' has",
        ) from None
    check_classified_outputs(RequestFeatures(names), known, model)


def _classified(outputs: Sequence[bytes]) -> tuple[str, ...]:
    """Return the names of the outputs that have the parameter."""
    found: list[str] = []
    for output in outputs:
        try:
            name, is_classified = _read_output(output)
        except WireError:
            continue  # the server refuses it
        if is_classified:
            found.append(name)
    return tuple(found)


def _read_output(output: bytes) -> tuple[str, bool]:
    name, is_classified = "", False
    reader = WireReader(output)
    while tag := reader.next_tag():
        if tag == fields.REQUESTED_NAME:
            name = reader.read_text()
        elif tag == fields.REQUESTED_PARAMETERS:
            is_classified = _has_key(reader.read_view()) or is_classified
        else:
            reader.skip(tag)
    return name, is_classified


def _has_key(entry: memoryview) -> bool:
    """Tell whether an entry of a map has the parameter as its key."""
    key: bytes | memoryview = b""
    reader = WireReader(entry)
    while tag := reader.next_tag():
        if tag == fields.KEY:
            key = reader.read_view()
        else:
            reader.skip(tag)
    return key == fields.CLASSIFICATION
