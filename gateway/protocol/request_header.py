"""Parses and checks the JSON part of an infer request, and tells the form of its client.

Binary tensor data extension, "Binary Tensor Request"; KServe's extension document for
``binary_data_output``. The JSON part of a response: response_header.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from multidict import CIMultiDictProxy

from gateway.errors import bad_request
from gateway.protocol.cloud_types import HEADER_SIZE_PARAMETER
from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary
from gateway.protocol.json_errors import (
    ExtractedArray,
    describe_value,
    invalid_json_error,
    parse_json,
    quote_value,
)
from gateway.protocol.messages import (
    Fields,
    InferRequestHead,
    InputTensor,
    OutputEncoding,
    RequestedOutput,
)
from gateway.protocol.operations import OperationKind
from gateway.protocol.request_features import read_features
from gateway.protocol.tensors import MAX_RANK, MAX_TENSORS, element_count
from gateway.sizes import QUOTED_NAME

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header with the size of the JSON part."""

HEADER_LENGTH_DIGITS = re.compile(r"[0-9]{1,19}")

V1_REQUEST_HINT = (
    "inputs is missing; the request has instances, as in the V1 protocol: "
    "send such a request to /v1/models/MODEL:predict"
)
"""The error of a V1 request at a V2 path."""

_LARGEST_SIZE = 2**63 - 1

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACES = bytes.maketrans(b"{}", b"[]")
# "[" is one less, "]" is one more.
_MIDDLE = np.int8(sum(b"[]") // 2)


_DATA_SOURCES = ("data", "binary_data_size", "shared_memory_region")
"""Where the elements of an input may come from: a member, or one of two parameters."""


def header_length(headers: CIMultiDictProxy[str]) -> int | None:
    """Return the Inference-Header-Content-Length of a request, None if it is missing.

    Raises GatewayError (400) unless it is one or more ASCII digits, once.
    """
    values = headers.getall(HEADER_LENGTH, [])
    if not values:
        return None
    if len(values) > 1 or not HEADER_LENGTH_DIGITS.fullmatch(values[0]):
        raise bad_request(
            f"{HEADER_LENGTH} must be one number of bytes, got {', '.join(values)[:QUOTED_NAME]!r}"
        )
    return int(values[0])


def client_form(kind: OperationKind, headers: CIMultiDictProxy[str]) -> str:
    """Return the form of an infer request by its head: json, binary, raw or v1; else empty."""
    if kind is OperationKind.PREDICT:
        return "v1"
    if kind is not OperationKind.INFER:
        return ""
    length = headers.get(HEADER_LENGTH)
    if length is None:
        return "binary" if HEADER_SIZE_PARAMETER in headers.get("Content-Type", "") else "json"
    return "raw" if length == "0" else "binary"


def parse_request_header(
    text: bytes, depth_cap: int, cuts: Sequence[ExtractedArray] = ()
) -> Fields:
    """Parse the JSON part of a request; ``cuts`` are the arrays extracted from it.

    Raises GatewayError (400) unless the text is a JSON object nested no deeper than the cap.
    """
    try:
        fields = parse_json(text)
    except orjson.JSONDecodeError as error:
        raise invalid_json_error(REQUEST, text, error, cuts) from None
    checked = check_object(fields, REQUEST)
    check_nesting(text, depth_cap)
    return checked


def check_nesting(text: bytes, cap: int) -> None:
    """Raise GatewayError (400) if the JSON of a request is nested deeper than the cap."""
    if is_nested_deeper(text, cap):
        raise bad_request(f"the request's JSON is nested deeper than {cap}")


def is_nested_deeper(text: bytes, cap: int) -> bool:
    """Tell whether valid JSON is nested deeper than the cap."""
    # A quick bound first: it counts brackets inside strings, too.
    if text.count(b"[") + text.count(b"{") <= cap:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", text).translate(_BRACES, _NO_BRACKETS), np.int8)
    return bool(np.cumsum(_MIDDLE - brackets, dtype=np.int32).max(initial=0) > cap)


def read_inputs(fields: Fields, tensor_cap: int = MAX_TENSORS) -> tuple[InputTensor, ...]:
    """Read and check the inputs of a request.

    Raises GatewayError (400) that names the input for a missing or mistyped field, an unknown
    datatype, a negative dimension, or not exactly one source of data. Also for too many inputs.
    """
    request_id = fields.get("id", "")
    if not isinstance(request_id, str):
        raise bad_request(f"id must be a string, got {describe_value(request_id)}")
    if "inputs" not in fields:
        missing = "inputs is missing; it must be an array of tensors"
        raise bad_request(V1_REQUEST_HINT if "instances" in fields else missing)
    entries = check_entries(fields, REQUEST)
    if len(entries) > tensor_cap:
        raise REQUEST.too_many_tensors(tensor_cap)
    return tuple(_read_input(i, entry) for i, entry in enumerate(entries))


def read_output_encoding(fields: Fields, tensor_cap: int = MAX_TENSORS) -> OutputEncoding:
    """Read the requested encoding of each output.

    An output's ``binary_data`` overrides the request's ``binary_data_output``.
    Raises GatewayError (400) for mistyped fields and too many outputs.
    """
    default = _flag(_parameters(fields, "the request"), "binary_data_output", False, "the request")
    by_output: dict[str, bool] = {}
    as_base64: set[str] = set()
    outputs = _requested_outputs(fields)
    if len(outputs) > tensor_cap:
        raise bad_request(
            f"the request asks for more than {tensor_cap} outputs{REQUEST.tensor_limit}"
        )
    for i, entry in enumerate(outputs):
        name = _name(entry, f"outputs[{i}]")
        label = f"output '{name}'"
        wants_binary = _flag(_parameters(entry, label), "binary_data", default, label)
        if has_base64_content(entry) and not wants_binary and name not in by_output:
            as_base64.add(name)
        by_output.setdefault(name, wants_binary)  # if an output is listed twice, the first counts
    return OutputEncoding(default, by_output, frozenset(as_base64))


def read_head(
    fields: Fields, inputs: tuple[InputTensor, ...], tensor_cap: int = MAX_TENSORS
) -> InferRequestHead:
    """Read all but the id of a request with these inputs; raises as ``read_output_encoding``."""
    output_encoding = read_output_encoding(fields, tensor_cap)
    outputs = tuple(map(_read_requested_output, _requested_outputs(fields)))
    parameters = without(fields.get("parameters", {}), "binary_data_output")
    return InferRequestHead(
        inputs,
        outputs,
        parameters,
        without(fields, "id", "inputs", "outputs", "parameters"),
        output_encoding,
        read_features(parameters, inputs, outputs),
    )


def _read_requested_output(entry: Fields) -> RequestedOutput:
    parameters = entry.get("parameters", {})
    if has_base64_content(entry) and not _is_explicitly_binary(parameters):
        parameters = without(parameters, "content_type")  # the gateway encodes base64
    return RequestedOutput(
        entry["name"], without(parameters, "binary_data"), without(entry, "name", "parameters")
    )


def requests_binary_explicitly(fields: Fields) -> bool:
    """Tell whether a request asks for binary outputs in the way that every server understands.

    Servers differ in what ``binary_data_output`` means for listed outputs.
    """
    outputs = _requested_outputs(fields)
    if not outputs:
        return fields.get("parameters", {}).get("binary_data_output") is True
    return all(_is_explicitly_binary(entry.get("parameters", {})) for entry in outputs)


def _is_explicitly_binary(parameters: Fields) -> bool:
    return parameters.get("binary_data") is True or "shared_memory_region" in parameters


def without(fields: Fields, *keys: str) -> Fields:
    """Return fields without those of some keys."""
    return {key: value for key, value in fields.items() if key not in keys}


def has_base64_content(entry: Fields) -> bool:
    """Tell whether an input or requested output has MLServer's content type base64."""
    parameters = entry.get("parameters")
    return isinstance(parameters, dict) and parameters.get("content_type") == "base64"


def mark_base64(entry: Fields) -> None:
    """Set the content type base64 of an input, an output, or a requested output."""
    entry["parameters"] = {**(entry.get("parameters") or {}), "content_type": "base64"}


def _read_input(index: int, entry: Fields) -> InputTensor:
    label, name, datatype, shape, parameters, size = read_tensor(index, entry, REQUEST)
    present = [
        source for source in _DATA_SOURCES if source in (entry if source == "data" else parameters)
    ]
    if not present:
        raise bad_request(
            f"{label}: data is missing, and there is neither binary_data_size nor "
            "shared_memory_region in its parameters"
        )
    if len(present) > 1:
        raise bad_request(
            f"{label} needs exactly one of data, binary_data_size and shared_memory_region; "
            f"it has {' and '.join(present)}"
        )
    base64 = has_base64_content(entry) if present[0] == "data" else None
    if base64 and datatype.family is not Family.TEXT:
        raise bad_request(
            f"{label}: the content_type base64 is for BYTES only, not for {datatype.name}"
        )
    # A content type of base64 describes the JSON data.
    parameters = without(parameters, "binary_data_size", "content_type" if base64 else "")
    extra = without(entry, "name", "datatype", "shape", "parameters", "data")
    return InputTensor(name, datatype, shape, size, base64, parameters, extra)


def read_tensor(
    index: int, entry: Fields, words: ErrorVocabulary
) -> tuple[str, str, Datatype, tuple[int, ...], Fields, int | None]:
    """Read and check what inputs and outputs have in common.

    Returns how errors name the tensor, its name, datatype, shape, parameters, and binary size.
    """
    name = _name(entry, f"{words.tensors}[{index}]{words.part_suffix}", words)
    label = words.label(name) + words.part_suffix
    datatype, shape = read_datatype(entry, label, words), read_shape(entry, label, words)
    parameters = _parameters(entry, label, words)
    size = parameters.get("binary_data_size")
    if size is None and (words.null_is_absent or "binary_data_size" not in parameters):
        return label, name, datatype, shape, parameters, None
    if type(size) is not int or not 0 <= size <= _LARGEST_SIZE:
        raise words.malformed(
            f"{label}: binary_data_size must be an integer of 0 or more, got {describe_value(size)}"
        )
    if datatype.size is not None and size != element_count(shape) * datatype.size:
        raise words.malformed(
            f"{label}: binary_data_size is {size}, but shape {list(shape)} "
            f"of {datatype.name} takes {element_count(shape) * datatype.size} bytes"
        )
    return label, name, datatype, shape, parameters, size


def check_object(fields: object, words: ErrorVocabulary) -> Fields:
    """Return a message that is a JSON object; raises GatewayError (400, 502) for anything else."""
    if not isinstance(fields, dict):
        raise words.malformed(
            f"{words.name} must be a JSON object with {words.tensors}, got {describe_value(fields)}"
        )
    return fields


def check_entries(fields: Fields, words: ErrorVocabulary) -> list[Fields]:
    """Return the tensors of a message, each an object; raises GatewayError (400, 502)."""
    return _entries(fields, words.tensors, words)


def _entries(fields: Fields, key: str, words: ErrorVocabulary = REQUEST) -> list[Fields]:
    entries = fields[key]
    if not isinstance(entries, list):
        what = f"{key}{words.part_suffix}"
        raise words.malformed(f"{what} must be an array of tensors, got {describe_value(entries)}")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise words.malformed(
                f"{key}[{i}]{words.part_suffix} must be an object, got {describe_value(entry)}"
            )
    return entries


def _requested_outputs(fields: Fields) -> list[Fields]:
    return _entries(fields, "outputs") if "outputs" in fields else []


def _required(entry: Fields, key: str, label: str, words: ErrorVocabulary) -> Any:
    """Return a required field; null counts as present."""
    if key not in entry:
        raise words.malformed(f"{label}: {key} is missing")
    return entry[key]


def _name(entry: Fields, label: str, words: ErrorVocabulary = REQUEST) -> str:
    name = _required(entry, "name", label, words)
    if not isinstance(name, str):
        raise words.malformed(f"{label}: name must be a string, got {describe_value(name)}")
    return name


def read_datatype(entry: Fields, label: str, words: ErrorVocabulary) -> Datatype:
    """Return the datatype of a tensor; raises GatewayError that names the tensor."""
    datatype = _required(entry, "datatype", label, words)
    if not isinstance(datatype, str):
        raise words.malformed(
            f'{label}: datatype must be a string such as "FP32", got {describe_value(datatype)}'
        )
    if datatype not in DATATYPES:
        raise words.malformed(
            f"{label}: unknown datatype {quote_value(datatype)}; known are {', '.join(DATATYPES)}"
        )
    return DATATYPES[datatype]


def read_shape(entry: Fields, label: str, words: ErrorVocabulary) -> tuple[int, ...]:
    """Return the shape of a tensor; raises GatewayError that names the tensor."""
    shape = _required(entry, "shape", label, words)
    if not isinstance(shape, list):
        raise words.malformed(
            f"{label}: shape must be an array of integers, got {describe_value(shape)}"
        )
    if len(shape) > MAX_RANK:
        raise words.malformed(
            f"{label}: shape has {len(shape)} dimensions; at most {MAX_RANK} are allowed"
        )
    for size in shape:
        if type(size) is not int or size < 0:
            raise words.malformed(
                f"{label}: shape {quote_value(shape)} must hold integers of 0 or more only"
            )
    return tuple(shape)


def _parameters(entry: Fields, label: str, words: ErrorVocabulary = REQUEST) -> Fields:
    parameters = entry.get("parameters", {})
    if parameters is None and words.null_is_absent:
        return {}
    if not isinstance(parameters, dict):
        raise words.malformed(
            f"{label}: parameters must be an object, got {describe_value(parameters)}"
        )
    return parameters


def _flag(parameters: Fields, key: str, default: bool, label: str) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise bad_request(f"{label}: {key} must be true or false, got {describe_value(value)}")
    return value
