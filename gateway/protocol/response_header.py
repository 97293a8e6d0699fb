"""Parses and checks the JSON part of a server's response, and decides what becomes of its body."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import orjson
from multidict import CIMultiDictProxy

from gateway.errors import GatewayError, bad_response
from gateway.protocol.dialects import Dialect
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.json_errors import ExtractedArray, invalid_json_error, parse_json
from gateway.protocol.messages import Fields, InferResponseHead, OutputEncoding, OutputTensor
from gateway.protocol.request_header import (
    HEADER_LENGTH,
    HEADER_LENGTH_DIGITS,
    check_entries,
    check_object,
    is_nested_deeper,
    read_tensor,
    without,
)

MAX_RESPONSE_DEPTH = 200
"""Levels of nesting that a response's JSON may have."""

MAX_OUTPUTS = 4096
"""Outputs that a response may have."""


class ResponseAction(Enum):
    """What becomes of the body of a response."""

    UNTOUCHED = "untouched"
    """It passes untouched."""
    FILL = "fill"
    """It is JSON, in which outputs without elements may lack the data that the client wants."""
    WRITE_JSON = "write JSON"
    """Its outputs are binary, and become JSON while they arrive."""
    ENCODE = "encode"
    """Each output is converted to the requested encoding, for which it is buffered."""
    ENCODE_UNLESS_FITTING = "encode unless fitting"
    """The same, unless its JSON says that all outputs have the requested encoding already."""


def is_success(status: int) -> bool:
    """Tell whether the response to a request that infers must hold tensors: any 2xx."""
    return 200 <= status < 300


def parse_response_header(text: bytes, cuts: Sequence[ExtractedArray] = ()) -> Fields:
    """Parse the JSON part of a response; ``cuts`` are the arrays extracted from it.

    Raises GatewayError (502).
    """
    try:
        fields = parse_json(text)
    except orjson.JSONDecodeError as error:
        raise invalid_json_error(RESPONSE, text, error, cuts) from None
    checked = check_object(fields, RESPONSE)
    if is_nested_deeper(text, MAX_RESPONSE_DEPTH):
        raise bad_response(f"the server's response is JSON nested deeper than {MAX_RESPONSE_DEPTH}")
    return checked


def read_response_head(fields: Fields, outputs: tuple[OutputTensor, ...]) -> InferResponseHead:
    """Read all but the id of a response with these outputs.

    Members of other types than the protocol's, such as KServe's null, count as unknown.
    """
    known: dict[str, Any] = {}
    for key, kind in (("model_name", str), ("model_version", str), ("parameters", dict)):
        if isinstance(fields.get(key), kind):
            known[key] = fields[key]
    extra = without(fields, *known, "outputs" if outputs else "")
    if isinstance(fields.get("id"), str):
        del extra["id"]
    return InferResponseHead(
        outputs,
        known.get("model_name"),
        known.get("model_version"),
        known.get("parameters", {}),
        extra,
    )


def read_outputs(fields: Fields) -> tuple[OutputTensor, ...]:
    """Read the outputs of a response; raises GatewayError (502) if one is invalid.

    An output without elements and without data counts as binary of 0 bytes.
    """
    entries = check_entries(fields, RESPONSE) if "outputs" in fields else []
    if len(entries) > MAX_OUTPUTS:
        raise RESPONSE.too_many_tensors(MAX_OUTPUTS)
    return tuple(_read_output(i, entry) for i, entry in enumerate(entries))


def _read_output(index: int, entry: Fields) -> OutputTensor:
    _, name, datatype, shape, parameters, size = read_tensor(index, entry, RESPONSE)
    if size is None and 0 in shape and "data" not in entry:
        # As OpenVINO Model Server writes it.
        size = None if "shared_memory_region" in parameters else 0
    extra = without(entry, "name", "datatype", "shape", "data", "parameters" if parameters else "")
    parameters = without(parameters, "binary_data_size")
    return OutputTensor(name, datatype, shape, size, parameters, extra)


def check_no_binary_outputs(document: bytes) -> None:
    """Check a response without a header length: none of its outputs may claim binary data.

    Raises GatewayError (502) that names an output with a binary size but without data.
    """
    try:
        fields = parse_response_header(document)
        outputs = read_outputs(fields)
    except GatewayError:
        return  # the conversion reports the error
    for output, entry in zip(outputs, fields.get("outputs", ()), strict=True):
        if output.binary_size and "data" not in entry:
            raise bad_response(
                f"output '{output.name}' of the server's response has {output.binary_size} bytes "
                "of binary data, but the response has no Inference-Header-Content-Length"
            )


def has_encoding(fields: Fields, encoding: OutputEncoding) -> bool:
    """Tell whether each output of a response has the requested encoding.

    An output with neither data nor size is in shared memory, unless it has no elements.
    """
    outputs = fields.get("outputs", [])
    return isinstance(outputs, list) and all(_has_encoding(entry, encoding) for entry in outputs)


def _has_encoding(entry: Any, encoding: OutputEncoding) -> bool:
    if not isinstance(entry, dict):
        return False
    has_data, parameters = "data" in entry, entry.get("parameters")
    has_size = isinstance(parameters, dict) and parameters.get("binary_data_size") is not None
    if not has_data and not has_size:
        shape = entry.get("shape")
        return isinstance(shape, list) and 0 not in shape
    return has_data != has_size and has_size == encoding.wants_binary(str(entry.get("name")))


def response_header_length(headers: CIMultiDictProxy[str], cap: int | None) -> int | None:
    """Return the size of the JSON before a response's tensors; None without tensors.

    Raises GatewayError (502) for an invalid size, and above the cap if there is one.
    """
    # Servers differ in Content-Type: only this header identifies a binary response.
    values = headers.getall(HEADER_LENGTH, [])
    if not values:
        return None
    value = ", ".join(values)  # two values are no number
    if not HEADER_LENGTH_DIGITS.fullmatch(value) or not int(value):
        raise bad_response(f"the server's response has {HEADER_LENGTH}: {value[:40]!r}")
    if cap is not None and int(value) > cap:
        raise bad_response(
            f"the server's response has {value} bytes of JSON before the tensors; "
            f"at most {cap} are taken (limits.max_inference_header_bytes)"
        )
    return int(value)


def reads_response(dialect: Dialect, encoding: OutputEncoding, any_base64: bool) -> bool:
    """Tell whether the gateway must read successful responses to send them as requested.

    ``any_base64`` tells whether BYTES of any output are written as base64.
    """
    if dialect.binary:
        return not (encoding.all_binary and dialect.honors_output_encoding)
    return not encoding.all_json or any_base64


def choose_response_action(
    status: int,
    headers: CIMultiDictProxy[str],
    dialect: Dialect,
    encoding: OutputEncoding,
    any_base64: bool,
    header_cap: int,
) -> tuple[ResponseAction, int | None]:
    """Return the action, and the size of the JSON before tensors if the action needs it.

    ``encoding`` is the requested one. Raises GatewayError (502) for an invalid size of the JSON, or
    one above the cap.
    """
    if not is_success(status):
        return ResponseAction.UNTOUCHED, None
    if not reads_response(dialect, encoding, any_base64):
        # The gateway cannot inspect a compressed response.
        is_opaque = HEADER_LENGTH in headers or "Content-Encoding" in headers
        is_passed = is_opaque or not dialect.binary
        return (ResponseAction.UNTOUCHED if is_passed else ResponseAction.FILL), None
    if not dialect.binary:
        return ResponseAction.ENCODE, None
    # If the server may have put data into the JSON, that counts as buffered, not as a header.
    cap = header_cap if dialect.honors_output_encoding else None
    size = response_header_length(headers, cap)
    is_small = size is None or size <= header_cap
    is_text_fine = size is not None or not any_base64
    if dialect.honors_output_encoding or (encoding.all_json and is_small and is_text_fine):
        if size is None:
            return ResponseAction.FILL, None
        return (ResponseAction.WRITE_JSON if encoding.all_json else ResponseAction.ENCODE), size
    may_fit = size is not None and is_small
    return (ResponseAction.ENCODE_UNLESS_FITTING if may_fit else ResponseAction.ENCODE), size
