"""Reads and writes tensors as binary data and as JSON data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, FailFast, Field, TypeAdapter, ValidationError

Array = npt.NDArray[Any]

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has no bfloat16, and no model here computes with it
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),  # each element is a `bytes`
}
_BINARY_ONLY: Final = frozenset({"FP16", "BF16"})
_LENGTH_SIZE: Final = 4  # bytes of the length that precedes each BYTES element


class RequestError(Exception):
    """A rejected request: the HTTP status, and the message for the `error` member."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class NamedFloat(float):
    """A float that JSON text has by name (`NaN`, `Infinity`), not in digits.

    It distinguishes an intended infinity from digits that overflow to one, as `1e400` does.
    """


def _elements_of(dtype: np.dtype[Any]) -> TypeAdapter[list[Any]]:
    """Return what checks the elements of a type in JSON `data`; a bool is no number."""
    text = Annotated[str, AfterValidator(str.encode)]
    kind: Any = {"b": bool, "f": float, "O": text}.get(dtype.kind, int)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        kind = Annotated[int, Field(ge=int(limits.min), le=int(limits.max))]
    return TypeAdapter(Annotated[list[kind], FailFast()])


_ELEMENTS: Final = {name: _elements_of(dtype) for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A named tensor; `array` has its shape, and its dtype by `DTYPES`."""

    name: str
    datatype: str
    array: Array


def from_binary(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """Read the binary data of an input: little-endian, row-major, without padding.

    Raises RequestError unless `data` has exactly the size for `shape` and `datatype`.
    """
    dtype = _numpy_type(name, datatype)
    count = math.prod(shape)
    if datatype == "BYTES":
        strings = _split_strings(name, data)
        _check_count(name, count, len(strings), "string elements")
        return Tensor(name, datatype, _reshape(name, np.array(strings, dtype), shape))
    _check_count(name, count * dtype.itemsize, len(data), "bytes")
    return Tensor(name, datatype, _reshape(name, np.frombuffer(data, dtype), shape))


def from_json(name: str, datatype: str, shape: Sequence[int], data: object) -> Tensor:
    """Read the JSON data of an input: a list, flat or nested in any way, row-major.

    Raises RequestError for FP16 and BF16, which have no JSON form, for a wrong number of
    elements, and for an element of the wrong type or out of the datatype's range.
    """
    _numpy_type(name, datatype)
    if datatype in _BINARY_ONLY:
        raise RequestError(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    if not isinstance(data, list):
        raise RequestError(f"Unable to parse 'data' of input '{name}': not an array")
    elements = _flatten(data)
    _check_count(name, math.prod(shape), len(elements), "elements")
    return Tensor(name, datatype, _reshape(name, _convert(name, datatype, elements), shape))


def to_binary(tensor: Tensor) -> bytes:
    """Write the binary data of an output."""
    if tensor.datatype == "BYTES":
        return b"".join(
            len(element).to_bytes(_LENGTH_SIZE, "little") + element
            for element in tensor.array.ravel()
        )
    return tensor.array.astype(DTYPES[tensor.datatype], copy=False).tobytes()


def to_json(tensor: Tensor) -> list[Any]:
    """Write the JSON data of an output, as a flat list.

    Raises RequestError for FP16 and BF16, and for BYTES that are not UTF-8.
    """
    if tensor.datatype in _BINARY_ONLY:
        raise RequestError(
            f"sending {tensor.datatype} data via JSON is not supported. "
            "Please use the binary data format for output"
        )
    flat: list[Any] = tensor.array.ravel().tolist()
    if tensor.datatype != "BYTES":
        return flat
    try:
        return [element.decode() for element in flat]
    except UnicodeDecodeError:
        # Triton sends these bytes as they are, in a response that is not valid JSON.
        raise RequestError(
            f"output '{tensor.name}' is not UTF-8. Please use the binary data format for output"
        ) from None


def _numpy_type(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DTYPES:
        raise RequestError(f"invalid datatype for input {name}")
    return DTYPES[datatype]


def _check_count(name: str, expected: int, got: int, what: str) -> None:
    if got != expected:
        raise RequestError(
            f"size mismatch for input '{name}': expected {expected} {what}, got {got}"
        )


def _reshape(name: str, flat: Array, shape: Sequence[int]) -> Array:
    try:
        return flat.reshape(shape)
    except (ValueError, OverflowError):  # more dimensions, or larger ones, than numpy can hold
        raise RequestError(f"unexpected shape for input '{name}': {list(shape)}") from None


def _split_strings(name: str, data: bytes) -> list[bytes]:
    strings: list[bytes] = []
    at = 0
    while at < len(data):
        start = at + _LENGTH_SIZE
        at = start + int.from_bytes(data[at:start], "little")
        strings.append(data[start:at])
    if at != len(data):
        raise RequestError(f"input '{name}' ends within a string element")
    return strings


def _flatten(data: list[Any]) -> list[Any]:
    while list in set(map(type, data)):
        data = list(chain.from_iterable(e if isinstance(e, list) else (e,) for e in data))
    return data


def _convert(name: str, datatype: str, elements: list[Any]) -> Array:
    dtype = DTYPES[datatype]
    try:
        checked = _ELEMENTS[datatype].validate_python(elements, strict=True)
    except ValidationError as error:
        raise _element_error(name, datatype, elements, error.errors()[0]["loc"][0]) from None
    if dtype.kind != "f":
        return np.array(checked, dtype)
    with np.errstate(over="ignore"):
        floats = np.array(checked, np.float64).astype(dtype)
    for index in np.flatnonzero(np.isinf(floats)):
        if not isinstance(elements[index], NamedFloat):
            raise _element_error(name, datatype, elements, index)
    return floats


def _element_error(name: str, datatype: str, elements: list[Any], index: Any) -> RequestError:
    value = f"{elements[index]!r:.40}"
    return RequestError(f"input '{name}' takes {datatype}: element {index} is {value}")
