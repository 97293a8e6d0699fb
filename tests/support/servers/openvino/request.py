"""Reads infer requests as OpenVINO Model Server does."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.integration.triton.models import Model
from tests.support.servers.numpy_models import Arrays

_DTYPES: dict[str, npt.DTypeLike] = {
    "BOOL": "?",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    "BYTES": "O",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
}
_PARAMETERS = "Could not parse request parameters"
_INPUT = "Could not parse input content. Not valid ndarray detected"
_LENGTH_INVALID = "Inference-Header-Content-Length header is invalid and couldn't be parsed"
_BINARY_EXCEEDED = "Received buffer size is smaller than binary_data_size parameter indicates"
_BOTH = "Request contains values both in binary data and in content value"
_MIXED = (
    "Passing buffers both in ModelInferRequest::InferInputTensor::contents and in "
    "ModelInferRequest::raw_input_contents is not allowed"
)


class RefusedError(Exception):
    """What the server answers instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request: its id, its inputs, and which outputs are to be binary."""

    id: str
    arrays: Arrays
    binary: frozenset[str]


def parse_request(body: bytes, header_length: str | None, model: Model) -> ParsedRequest:
    """Read a request; raises RefusedError."""
    end = _header_length(header_length, len(body))
    fields = _parsed(body[:end])
    for parameters in _all_parameters(fields):
        _check_parameters(parameters)
    entries = fields.get("inputs")
    if not entries:
        raise RefusedError(400, "Invalid JSON structure, missing inputs")
    tensors = {each["name"]: _tensor(each) for each in entries}
    _take_raw(list(zip(entries, tensors.values(), strict=True)), body[end:])
    _check_names(set(tensors), model)
    arrays = {name: tensor.array() for name, tensor in tensors.items()}
    return ParsedRequest(fields.get("id", ""), arrays, _binary_outputs(fields))


@dataclass(slots=True)
class _Tensor:
    datatype: str
    shape: tuple[int, ...]
    elements: list[Any]
    raw: bytes | None = None

    def array(self) -> npt.NDArray[Any]:
        """Return the tensor; raises RefusedError where elements and shape do not fit together."""
        dtype, count = np.dtype(_DTYPES[self.datatype]), math.prod(self.shape)
        if self.raw is None:
            elements = self.elements
            if self.datatype == "FP64":  # which it takes for FP32 on the way
                elements = np.array(elements, np.float32).tolist()
        elif self.datatype == "BYTES":
            elements = list(_split(self.raw))
        else:
            if len(self.raw) != count * dtype.itemsize:
                raise RefusedError(400, "Invalid content size of tensor proto")
            return np.frombuffer(self.raw, dtype).reshape(self.shape)
        if len(elements) != count:
            raise RefusedError(400, "Invalid number of values in tensor proto container")
        return np.array([*elements, None], object)[:-1].astype(dtype).reshape(self.shape)


def _header_length(text: str | None, body: int) -> int:
    if text is None:
        return body
    if not text.isdigit():
        raise RefusedError(500, _LENGTH_INVALID)
    if int(text) > body:
        raise RefusedError(
            500, "Inference-Header-Content-Length header exceeds actual payload length"
        )
    return int(text)


def _parsed(text: bytes) -> dict[str, Any]:
    """Read the JSON part, which ends at a NUL; it is nothing at all in a raw binary request."""
    try:
        fields = json.loads(text.partition(b"\0")[0])
    except ValueError as error:
        raise RefusedError(412, f"The file is not valid json - {error}") from None
    if not isinstance(fields, dict):
        raise RefusedError(400, "Request body should be JSON object")
    return fields


def _take_raw(inputs: list[tuple[dict[str, Any], _Tensor]], rest: bytes) -> None:
    """Return each input that has no elements in JSON its bytes; nobody looks at what is left over.

    All inputs have to be binary, or none.
    """
    raw = [each for each in inputs if not each[1].elements]
    if any("binary_data_size" in _parameters(entry) for entry, tensor in inputs if tensor.elements):
        raise RefusedError(500, _BOTH)
    for entry, tensor in raw:
        size = _size(entry, tensor, len(inputs), len(rest))
        if size > len(rest):
            raise RefusedError(400, _BINARY_EXCEEDED)
        tensor.raw, rest = rest[:size], rest[size:]
    if len(raw) not in (0, len(inputs)):
        raise RefusedError(400, _MIXED)


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = entry.get("parameters", {})
    return parameters


def _all_parameters(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in (fields, *fields.get("inputs", ()), *fields.get("outputs", ())):
        yield _parameters(each)


def _check_parameters(parameters: Any) -> None:
    """Refuse all but texts, truth values and integers of 32 bits."""
    for value in parameters.values():
        is_small = isinstance(value, int) and -(2**31) <= value < 2**31
        if not (is_small or isinstance(value, str)):
            raise RefusedError(400, _PARAMETERS)


def _tensor(entry: dict[str, Any]) -> _Tensor:
    datatype = entry["datatype"]
    if "data" in entry and datatype in ("FP16", "BF16"):
        raise RefusedError(400, _INPUT)
    if datatype not in _DTYPES:
        raise RefusedError(400, "Invalid input precision")
    elements = list(_flat(entry.get("data", []), datatype))
    return _Tensor(datatype, tuple(entry["shape"]), elements)


def _flat(data: Any, datatype: str) -> Iterator[Any]:
    if not isinstance(data, list):
        raise RefusedError(400, _INPUT)
    for each in data:
        if isinstance(each, list):
            yield from _flat(each, datatype)
        elif not _is_element(each, datatype):
            raise RefusedError(400, _INPUT)
        else:
            yield each.partition("\0")[0].encode() if datatype == "BYTES" else each


def _is_element(value: Any, datatype: str) -> bool:
    """Return whether it takes such a value; integers of 64 bits it does not take in JSON."""
    if datatype in ("BOOL", "BYTES"):
        return isinstance(value, bool if datatype == "BOOL" else str)
    if isinstance(value, bool) or not isinstance(value, int):
        return isinstance(value, float) and datatype in ("FP32", "FP64")
    if datatype.startswith("UINT"):
        return 0 <= value < 2**32
    return -(2**31) <= value < 2**31 or datatype.startswith("FP")


def _size(entry: dict[str, Any], tensor: _Tensor, inputs: int, rest: int) -> int:
    """Find how many bytes are an input's, which need not be said where its shape tells it."""
    size = _parameters(entry).get("binary_data_size")
    if size is not None:
        if not isinstance(size, int) or size < 0:
            raise RefusedError(400, "binary_data_size parameter is invalid and cannot be parsed")
        return size
    if tensor.datatype != "BYTES":
        return math.prod(tensor.shape) * np.dtype(_DTYPES[tensor.datatype]).itemsize
    if "data" not in entry and (inputs > 1 or tensor.shape != (1,)):
        raise RefusedError(400, _INPUT)
    return rest


def _check_names(names: set[str], model: Model) -> None:
    declared = {each.name for each in model.inputs}
    if len(names) != len(declared):
        raise RefusedError(400, "Invalid number of inputs")
    if names != declared:
        raise RefusedError(400, "Missing input with specific name")


def _binary_outputs(fields: dict[str, Any]) -> frozenset[str]:
    """Find the outputs that are to be binary.

    Each output that it reads makes it forget the one before, so that just the last is known; and
    without any, what the request wants of all outputs is nobody's.
    """
    by_default = _parameters(fields).get("binary_data_output", False)
    return frozenset(
        output["name"]
        for output in fields.get("outputs", [])[-1:]
        if _parameters(output).get("binary_data", by_default)
    )


def _split(raw: bytes) -> Iterator[bytes]:
    while raw:
        if len(raw) < 4 or len(raw) < 4 + (size := struct.unpack_from("<I", raw)[0]):
            raise RefusedError(400, "Invalid content size of tensor proto")
        yield raw[4 : 4 + size]
        raw = raw[4 + size :]
