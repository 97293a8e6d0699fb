"""Converts the responses of servers into the encoding that the client wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from multidict import CIMultiDictProxy

from gateway.codec.json.array_scanner import WINDOW
from gateway.codec.json.body_checks import HeaderLengthCheck
from gateway.codec.response_form import ResponseForm
from gateway.codec.v2.buffered_response import (
    ConvertedResponse,
    ResponsePlan,
    convert_body,
    convert_large_body,
    fill_body,
    has_requested_encoding,
)
from gateway.codec.v2.response import ResponseEncoder, json_converter
from gateway.codec.v2.tensor_check import NoTensorsError, tensor_check
from gateway.errors import name_server_in_errors
from gateway.http1.content_codings import is_encoded
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.operations import OperationKind
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.response_header import (
    ResponseAction,
    choose_response_action,
    is_success,
    response_header_length,
)
from gateway.proxy.admission.memory_budget import run_steps
from gateway.proxy.body_io import (
    Chunks,
    ResponseRelay,
    check_end,
    check_start,
    feed_each,
    prepend,
    quote_body,
    read_first,
    relay_chunks,
    relay_response,
    relay_rewritten,
    slices,
    stream,
)
from gateway.proxy.destination import Destination
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.infer.relay_text import relay_text, send_converted
from gateway.sizes import CONVERT_CHUNK, ENCODE_CHUNK, MAX_FAST_RESPONSE
from gateway.upstream.content_decoding import decode_response


def plan_response(
    status: int, headers: CIMultiDictProxy[str], encoding: OutputEncoding, destination: Destination
) -> ResponsePlan:
    """Decide what becomes of a response.

    Raises GatewayError (502) as ``choose_response_action`` and ``tensor_check``.
    """
    check = tensor_check(status, headers, OperationKind.INFER)
    policies, limits = destination.policies_for(encoding), destination.limits
    action, header_size = choose_response_action(
        status,
        headers,
        destination.upstream.dialect,
        encoding,
        policies.any_base64,
        limits.max_inference_header_bytes,
    )
    caps = limits.max_inference_header_bytes, limits.max_buffered_body_bytes
    return ResponsePlan(
        action, header_size, encoding, policies, *caps, check, is_coded=is_encoded(headers)
    )


async def convert_response(relay: ResponseRelay) -> None:
    """Convert a server's response into the client's encoding; errors pass untouched.

    A response that is in that encoding already passes untouched, too. A small response is
    converted at once, a larger one while it arrives. Clients of another form get errors in it. A
    response with a content coding, although none was asked for, is decoded if it is converted.
    """
    with name_server_in_errors(relay.server):
        plan = await _plan(relay)
        is_passed = plan.action is ResponseAction.UNTOUCHED and relay.form is None
        if plan.is_coded and (relay.response.is_grpc or not is_passed):
            ratio = relay.destination.limits.max_decompression_ratio
            decoded = decode_response(relay.upstream_response, relay.server, ratio)
            relay = replace(relay, upstream_response=decoded)
            plan = await _plan(relay)
        size = relay.upstream_response.content_length
        is_json = plan.action is ResponseAction.WRITE_JSON and relay.form is None
        max_whole = MAX_FAST_RESPONSE if is_json else CONVERT_CHUNK
        if plan.action is ResponseAction.UNTOUCHED and relay.form is None:
            await relay_response(relay, check=plan.check)
        elif size is not None and size <= max_whole:
            await _convert_whole(relay, plan)
        else:
            await _convert_streamed(relay, plan, relay.chunks())


async def _plan(relay: ResponseRelay) -> ResponsePlan:
    """Plan the response; raises GatewayError (502) as ``plan_response``."""
    response = relay.upstream_response
    try:
        return plan_response(response.status, response.headers, relay.encoding, relay.destination)
    except NoTensorsError as error:
        raise await quote_body(error, relay) from None


async def _convert_whole(relay: ResponseRelay, plan: ResponsePlan) -> None:
    """Convert a response at once, as the fast path does; a large one if it is of numbers alone."""
    response = relay.upstream_response
    body = await relay.read_all()
    converted: ConvertedResponse | None
    if len(body) > CONVERT_CHUNK:
        converted = convert_large_body(body, plan)
        if converted is None:
            await _convert_streamed(relay, plan, stream((body,)))
            return
    elif relay.form is None:
        converted = convert_body(body, plan)
    else:
        head = response.status, response.reason, response.headers
        converted = relay.form.convert(*head, body, plan)
    if converted is None:
        await relay.send_body(body, end_to_end(response.headers))
    else:
        await send_converted(relay, converted)


async def _convert_streamed(relay: ResponseRelay, plan: ResponsePlan, chunks: Chunks) -> None:
    response = relay.upstream_response
    if plan.check is not None and plan.header_size is None:
        chunks, end = await check_start(chunks, plan.check, response.content_length)
        if plan.action is ResponseAction.FILL and relay.form is None:  # else it is read
            chunks = check_end(chunks, end, response.content_length)
    if plan.action is not ResponseAction.UNTOUCHED and plan.header_size is None:
        chunks = feed_each(chunks, HeaderLengthCheck().feed)  # raises if tensors follow
    if plan.action in (ResponseAction.ENCODE, ResponseAction.ENCODE_UNLESS_FITTING):
        await _encode(relay, plan, chunks)
    elif relay.form is not None:
        await _relay_in_form(relay, relay.form, plan, chunks)
    elif plan.action is ResponseAction.FILL:
        await relay_rewritten(relay, chunks, partial(fill_body, plan=plan), plan.header_cap)
    else:
        await relay_text(relay, json_converter(plan.header_size, *plan.policies_and_caps), chunks)


async def _encode(relay: ResponseRelay, plan: ResponsePlan, chunks: Chunks) -> None:
    """Convert each output to the requested encoding, for which all of them are buffered."""
    scheduler, size = relay.destination.scheduler, plan.header_size
    with relay.reserve() as reservation:
        if plan.action is ResponseAction.ENCODE_UNLESS_FITTING and size is not None:
            first = await read_first(chunks, size, reservation)
            chunks = prepend(first, chunks)
            if has_requested_encoding(b"".join(first)[:size], plan):
                if relay.form is None:
                    await relay_response(relay, chunks, plan.check)
                else:
                    await _relay_in_form(relay, relay.form, plan, chunks)
                return
        encoder = ResponseEncoder(size, plan.encoding, *plan.policies_and_caps)
        # JSON is read step by step, while data behind it are encoded as they are fed.
        async for piece in slices(chunks, WINDOW if size is None else ENCODE_CHUNK, scheduler):
            encoder.feed(piece)
            reservation.resize(encoder.buffered_bytes)
            await run_steps(encoder, reservation, scheduler)
        if size is None:
            encoder.feed(b"", last=True)
            await run_steps(encoder, reservation, scheduler)
        header, tensors = encoder.finish()
        relay.response.record.response_elements = encoder.element_count
        if relay.form is None:
            await _send_encoded(relay, header, tensors)
        else:
            in_form = relay.form.converter(len(header), plan)
            await relay_text(relay, in_form, stream((header, *tensors)))


async def _send_encoded(
    relay: ResponseRelay, header: bytes, tensors: Sequence[bytes | memoryview]
) -> None:
    """Send a header, with binary tensors behind it if there are any."""
    changed = {"Content-Type": "application/json"}
    if any(tensors):
        changed = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    headers = with_body(relay.upstream_response.headers, changed)
    headers["Content-Length"] = str(len(header) + sum(map(len, tensors)))
    await relay.start(headers)
    await relay_chunks(stream((header, *tensors)), relay.response, relay.deadline)


async def _relay_in_form(
    relay: ResponseRelay, form: ResponseForm, plan: ResponsePlan, chunks: Chunks
) -> None:
    """Send a binary response, or a server's error, in the form of the client."""
    response, size = relay.upstream_response, None
    if is_success(response.status):
        size = response_header_length(response.headers, plan.header_cap)
    if size is not None:
        await relay_text(relay, form.converter(size, plan), chunks)
        return
    with relay.reserve() as reservation:
        # Above the cap, no more of an error is of interest, and a response is invalid.
        body = b"".join(await read_first(chunks, plan.header_cap + 1, reservation))
        converted = form.convert(response.status, response.reason, response.headers, body, plan)
        await send_converted(relay, converted)
