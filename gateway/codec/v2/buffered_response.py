"""Converts fully buffered infer responses to the encoding that the client wants, by a plan.

Binary responses of a model look alike but for their numbers and their id. The header is read once,
and the JSON text made of it is kept with the head. Unusual and invalid responses are left to
InferResponseReader and its writers; for all others both give the same result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import orjson

from gateway.codec.elements.encode import TextChunk, fast_encode_numbers
from gateway.codec.json.body_checks import HeaderLengthCheck
from gateway.codec.json.text_search import contains
from gateway.codec.policies import DEFAULT_POLICIES, JsonPolicies
from gateway.codec.v2.json_writer import split_around_data
from gateway.codec.v2.response import ResponseEncoder, json_converter, response_fields
from gateway.codec.v2.response_reader import has_text_for_base64, read_header_fast
from gateway.codec.v2.tensor_check import TensorCheck
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.messages import InferResponse, InferResponseHead, OutputEncoding
from gateway.protocol.response_header import (
    ResponseAction,
    check_no_binary_outputs,
    has_encoding,
    parse_response_header,
    read_outputs,
)

_KEY, _BINARY = "json", "binary"
"""The keys of what was written of a head."""

_SIZE_KEY: Final = b'"binary_data_size"'
_EMPTY_SHAPE: Final = re.compile(rb'"shape"\s*:\s*\[(?:\s*[0-9]+\s*,)*\s*0\s*[],]')
"""The shape of an output without elements."""


class ConvertedResponse:
    """A converted body, and what its headers must say.

    ``header_size`` is the size of the JSON before binary tensors, None without tensors.
    ``content_type`` is None if the server's stays. ``elements`` counts those of all outputs.
    """

    def __init__(
        self,
        body: bytes,
        content_type: str | None = "application/json",
        header_size: int | None = None,
        elements: int = 0,
    ) -> None:
        self.elements: Final = elements
        self.body: Final = body
        self.content_type: Final = content_type
        self.header_size: Final = header_size


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """What becomes of all responses with the same head to requests of one encoding.

    ``header_size`` is the size of the JSON before binary tensors, None for JSON alone. JSON around
    data may have ``header_cap`` bytes, and data that must be buffered ``body_cap``. ``check``
    refuses bodies without tensors; it is None for errors and redirects. Binary ones that are
    converted do without: the conversion checks all of them. ``is_coded`` tells that the body has a
    content coding. ``stated_size`` is the ``header_size`` of a binary response that passes
    untouched, where that was read.
    """

    action: ResponseAction
    header_size: int | None
    encoding: OutputEncoding
    policies: JsonPolicies
    header_cap: int
    body_cap: int
    check: TensorCheck | None = None
    is_coded: bool = False
    stated_size: int | None = None

    @property
    def policies_and_caps(self) -> tuple[JsonPolicies, int, int]:
        """Return what converters take."""
        return self.policies, self.header_cap, self.body_cap


def convert_body(body: bytes, plan: ResponsePlan) -> ConvertedResponse | None:
    """Convert a response as planned; None if it passes untouched.

    Raises GatewayError: 502 for an invalid response, or one without tensors; 406 if a policy
    refuses a value.
    """
    action, header_size = plan.action, plan.header_size
    if plan.check is not None and header_size is None:
        plan.check.check_whole(body)
    if action is ResponseAction.UNTOUCHED:
        return None
    if header_size is None and contains(body, _SIZE_KEY):
        HeaderLengthCheck().feed(body)
    if action is ResponseAction.FILL:
        filled = body if len(body) > plan.header_cap else fill_empty_outputs(body, plan)
        return None if filled is body else ConvertedResponse(filled, None)
    if header_size is not None:
        if action is ResponseAction.WRITE_JSON:
            return _write_json(body, header_size, plan)
        is_inspected = action is ResponseAction.ENCODE_UNLESS_FITTING
        if is_inspected and has_requested_encoding(body[:header_size], plan):
            if plan.check is not None:
                plan.check.check_whole(body)
            return None
    return _encode(body, header_size, plan)


def fill_body(body: bytes, plan: ResponsePlan) -> bytes:
    """Fill a complete body as ``fill_empty_outputs``; raises GatewayError (502) as convert_body."""
    if plan.check is not None:
        plan.check.check_whole(body)
    return fill_empty_outputs(body, plan)


def convert_large_body(body: bytes, plan: ResponsePlan) -> ConvertedResponse | None:
    """Convert binary outputs of numbers to JSON; None if that takes several time slices."""
    if plan.action is not ResponseAction.WRITE_JSON or plan.header_size is None:
        return None
    written = write_json_fast(body, plan.header_size)
    if written is None:
        return None
    text, elements = written
    return ConvertedResponse(text, elements=elements)


def fill_empty_outputs(document: bytes, plan: ResponsePlan) -> bytes:
    """Return a response without tensors behind it, with the empty data that the client wants.

    If every binary output is empty, Triton sends sizes of 0 and no data; OpenVINO Model Server
    sends no sizes either. Raises GatewayError (502) if the response promises binary tensors.
    """
    has_sizes = contains(document, _SIZE_KEY)
    if has_sizes:
        check_no_binary_outputs(document)
    if plan.encoding.all_binary or not (has_sizes or _EMPTY_SHAPE.search(document)):
        return document
    try:
        outputs = read_outputs(parse_response_header(document))
        if all(output.binary_size is None for output in outputs):
            return document
        if plan.encoding.all_json:
            return _write_json(document, len(document), plan).body
        return _encode(document, len(document), plan).body
    except GatewayError:
        return document  # unknown to the gateway: the client gets what the server sent


def has_requested_encoding(header: bytes, plan: ResponsePlan) -> bool:
    """Tell whether a response is as requested; False for an invalid one, which gets converted."""
    try:
        fields = parse_response_header(header)
    except GatewayError:
        return False
    return has_encoding(fields, plan.encoding) and not any(
        has_text_for_base64(entry, plan.policies) for entry in fields.get("outputs", ())
    )


def _write_json(body: bytes, header_size: int, plan: ResponsePlan) -> ConvertedResponse:
    """Write a binary response as JSON."""
    written = write_json_fast(body, header_size)
    if written is not None:
        text, elements = written
        return ConvertedResponse(text, elements=elements)
    converter = json_converter(header_size, *plan.policies_and_caps)
    text = converter.text(body)
    converter.finish()
    return ConvertedResponse(text, elements=converter.element_count)


def _encode(body: bytes, header_size: int | None, plan: ResponsePlan) -> ConvertedResponse:
    """Convert each output to the requested encoding."""
    encoder = ResponseEncoder(header_size, plan.encoding, *plan.policies_and_caps)
    encoder.feed(body, last=True)
    header, tensors = encoder.finish()
    elements = encoder.element_count
    if not any(tensors):
        return ConvertedResponse(header, elements=elements)
    body = b"".join((header, *tensors))
    return ConvertedResponse(body, "application/octet-stream", len(header), elements)


def write_json_fast(body: bytes, header_size: int) -> tuple[bytes, int] | None:
    """Write a binary response as JSON; return it with the number of its elements.

    Returns None if JsonMessageWriter is needed.
    """
    response = read_header_fast(body, header_size)
    if response is None:
        return None
    head = response.head
    if _KEY not in head.written:
        head.written[_KEY] = _write_around_data(head)
    written: tuple[list[bytes], int] | None = head.written[_KEY]
    if written is None:
        return None
    around, data_size = written
    if header_size + data_size != len(body):
        return None
    text: list[TextChunk] = [around[0]]
    if response.id is not None:
        text = [b'{"id":', orjson.dumps(response.id), b",", around[0][1:]]
    data, start, number, count = memoryview(body), header_size, 0, 0
    for output in head.outputs:
        if output.binary_size is None:
            continue  # it is in shared memory
        end = start + output.binary_size
        elements = fast_encode_numbers(data[start:end], output.datatype)
        if elements is None:
            return None
        number += 1
        text += elements, around[number]
        count += output.binary_size // (output.datatype.size or 1)
        start = end
    return b"".join(text), count


def write_binary_response_header(response: InferResponse) -> bytes:
    """Write the inference header of a response whose data follow it; none may be JSON text."""
    text: bytes | None = response.head.written.get(_BINARY)
    if text is None:
        text = response.head.written[_BINARY] = _write_binary_head(response.head)
    if response.id is None:
        return text
    between = b"" if text == b"{}" else b","
    return b"".join((b'{"id":', orjson.dumps(response.id), between, text[1:]))


def _write_binary_head(head: InferResponseHead) -> bytes:
    fields = response_fields(InferResponse(head), DEFAULT_POLICIES)
    for entry, output in zip(fields.get("outputs", ()), head.outputs, strict=True):
        if output.binary_size is not None:
            entry["parameters"] = {**output.parameters, "binary_data_size": output.binary_size}
    return orjson.dumps(fields)


def _write_around_data(head: InferResponseHead) -> tuple[list[bytes], int] | None:
    """Write a response without its id, split where its data belong; and the bytes of its data.

    None if any output is not of numbers, or has none.
    """
    follows = [output.binary_size is not None for output in head.outputs]
    if not head.outputs or not all(
        output.binary_size is None or (output.binary_size and output.datatype.size)
        for output in head.outputs
    ):
        return None
    fields = response_fields(InferResponse(head), DEFAULT_POLICIES)
    size = sum(output.binary_size or 0 for output in head.outputs)
    return split_around_data(fields, RESPONSE.tensors, follows), size
