"""Converts the responses of servers into the encoding that the client wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from multidict import CIMultiDictProxy

from gateway.codec.elements.encode import OffloadedText, TextChunk
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
from gateway.codec.v2.response import ResponseConverter, ResponseEncoder, json_converter
from gateway.codec.v2.tensor_check import NoTensorsError, tensor_check
from gateway.errors import GatewayError, name_server_in_errors
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
from gateway.proxy.admission.memory_budget import Reservation, run_steps
from gateway.proxy.body_io import (
    ChunkJoiner,
    Chunks,
    prepend,
    read_first,
    relay_chunks,
    slices,
    split,
    stream,
    write,
)
from gateway.proxy.destination import Destination
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.passthrough import (
    ResponseRelay,
    check_end,
    check_start,
    quote_body,
    relay_response,
    relay_rewritten,
)
from gateway.sizes import CONVERT_CHUNK, ENCODE_CHUNK, MAX_FAST_RESPONSE
from gateway.upstream.content_decoding import decode_response

_MAX_QUEUED_PARTS = 5
"""Parts of a response that wait for an offloaded part before them: up to 2 MiB of memory."""


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
        if plan.action is ResponseAction.UNTOUCHED and relay.form is None:
            await relay_response(relay, check=plan.check)
        elif size is not None and size <= CONVERT_CHUNK:
            await _convert_buffered(relay, plan)
        elif size is not None and size <= MAX_FAST_RESPONSE and relay.form is None:
            await _convert_large(relay, plan)
        else:
            await _convert_streamed(relay, plan, relay.chunks())


async def _plan(relay: ResponseRelay) -> ResponsePlan:
    """Plan the response; raises GatewayError (502) as ``plan_response``."""
    response = relay.upstream_response
    try:
        return plan_response(response.status, response.headers, relay.encoding, relay.destination)
    except NoTensorsError as error:
        raise await quote_body(error, relay) from None


async def _convert_buffered(relay: ResponseRelay, plan: ResponsePlan) -> None:
    response = relay.upstream_response
    body = await relay.read_all()
    converted: ConvertedResponse | None
    if relay.form is None:
        converted = convert_body(body, plan)
    else:
        head = response.status, response.reason, response.headers
        converted = relay.form.convert(*head, body, plan)
    if converted is None:
        await relay.send_body(body, end_to_end(response.headers))
    else:
        await _send(relay, converted)


async def _send(relay: ResponseRelay, converted: ConvertedResponse) -> None:
    """Send a response that is fully buffered."""
    changed = {} if converted.content_type is None else {"Content-Type": converted.content_type}
    if converted.header_size is not None:
        changed[HEADER_LENGTH] = str(converted.header_size)
    relay.response.record.response_elements = converted.elements
    headers = with_body(relay.upstream_response.headers, changed)
    await relay.send_body(converted.body, headers)


async def _convert_large(relay: ResponseRelay, plan: ResponsePlan) -> None:
    """Convert a response of numbers at once, as the fast path does, and any other in parts."""
    if plan.action is not ResponseAction.WRITE_JSON:
        await _convert_streamed(relay, plan, relay.chunks())
        return
    body = await relay.read_all()
    converted = convert_large_body(body, plan)
    if converted is None:
        await _convert_streamed(relay, plan, stream((body,)))
    else:
        await _send(relay, converted)


async def _convert_streamed(relay: ResponseRelay, plan: ResponsePlan, chunks: Chunks) -> None:
    response = relay.upstream_response
    if plan.check is not None and plan.header_size is None:
        chunks, end = await check_start(chunks, plan.check, response.content_length)
        if plan.action is ResponseAction.FILL and relay.form is None:  # else it is read
            chunks = check_end(chunks, end, response.content_length)
    if plan.action is not ResponseAction.UNTOUCHED and plan.header_size is None:
        chunks = check_all_json(chunks)
    if plan.action in (ResponseAction.ENCODE, ResponseAction.ENCODE_UNLESS_FITTING):
        await _encode(relay, plan, chunks)
    elif relay.form is not None:
        await _relay_in_form(relay, relay.form, plan, chunks)
    elif plan.action is ResponseAction.FILL:
        await relay_rewritten(relay, chunks, partial(fill_body, plan=plan), plan.header_cap)
    else:
        await _relay_text(relay, json_converter(plan.header_size, *plan.policies_and_caps), chunks)


async def check_all_json(chunks: Chunks) -> Chunks:
    """Yield a response without a header length; raises GatewayError (502) if tensors follow."""
    check = HeaderLengthCheck()
    async for chunk in chunks:
        check.feed(chunk)
        yield chunk


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
        async for piece in slices(chunks, ENCODE_CHUNK, scheduler):
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
            await _relay_text(relay, in_form, stream((header, *tensors)))


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
        await _relay_text(relay, form.converter(size, plan), chunks)
        return
    with relay.reserve() as reservation:
        # Above the cap, no more of an error is of interest, and a response is invalid.
        body = b"".join(await read_first(chunks, plan.header_cap + 1, reservation))
        converted = form.convert(response.status, response.reason, response.headers, body, plan)
        await _send(relay, converted)


async def _relay_text(
    relay: ResponseRelay,
    converter: ResponseConverter,
    chunks: Chunks,
) -> None:
    """Send the text of a response while it arrives; text of less than a chunk is sent at once.

    Time slices are taken by the bytes converted, not by the text: buffered rows give no text for a
    long time, and a server's data may all be there without a pause.
    """
    scheduler = relay.destination.scheduler
    size = CONVERT_CHUNK if relay.form is None else ENCODE_CHUNK
    with relay.reserve() as reservation:
        sender = _TextSender(relay, converter, reservation)
        async for chunk in chunks:
            for piece in split(chunk, size):
                await sender.convert(piece)
                await scheduler.next_slice()
        await sender.finish()


class _TextSender:
    """Sends the text of a response as it is converted; parts may be written by threads.

    Text of less than a chunk waits for more.
    """

    def __init__(
        self,
        relay: ResponseRelay,
        converter: ResponseConverter,
        reservation: Reservation,
    ) -> None:
        self._relay = relay
        self._converter = converter
        self._reservation = reservation
        self._offloader = relay.destination.offloader_for(relay.upstream_response.content_length)
        self._parts: deque[TextChunk | OffloadedText] = deque()
        self._joiner = ChunkJoiner()

    async def convert(self, data: bytes | memoryview) -> None:
        """Convert data, and send what text there is; raises GatewayError (502, 406)."""
        try:
            self._parts.extend(self._converter.parts(data, self._offloader))
        except GatewayError:
            await self._raise_first_error()
            raise
        # The text of up to one chunk waits for more.
        buffered = CONVERT_CHUNK + self._converter.buffered_bytes + sum(map(_size_of, self._parts))
        if self._relay.response.started:
            self._reservation.resize_unchecked(buffered)
        else:
            self._reservation.resize(buffered)
        await self._send_finished(_MAX_QUEUED_PARTS)

    async def finish(self) -> None:
        """Send the rest of the text, and end the response; raises GatewayError as ``convert``."""
        try:
            rest = self._converter.finish()
        except GatewayError:
            await self._raise_first_error()
            raise
        await self._send_finished(0)
        unscheduled = 0
        for text in rest:
            await self._send(text)
            unscheduled += len(text)
            if unscheduled >= ENCODE_CHUNK:
                unscheduled = 0
                await self._relay.destination.scheduler.next_slice()
        text = self._joiner.take_rest()
        if self._relay.response.started:
            if text:
                await self._write(text)
            await self._relay.response.finish()
        else:
            elements = self._converter.element_count
            await _send(self._relay, ConvertedResponse(text, elements=elements))

    async def _raise_first_error(self) -> None:
        """Raise the error of the first part that has one: it stands before that of a later part."""
        for part in self._parts:
            if isinstance(part, OffloadedText):
                await part.future.wait()
                part.text()

    async def _send_finished(self, max_left: int) -> None:
        """Send the finished parts in order, and wait for parts beyond ``max_left``."""
        while self._parts:
            part = self._parts[0]
            if isinstance(part, OffloadedText):
                if not part.future.done and len(self._parts) <= max_left:
                    return
                await part.future.wait()
                part = part.text()
            self._parts.popleft()
            await self._send(part)

    async def _send(self, text: TextChunk) -> None:
        """Send text with what waits, if that is at least a chunk."""
        chunk = self._joiner.add(text)
        if not chunk:
            return
        if not self._relay.response.started:
            await self._start()
        await self._write(chunk)

    async def _start(self) -> None:
        relay = self._relay
        # The response's head is read by now, unless there is not even text before the first output.
        relay.response.record.response_elements = self._converter.element_count
        changed = {"Content-Type": "application/json"}
        await relay.start(with_body(relay.upstream_response.headers, changed))

    async def _write(self, text: bytes | memoryview) -> None:
        await write(self._relay.response, text, self._relay.deadline)


def _size_of(part: TextChunk | OffloadedText) -> int:
    """Estimate the bytes of a part; those of an offloaded part become up to four times as many."""
    return 5 * CONVERT_CHUNK if isinstance(part, OffloadedText) else len(part)
