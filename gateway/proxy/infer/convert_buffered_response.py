"""Converts infer responses that are fully buffered into the encoding that the client wants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.json.header_length_check import check_header_length
from gateway.codec.policies import JsonPolicies
from gateway.codec.v1.fast_response import write_buffered_prediction
from gateway.codec.v1.response import predict_converter
from gateway.codec.v2.fast_response import fast_convert_response
from gateway.codec.v2.response import ResponseConverter, encoded_converter, json_converter
from gateway.codec.v2.response_reader import has_text_for_base64
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.response_header import (
    check_no_binary_outputs,
    has_encoding,
    parse_response_header,
    read_outputs,
)
from gateway.protocol.v1 import V1ResponseLayout, error_document
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.interfaces import Destination

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


def convert_buffered_response(
    status: int,
    headers: CIMultiDictProxy[str],
    body: bytes,
    encoding: OutputEncoding,
    destination: Destination,
) -> ConvertedResponse | None:
    """Convert a server's response; None if it passes untouched, as errors do.

    Raises GatewayError: 502 for an invalid response, 406 if a policy refuses a value.
    """
    if passes_untouched(status, headers, encoding, destination):
        return None
    dialect = destination.upstream.dialect
    destination = destination_with_base64(destination, encoding)
    if not dialect.binary:
        return _encode(body, None, encoding, destination)
    if not dialect.honors_output_encoding:
        return _convert_unsure(headers, body, encoding, destination)
    if not encoding.all_binary:
        return _convert_binary(headers, body, encoding, destination)
    check_header_length(body)
    if len(body) <= destination.limits.max_inference_header_bytes:
        check_no_binary_outputs(body)
    return None


def convert_large_response(
    headers: CIMultiDictProxy[str], body: bytes, encoding: OutputEncoding, destination: Destination
) -> ConvertedResponse | None:
    """Convert a binary response of status 200 to JSON if its outputs are numbers, else None."""
    dialect = destination.upstream.dialect
    if not (dialect.binary and dialect.honors_output_encoding and encoding.all_json):
        return None
    header_size = parse_header_size(headers, destination.limits.max_inference_header_bytes)
    text = None if header_size is None else fast_convert_response(body, header_size)
    return None if text is None else ConvertedResponse(text)


def passes_untouched(
    status: int, headers: CIMultiDictProxy[str], encoding: OutputEncoding, destination: Destination
) -> bool:
    """Tell by its head whether a response is passed on as it is."""
    dialect = destination.upstream.dialect
    if status != 200:
        return True
    if not dialect.binary:
        return passes_as_json(encoding, destination)
    # The gateway cannot inspect a compressed response.
    is_opaque = HEADER_LENGTH in headers or "Content-Encoding" in headers
    return is_opaque and encoding.all_binary and dialect.honors_output_encoding


def convert_buffered_v1_response(
    status: int,
    reason: str,
    binary: ConvertedResponse,
    layout: V1ResponseLayout,
    destination: Destination,
) -> ConvertedResponse:
    """Write a ``binary`` infer response, or a server's error, in V1 format; raises as above."""
    limits = destination.limits
    body, cap = binary.body, limits.max_inference_header_bytes
    if status != 200:
        return ConvertedResponse(error_document(body[:cap], reason))
    if binary.header_size is None and len(body) > cap:
        raise too_much_json(cap)
    header_size = len(body) if binary.header_size is None else binary.header_size
    text = write_buffered_prediction(body, header_size, layout)
    if text is None:
        converter = new_v1_converter(header_size, layout, destination)
        text = b"".join((converter.text(body), *converter.finish()))
    return ConvertedResponse(text)


def new_v1_converter(
    header_size: int, layout: V1ResponseLayout, destination: Destination
) -> ResponseConverter[Iterator[bytes]]:
    """Make the converter for a V1 client, with the destination's policies and caps."""
    return predict_converter(header_size, layout, *_policies_and_caps(destination))


def new_json_converter(header_size: int, destination: Destination) -> ResponseConverter[None]:
    """Make the converter to JSON, with the destination's policies and caps."""
    return json_converter(header_size, *_policies_and_caps(destination))


def new_converter(
    header_size: int | None, encoding: OutputEncoding, destination: Destination
) -> ResponseConverter[tuple[bytes, Sequence[bytes | memoryview]]]:
    """Make the converter to the requested encoding of each output."""
    return encoded_converter(header_size, encoding, *_policies_and_caps(destination))


def _policies_and_caps(destination: Destination) -> tuple[JsonPolicies, int, int]:
    limits = destination.limits
    return (
        destination.policies,
        limits.max_inference_header_bytes,
        limits.max_buffered_body_bytes,
    )


def too_much_json(cap: int) -> GatewayError:
    """Return the error of a response that should be binary, and is JSON above the cap."""
    return bad_response(
        f"the server's response has more than {cap} bytes of JSON "
        "(limits.max_inference_header_bytes) and no binary tensors behind it"
    )


def passes_as_json(encoding: OutputEncoding, destination: Destination) -> bool:
    """Tell whether the client gets the JSON of a server that speaks only JSON untouched."""
    policies = destination_with_base64(destination, encoding).policies
    return encoding.all_json and not policies.any_base64


def destination_with_base64(destination: Destination, encoding: OutputEncoding) -> Destination:
    """Return the destination with the requested base64 outputs in its policies."""
    if not encoding.as_base64:
        return destination
    return replace(
        destination, policies=replace(destination.policies, as_base64=encoding.as_base64)
    )


def name_endpoint(url: str, error: GatewayError) -> GatewayError:
    """Add the endpoint to the error of an invalid response: codecs do not know it."""
    if error.kind is ErrorKind.BAD_RESPONSE and url not in error.message:
        return bad_response(f"{url}: {error.message}")
    return error


def parse_header_size(headers: CIMultiDictProxy[str], cap: int | None) -> int | None:
    """Return the size of the JSON before a response's tensors; None without tensors.

    Raises GatewayError (502) for an invalid size, and above the cap if there is one.
    """
    # Servers differ in Content-Type: only this header identifies a binary response.
    values = headers.getall(HEADER_LENGTH, [])
    if not values:
        return None
    value = ", ".join(values)  # two values are no number
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise bad_response(f"the server's response has {HEADER_LENGTH}: {value[:40]!r}")
    if cap is not None and int(value) > cap:
        raise bad_response(
            f"the server's response has {value} bytes of JSON before the tensors; "
            f"at most {cap} are taken (limits.max_inference_header_bytes)"
        )
    return int(value)


def convert_to_json(body: bytes, header_size: int, destination: Destination) -> bytes:
    """Write a buffered binary response as JSON; raises GatewayError."""
    text = fast_convert_response(body, header_size)
    if text is None:
        converter = new_json_converter(header_size, destination)
        text = converter.text(body)
        converter.finish()
    return text


def with_empty_data(document: bytes, encoding: OutputEncoding, destination: Destination) -> bytes:
    """Return a response without tensors behind it, with the empty data that the client wants.

    If every binary output is empty, Triton sends sizes of 0 and no data; OpenVINO Model Server
    sends no sizes either. A server may send text although binary was requested; it becomes base64
    if that is wanted. Raises GatewayError (502) if the response promises binary tensors.
    """
    check_no_binary_outputs(document)
    may_have_text = not destination.upstream.dialect.honors_output_encoding
    try:
        if destination.policies.any_base64 and may_have_text:
            return _encode(document, None, encoding, destination).body
        return _with_data(document, encoding, destination)
    except GatewayError:
        return document  # unknown to the gateway: the client gets what the server sent


def becomes_json(
    header_size: int | None, encoding: OutputEncoding, destination: Destination
) -> bool:
    """Tell whether a response whose outputs may be JSON is converted like a binary one."""
    is_within_cap = (header_size or 0) <= destination.limits.max_inference_header_bytes
    text_is_fine = header_size is not None or not destination.policies.any_base64
    return encoding.all_json and text_is_fine and is_within_cap


def has_requested_encoding(
    header: bytes, encoding: OutputEncoding, destination: Destination
) -> bool:
    """Tell whether a response is as requested; False for an invalid one, which gets converted."""
    try:
        fields = parse_response_header(header)
    except GatewayError:
        return False
    return has_encoding(fields, encoding) and not any(
        has_text_for_base64(entry, destination.policies) for entry in fields.get("outputs", ())
    )


def _convert_binary(
    headers: CIMultiDictProxy[str],
    body: bytes,
    encoding: OutputEncoding,
    destination: Destination,
) -> ConvertedResponse | None:
    """Convert a response whose outputs are binary."""
    cap = destination.limits.max_inference_header_bytes
    header_size = parse_header_size(headers, cap)
    if header_size is None:
        check_header_length(body)
        if len(body) > cap:
            return None
        return ConvertedResponse(with_empty_data(body, encoding, destination), None)
    if encoding.all_json:
        return ConvertedResponse(convert_to_json(body, header_size, destination))
    return _encode(body, header_size, encoding, destination)


def _convert_unsure(
    headers: CIMultiDictProxy[str],
    body: bytes,
    encoding: OutputEncoding,
    destination: Destination,
) -> ConvertedResponse | None:
    """Convert a response whose outputs may be JSON although binary was requested."""
    # The header may contain data, which counts as buffered rather than as header.
    header_size = parse_header_size(headers, None)
    if becomes_json(header_size, encoding, destination):
        return _convert_binary(headers, body, encoding, destination)
    if header_size is None:
        check_header_length(body)
        return _encode(body, None, encoding, destination)
    is_within_cap = header_size <= destination.limits.max_inference_header_bytes
    if is_within_cap and has_requested_encoding(body[:header_size], encoding, destination):
        return None
    return _encode(body, header_size, encoding, destination)


def _with_data(document: bytes, encoding: OutputEncoding, destination: Destination) -> bytes:
    if b'"binary_data_size"' not in document and not _EMPTY_SHAPE.search(document):
        return document
    outputs = read_outputs(parse_response_header(document))
    if all(output.binary_size is None for output in outputs):
        return document
    if encoding.all_json:
        return convert_to_json(document, len(document), destination)
    return _encode(document, len(document), encoding, destination).body


def _encode(
    body: bytes, header_size: int | None, encoding: OutputEncoding, destination: Destination
) -> ConvertedResponse:
    """Convert each output to the requested encoding."""
    converter = new_converter(header_size, encoding, destination)
    converter.feed(body, last=True)
    while converter.step():
        pass
    header, tensors = converter.finish()
    if not any(tensors):
        return ConvertedResponse(header)
    body = b"".join((header, *tensors))
    return ConvertedResponse(body, "application/octet-stream", len(header))
