"""Converts infer responses that are fully buffered into the encoding that the client wants."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.json.header_length_check import check_header_length
from gateway.codec.policies import JsonPolicies
from gateway.codec.v1.fast_response import write_buffered_prediction
from gateway.codec.v1.response import predict_converter
from gateway.codec.v2.fast_response import fast_convert_response
from gateway.codec.v2.response import encoded_converter, json_converter
from gateway.codec.v2.response_reader import has_text_for_base64
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.response_header import (
    ResponseAction,
    check_no_binary_outputs,
    choose_response_action,
    has_encoding,
    parse_response_header,
    read_outputs,
    response_header_length,
)
from gateway.protocol.v1 import V1ResponseLayout, error_document
from gateway.proxy.destination import Destination, Limits
from gateway.proxy.headers import with_body

_EMPTY_SHAPE = re.compile(rb'"shape"\s*:\s*\[(?:\s*[0-9]+\s*,)*\s*0\s*[],]')
"""The shape of an output without elements."""


class ConvertedResponse:
    """A converted body, and what its headers must say.

    ``header_size`` is the size of the JSON before binary tensors, None without tensors.
    ``content_type`` is None if the server's stays.
    """

    def __init__(
        self,
        body: bytes,
        content_type: str | None = "application/json",
        header_size: int | None = None,
    ) -> None:
        self.body: Final = body
        self.content_type: Final = content_type
        self.header_size: Final = header_size

    def headers(self, received: CIMultiDictProxy[str]) -> CIMultiDict[str]:
        """Return the headers for the client; ``received`` are the server's."""
        changed = {} if self.content_type is None else {"Content-Type": self.content_type}
        if self.header_size is not None:
            changed[HEADER_LENGTH] = str(self.header_size)
        return with_body(received, changed)


class ResponsePlan:
    """What becomes of all responses with the same head to requests of one encoding.

    ``header_size`` is the size of the JSON before binary tensors, None for JSON alone. JSON around
    data may have ``header_cap`` bytes, and data that must be buffered ``body_cap``.
    """

    def __init__(
        self,
        action: ResponseAction,
        header_size: int | None,
        encoding: OutputEncoding,
        policies: JsonPolicies,
        limits: Limits,
    ) -> None:
        self.action: Final = action
        self.header_size: Final = header_size
        self.encoding: Final = encoding
        self.policies: Final = policies
        self.header_cap: Final = limits.max_inference_header_bytes
        self.body_cap: Final = limits.max_buffered_body_bytes

    @property
    def policies_and_caps(self) -> tuple[JsonPolicies, int, int]:
        """Return what converters take."""
        return self.policies, self.header_cap, self.body_cap


def plan_response(
    status: int, headers: CIMultiDictProxy[str], encoding: OutputEncoding, destination: Destination
) -> ResponsePlan:
    """Decide what becomes of a response; raises as ``choose_response_action``."""
    policies, limits = policies_for(encoding, destination), destination.limits
    action, header_size = choose_response_action(
        status,
        headers,
        destination.upstream.dialect,
        encoding,
        policies.any_base64,
        limits.max_inference_header_bytes,
    )
    return ResponsePlan(action, header_size, encoding, policies, limits)


def policies_for(encoding: OutputEncoding, destination: Destination) -> JsonPolicies:
    """Return the destination's policies, with the outputs that a request wants as base64."""
    policies = destination.policies
    return replace(policies, as_base64=encoding.as_base64) if encoding.as_base64 else policies


def convert_buffered_v1_response(
    status: int,
    reason: str,
    headers: CIMultiDictProxy[str],
    body: bytes,
    layout: V1ResponseLayout,
    plan: ResponsePlan,
) -> ConvertedResponse:
    """Convert a server's response, or its error, for a V1 client.

    Raises GatewayError: 502 for an invalid response, 406 if a policy refuses a value.
    """
    cap = plan.header_cap
    if status != 200:
        return ConvertedResponse(error_document(body[:cap], reason))
    converted = convert_body(body, plan)
    if converted is None:
        header_size = response_header_length(headers, cap)
    else:
        body, header_size = converted.body, converted.header_size
    if header_size is None:  # all outputs are empty
        header_size = len(body)
        if header_size > cap:
            raise bad_response(
                f"the server's response has more than {cap} bytes of JSON "
                "(limits.max_inference_header_bytes) and no binary tensors behind it"
            )
    text = write_buffered_prediction(body, header_size, layout)
    if text is None:
        converter = predict_converter(header_size, layout, *plan.policies_and_caps)
        text = b"".join((converter.text(body), *converter.finish()))
    return ConvertedResponse(text)


def convert_body(body: bytes, plan: ResponsePlan) -> ConvertedResponse | None:
    """Convert a response as planned; None if it passes untouched. Raises as above."""
    action, header_size = plan.action, plan.header_size
    if action is ResponseAction.UNTOUCHED:
        return None
    if header_size is None:
        check_header_length(body)
    if action is ResponseAction.FILL:
        filled = body if len(body) > plan.header_cap else fill_empty_outputs(body, plan)
        return None if filled is body else ConvertedResponse(filled, None)
    if header_size is not None:
        if action is ResponseAction.WRITE_JSON:
            return ConvertedResponse(_write_json(body, header_size, plan))
        is_inspected = action is ResponseAction.ENCODE_UNLESS_FITTING
        if is_inspected and has_requested_encoding(body[:header_size], plan):
            return None
    return _encode(body, header_size, plan)


def convert_large_body(body: bytes, plan: ResponsePlan) -> ConvertedResponse | None:
    """Convert binary outputs of numbers to JSON; None if that takes several time slices."""
    if plan.action is not ResponseAction.WRITE_JSON or plan.header_size is None:
        return None
    text = fast_convert_response(body, plan.header_size)
    return None if text is None else ConvertedResponse(text)


def name_endpoint(url: str, error: GatewayError) -> GatewayError:
    """Add the endpoint to the error of an invalid response: codecs do not know it."""
    if error.kind is ErrorKind.BAD_RESPONSE and url not in error.message:
        return bad_response(f"{url}: {error.message}")
    return error


def fill_empty_outputs(document: bytes, plan: ResponsePlan) -> bytes:
    """Return a response without tensors behind it, with the empty data that the client wants.

    If every binary output is empty, Triton sends sizes of 0 and no data; OpenVINO Model Server
    sends no sizes either. Raises GatewayError (502) if the response promises binary tensors.
    """
    check_no_binary_outputs(document)
    if plan.encoding.all_binary:
        return document
    if b'"binary_data_size"' not in document and not _EMPTY_SHAPE.search(document):
        return document
    try:
        outputs = read_outputs(parse_response_header(document))
        if all(output.binary_size is None for output in outputs):
            return document
        if plan.encoding.all_json:
            return _write_json(document, len(document), plan)
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


def _write_json(body: bytes, header_size: int, plan: ResponsePlan) -> bytes:
    """Write a binary response as JSON."""
    text = fast_convert_response(body, header_size)
    if text is None:
        converter = json_converter(header_size, *plan.policies_and_caps)
        text = converter.text(body)
        converter.finish()
    return text


def _encode(body: bytes, header_size: int | None, plan: ResponsePlan) -> ConvertedResponse:
    """Convert each output to the requested encoding."""
    converter = encoded_converter(header_size, plan.encoding, *plan.policies_and_caps)
    converter.feed(body, last=True)
    while converter.step():
        pass
    header, tensors = converter.finish()
    if not any(tensors):
        return ConvertedResponse(header)
    body = b"".join((header, *tensors))
    return ConvertedResponse(body, "application/octet-stream", len(header))
