"""Reads the response of a call in each form, and sums up its outputs for the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
from multidict import CIMultiDictProxy

from gateway.codec.elements.bytes_elements import split_elements
from gateway.codec.elements.rounding import read_numbers
from gateway.codec.grpc.infer import read_infer_response
from gateway.codec.v2.response_reader import InferResponseReader
from gateway.errors import bad_response, replace_surrogates
from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from gateway.protocol.grpc.framing import PREFIX_SIZE
from gateway.protocol.messages import OutputTensor
from gateway.protocol.request_header import header_length
from gateway.protocol.v1 import BASE64_KEY, V1Format

MAX_RESPONSE = 32 * 2**20
"""Bytes of a response that is read."""
_MAX_HEADER = 2**20
_WINDOW = 128 * 1024
"""Bytes of JSON that are read without giving other threads a chance."""
_MAX_VALUES = 10_000
"""Elements of an output that are shown: the first ones."""
_MAX_TEXT = 1000
"""Characters of an element of BYTES that are shown."""
_BINS = 40
_MAX_SAFE = 2**53
"""Larger integers lose digits in JavaScript, so that they are texts."""

_JSON_TYPES = {"BOOL": "JSON boolean", "BYTES": "JSON"}
"""What JSON says of the elements of an output; others are numbers."""


@dataclass(slots=True)
class _Described:
    """An output as the page gets it."""

    name: str
    datatype: str
    shape: list[int]
    elements: int
    values: list[Any]
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    nonfinite: int = 0
    histogram: dict[str, Any] | None = None


Output = tuple[OutputTensor, bytes | bytearray]
"""An output and its little-endian data."""


def read_outputs(
    form: str,
    headers: CIMultiDictProxy[str],
    body: bytes,
    declared: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Read a good response; return its outputs for the page. Raises GatewayError (502).

    ``declared`` are the datatypes of the model's outputs by their names, as V1 tells none.
    """
    if form == "v1":
        return [_with_datatype(each, declared) for each in _describe_v1(body)]
    read = _read_grpc(body) if form == "grpc" else _read_v2(headers, body)
    return [
        describe_output(tensor.name, tensor.datatype, tensor.shape, bytes(data))
        for tensor, data in read
    ]


def _read_v2(headers: CIMultiDictProxy[str], body: bytes) -> list[Output]:
    reader = InferResponseReader(header_length(headers), _MAX_HEADER, MAX_RESPONSE)
    data: list[bytearray] = []
    for start in range(0, max(len(body), 1), _WINDOW):
        reader.feed(body[start : start + _WINDOW], last=start + _WINDOW >= len(body))
        while reader.step():
            pass
        for piece in reader.pieces():
            while len(data) <= piece.index:
                data.append(bytearray())
            data[piece.index] += piece.data
    reader.finish()
    assert reader.response is not None
    outputs = reader.response.head.outputs
    data += [bytearray() for _ in range(len(outputs) - len(data))]
    return list(zip(outputs, data, strict=True))


def _read_grpc(body: bytes) -> list[Output]:
    if len(body) < PREFIX_SIZE:
        raise bad_response("the response has no message")
    read = read_infer_response(memoryview(body)[PREFIX_SIZE:], _MAX_HEADER)
    tensors = iter(read.tensors)
    return [
        (each, b"".join(next(tensors)) if each.binary_size is not None else b"")
        for each in read.response.head.outputs
    ]


def _with_datatype(output: dict[str, Any], declared: Mapping[str, str]) -> dict[str, Any]:
    """Return an output of V1 with the datatype that the model declares, or else that of JSON."""
    # Rows of one output have no name.
    only = next(iter(declared.values())) if len(declared) == 1 else ""
    found = declared.get(output["name"]) or only
    return output | {"datatype": found or _JSON_TYPES.get(output["datatype"], "JSON number")}


def _describe_v1(body: bytes) -> list[dict[str, Any]]:
    """Describe the outputs of a V1 response, which tells neither datatypes nor shapes."""
    document = _parse(body)
    if not isinstance(document, dict):
        raise bad_response("the response is not an object")
    for layout in V1Format:
        if layout.response_key in document:
            found = document[layout.response_key]
            break
    else:
        raise bad_response("the response has neither predictions nor outputs")
    if layout is V1Format.ROWS and _are_objects(found):
        columns = {name: [row.get(name) for row in found] for name in found[0]}
        if BASE64_KEY not in columns:
            return [_describe_nested(name, column) for name, column in columns.items()]
    if layout is V1Format.COLUMNS and isinstance(found, dict):
        return [_describe_nested(name, column) for name, column in found.items()]
    return [_describe_nested(layout.response_key, found)]


def _parse(body: bytes) -> Any:
    """Parse JSON, in which servers in Python write NaN and Infinity. Raises GatewayError."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise bad_response(f"the response is not JSON: {error}") from None


def _are_objects(found: object) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(row, dict) for row in found)


def _describe_nested(name: str, value: object) -> dict[str, Any]:
    """Describe nested arrays; the lists in rows of different lengths are elements."""
    # For numpy's own texts, each one would take the memory of the longest.
    array = np.asarray(value, dtype=object)
    elements = array.reshape(-1)
    if (datatype := _datatype_of(elements)) is not None:
        with suppress(OverflowError):  # of an integer that no double can express
            data = elements.astype(datatype.dtype).tobytes()
            return describe_output(name, datatype, array.shape, data)
    texts = [_as_text(each) for each in elements[:_MAX_VALUES]]
    return _describe_texts(name, list(array.shape), texts, array.size)


def _datatype_of(array: np.ndarray[Any, Any]) -> Datatype | None:
    """Return the datatype that has all elements; None if there is no such one but BYTES."""
    types = set(map(type, array))
    if types == {bool}:
        return DATATYPES["BOOL"]
    if types == {int}:
        for each in (DATATYPES["INT64"], DATATYPES["UINT64"]):
            assert each.integers is not None
            if each.integers.least <= array.min() and array.max() <= each.integers.most:
                return each
    # null stands for NaN.
    is_float = float in types and types <= {int, float, type(None)}
    return DATATYPES["FP64"] if is_float or not types else None


def _as_text(element: object) -> str:
    """Return an element that is no number as text."""
    if isinstance(element, str):
        return element
    try:
        return json.dumps(element, ensure_ascii=False)
    except RecursionError:
        return "nested too deeply"


def describe_output(
    name: str, datatype: Datatype, shape: Sequence[int], data: bytes
) -> dict[str, Any]:
    """Describe an output: its first values, its range, and a histogram."""
    if datatype.dtype is None:
        elements, _ = split_elements(data, 0)
        texts = [each[: 4 * _MAX_TEXT].decode(errors="replace") for each in elements[:_MAX_VALUES]]
        return _describe_texts(name, list(shape), texts, len(elements))
    array = read_numbers(data, datatype)
    shown = array[:_MAX_VALUES]
    if datatype.family is Family.FLOAT:
        # As Python's numbers, FP16 and FP32 have digits that nobody has sent.
        floats = shown.tolist() if datatype.size == 8 else [float(str(each)) for each in shown]
        values = [each if math.isfinite(each) else None for each in floats]
    else:
        values = [value if abs(value) <= _MAX_SAFE else str(value) for value in shown.tolist()]
    name, size = replace_surrogates(name), len(array)
    described = _Described(name, datatype.name, list(shape), size, values)
    if datatype.family is not Family.BOOLEAN:
        _add_statistics(described, array)
    return asdict(described)


def _describe_texts(name: str, shape: list[int], texts: list[str], count: int) -> dict[str, Any]:
    values = [replace_surrogates(text[:_MAX_TEXT]) for text in texts]
    return asdict(_Described(replace_surrogates(name), "BYTES", shape, count, values))


def _add_statistics(described: _Described, array: np.ndarray[Any, Any]) -> None:
    with np.errstate(invalid="ignore"):  # of signaling NaN
        numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    described.nonfinite = len(numbers) - len(finite)
    if not len(finite):
        return
    low, high = float(finite.min()), float(finite.max())
    # The mean of the largest doubles does not overflow if each is divided first.
    mean = min(max(float((finite / len(finite)).sum()), low), high)
    described.minimum, described.maximum, described.mean = low, high, mean
    if not math.isfinite(high - low):
        return
    edges = np.linspace(low, high, _BINS + 1)
    if (edges[:-1] < edges[1:]).all():  # else there are fewer doubles than edges
        counts, _ = np.histogram(finite, edges)
        described.histogram = {"low": low, "high": high, "counts": counts.tolist()}


def read_error(body: bytes) -> str:
    """Return the words of an error: those in JSON, or the text as it is."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), str):
        return str(document["error"])
    return body[:_MAX_TEXT].decode(errors="replace")
