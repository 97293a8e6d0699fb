"""A reference implementation of the codec: the whole body at once, with `json` and numpy.

The oracle of the property tests. It is obvious rather than fast, and uses nothing of the codec. It
refuses what PROTOCOL.md says. Caps on sizes, and on text without a comma, are not its concern.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np

from tests.codec import exact_rounding

DTYPES: dict[str, Any] = {
    "BOOL": "?",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "FP32": "<f4",
    "FP64": "<f8",
}
FLOATS = ("FP16", "BF16", "FP32", "FP64")
LARGEST = {
    "FP16": 65504.0,
    "BF16": 2.0**128 - 2.0**120,
    "FP32": 2.0**128 - 2.0**104,
    "FP64": sys.float_info.max,
}
INTEGERS = tuple(name for name in DTYPES if "INT" in name)
DATATYPES = (*DTYPES, "BYTES")

Fields = dict[str, Any]


class RefusedError(Exception):
    """The body is refused with this HTTP status."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


def check(fine: bool, reason: str, status: int = 400) -> None:
    if not fine:
        raise RefusedError(reason, status)


# ---------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class PlainRequest:
    """The header as parsed JSON; a tensor is its bytes, or how many of them follow the JSON."""

    header: Fields
    tensors: list[bytes | int]
    binary_by_default: bool
    binary_by_output: dict[str, bool]
    as_base64: frozenset[str]


def convert_request(body: bytes, depth_cap: int) -> PlainRequest:
    """Convert the JSON part of a request; raises RefusedError."""
    fields, arrays = _parse(body)
    check(isinstance(fields, dict), "not an object")
    inputs = _objects(fields.get("inputs"))
    check("inputs" not in fields.repeated, "duplicate inputs")
    check(all("data" not in entry.repeated for entry in inputs), "duplicate data")
    datas = [entry["data"] for entry in inputs if "data" in entry]
    check(all(isinstance(data, list) for data in datas), "data is no array")
    check(len(arrays) == len(datas), "an array under a key data that is no input's")
    check(all(_depth(data) <= depth_cap for data in datas), "data nested too deep")
    tensors = [_convert_input(entry) for entry in inputs]
    check(_depth(fields) <= depth_cap, "header nested too deep")
    header: Fields = _checked(fields)
    check(isinstance(header.get("id", ""), str), "id")
    kept = [tensor for tensor in tensors if tensor is not None]
    return PlainRequest(header, kept, *_ask_for_binary(header))


class BareToken(float):
    """NaN or an infinity: not JSON, but accepted as an element."""


class Object(Fields):
    """A JSON object, and its duplicate keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.repeated = {key for key in keys if keys.count(key) > 1}


class Digits(float):
    """A number with a point or an exponent, and its text, which is more precise than the double."""

    def __init__(self, text: str) -> None:
        self.text = text


def _parse(body: bytes) -> tuple[Any, list[Any]]:
    """Parse a body; return every array under a key `data` too."""
    arrays: list[Any] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> Fields:
        arrays.extend(v for key, v in pairs if key == "data" and isinstance(v, list))
        return Object(pairs)

    def to_int(digits: str) -> int:
        check(len(digits) < 400, "too large for any datatype")
        return int(digits)

    def to_float(digits: str) -> float:
        check(math.isfinite(float(digits)), "too large for any datatype")
        return Digits(digits)

    try:
        fields = json.loads(
            body.decode("utf-8"),
            parse_int=to_int,
            parse_float=to_float,
            parse_constant=BareToken,
            object_pairs_hook=to_dict,
        )
    except (ValueError, RecursionError) as error:
        raise RefusedError(str(error)) from None
    return fields, arrays


def _objects(value: Any) -> list[Object]:
    check(isinstance(value, list), "not an array")
    check(all(isinstance(entry, dict) for entry in value), "not an object")
    return cast("list[Object]", value)


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    below = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, below), default=0)


def _checked(value: Any) -> Any:
    """Return a value of the header as a JSON library with 64-bit integers parses it."""
    if isinstance(value, dict):
        return {_checked(key): _checked(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_checked(below) for below in value]
    if isinstance(value, str):
        _utf8(value)
    check(not isinstance(value, BareToken), "NaN outside of data")
    if isinstance(value, Digits):
        return float(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return _double(value)
    return value


def _convert_input(entry: Fields) -> bytes | int | None:
    """Convert an input's data to binary form; return what follows the header for it."""
    parameters = _parameters(entry)
    name, datatype, shape = entry.get("name"), entry.get("datatype"), entry.get("shape")
    check(isinstance(name, str), "name")
    check(isinstance(datatype, str) and datatype in DATATYPES, "datatype")
    check(
        isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**64 for n in shape), "shape"
    )
    count = math.prod(cast("list[int]", shape))
    sources = [
        key
        for key in ("data", "binary_data_size", "shared_memory_region")
        if key in (entry if key == "data" else parameters)
    ]
    check(len(sources) == 1, "not exactly one source")
    if sources == ["data"]:
        elements = list(_flat(entry.pop("data")))
        check(len(elements) == count, "count")
        if parameters.get("content_type") == "base64":
            check(datatype == "BYTES", "base64 of numbers")
            del parameters["content_type"]
            tensor = pack_bytes(list(map(_from_base64, elements)))
        else:
            tensor = pack(str(datatype), elements)
        entry.setdefault("parameters", {})["binary_data_size"] = len(tensor)
        return tensor
    if sources == ["shared_memory_region"]:
        return None
    size = parameters["binary_data_size"]
    check(type(size) is int and 0 <= size < 2**63, "binary_data_size")
    fixed = datatype == "BYTES" or size == count * np.dtype(DTYPES[str(datatype)]).itemsize
    check(fixed, "binary_data_size")
    return int(size)


def _parameters(entry: Fields) -> Fields:
    parameters = entry.get("parameters", {})
    check(isinstance(parameters, dict), "parameters")
    return cast("Fields", parameters)


def _from_base64(text: Any) -> bytes:
    check(type(text) is str, "not a string")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise RefusedError("not base64") from None
    check(base64.b64encode(data).decode() == text, "bits behind the last byte")
    return data


def _ask_for_binary(header: Fields) -> tuple[bool, dict[str, bool], frozenset[str]]:
    """Request binary outputs; return what the client had requested."""
    default = _parameters(header).get("binary_data_output", False)
    check(isinstance(default, bool), "binary_data_output")
    outputs = _objects(header.get("outputs", []))
    by_output: dict[str, bool] = {}
    as_base64: set[str] = set()
    for output in outputs:
        wanted: Any = _parameters(output).get("binary_data", default)
        check(isinstance(output.get("name"), str) and isinstance(wanted, bool), "output")
        base64_too = _parameters(output).get("content_type") == "base64"
        if base64_too and not wanted and output["name"] not in by_output:
            as_base64.add(output["name"])
        by_output.setdefault(output["name"], wanted)
        if "shared_memory_region" not in _parameters(output):
            if base64_too and output["parameters"].get("binary_data") is not True:
                del output["parameters"]["content_type"]
            output.setdefault("parameters", {})["binary_data"] = True
    if not outputs:
        header.setdefault("parameters", {})["binary_data_output"] = True
    return bool(default), by_output, frozenset(as_base64)


def _flat(data: Any) -> Iterator[Any]:
    for item in data:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item


# ---------------------------------------------------------------------------------- elements


def pack(datatype: str, elements: list[Any]) -> bytes:
    """Return the binary form of parsed JSON elements; raises RefusedError."""
    if datatype == "BYTES":
        check(all(type(x) is str for x in elements), "not a string")
        return pack_bytes([_utf8(x) for x in elements])
    if datatype == "BOOL":
        check(all(type(x) is bool for x in elements), "not true or false")
        return np.array(elements, "?").tobytes()
    if datatype in INTEGERS:
        check(all(type(x) is int for x in elements), "not an integer")
        limits = np.iinfo(DTYPES[datatype])
        check(all(int(limits.min) <= x <= int(limits.max) for x in elements), "out of range")
        return np.array(elements, DTYPES[datatype]).tobytes()
    check(all(type(x) in (int, float, Digits, BareToken) for x in elements), "not a number")
    return b"".join(_float_bytes(x, datatype) for x in elements)


def _float_bytes(value: float, datatype: str) -> bytes:
    if isinstance(value, BareToken):
        return np.array([float(value)]).astype(DTYPES[datatype]).tobytes()
    nearest = exact_rounding.nearest(
        value.text if isinstance(value, Digits) else repr(value), datatype
    )
    if nearest is None:
        raise RefusedError("out of range")
    return nearest


def pack_bytes(elements: list[bytes]) -> bytes:
    return b"".join(len(x).to_bytes(4, "little") + x for x in elements)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RefusedError("half a surrogate pair") from None


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise RefusedError("too large for a double") from None


# ---------------------------------------------------------------------------------- responses


def convert_response(
    body: bytes,
    header_size: int,
    nonfinite: str,
    bytes_encoding: str,
    binary: frozenset[str],
    as_base64: frozenset[str] = frozenset(),
) -> tuple[Fields, bytes]:
    """Convert a response; `binary` names the outputs to leave in binary form.

    `as_base64` names those whose BYTES become base64 and are marked so. Returns the JSON as Python
    values and the binary tensors behind it. Raises RefusedError.
    """
    fields = json.loads(body[:header_size])
    rest = body[header_size:]
    tail = b""
    for output in fields.get("outputs", []):
        parameters = output.get("parameters") or {}
        if "binary_data_size" not in parameters:
            if "data" in output and output["name"] in binary:
                tail += _packed(output)
            elif "data" in output and (bytes_encoding == "base64" or output["name"] in as_base64):
                _encode(output)
            continue
        size = parameters["binary_data_size"]
        check(len(rest) >= size, "short", 502)
        data, rest = rest[:size], rest[size:]
        if output["name"] in binary:
            tail += data
            continue
        values = unpack(output["datatype"], data)
        check(len(values) == math.prod(output["shape"]), "count", 502)
        marked = output["datatype"] == "BYTES" and output["name"] in as_base64
        shown_as = "base64" if marked else bytes_encoding
        output["data"] = [_shown(x, nonfinite, shown_as) for x in values]
        del parameters["binary_data_size"]
        if marked:
            parameters["content_type"] = "base64"
        if not parameters:
            del output["parameters"]
    check(not rest, "surplus", 502)
    return fields, tail


def _encode(output: Fields) -> None:
    """Encode BYTES in JSON as base64 and mark them, unless they are marked already."""
    parameters = output.get("parameters") or {}
    if output["datatype"] == "BYTES" and parameters.get("content_type") != "base64":
        output["parameters"] = {**parameters, "content_type": "base64"}
        texts = [each.encode() for each in _flat(output.pop("data"))]
        output["data"] = [base64.b64encode(text).decode() for text in texts]


def unpack(datatype: str, data: bytes) -> list[Any]:
    """Return the elements of a tensor; floats with the shortest digits of their datatype."""
    if datatype == "BYTES":
        elements = []
        while data:
            check(len(data) >= 4, "half a length", 502)
            end = 4 + int.from_bytes(data[:4], "little")
            check(len(data) >= end, "half an element", 502)
            elements.append(data[4:end])
            data = data[end:]
        return elements
    dtype = np.dtype(DTYPES[datatype])
    check(len(data) % dtype.itemsize == 0, "half an element", 502)
    if datatype == "BOOL":
        check(max(data, default=0) <= 1, "BOOL of other bytes", 502)
    values = np.frombuffer(data, dtype)
    if datatype in ("FP16", "BF16", "FP32"):
        return [float(str(x)) for x in values.astype(np.float32)]
    return cast("list[Any]", values.tolist())


def _shown(value: Any, nonfinite: str, bytes_encoding: str) -> Any:
    if isinstance(value, bytes):
        if bytes_encoding == "base64":
            return base64.b64encode(value).decode()
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise RefusedError("not UTF-8", 406) from None
    if isinstance(value, float) and not math.isfinite(value):
        check(nonfinite != "error", "not finite", 406)
        token = json.dumps(value)
        return {"literal": value, "null": None, "string": token}[nonfinite]
    return value


# ---------------------------------------------------------------------------------- JSON servers


def request_as_json(
    header: Fields,
    tensors: list[bytes],
    nonfinite: str,
    bytes_encoding: str,
    input_encodings: dict[int, str],
    as_base64: frozenset[str],
) -> Fields:
    """Write a binary request for a server that accepts JSON only.

    BYTES are encoded as `input_encodings` says by input, as text if they have a content type, and
    else as `bytes_encoding`. Outputs in `as_base64` are requested so. Raises RefusedError.
    """
    header.get("parameters", {}).pop("binary_data_output", None)
    for entry in header.get("outputs", []):
        entry.get("parameters", {}).pop("binary_data", None)
        if entry["name"] in as_base64:
            entry.setdefault("parameters", {})["content_type"] = "base64"
    rest = list(tensors)
    for index, entry in enumerate(header["inputs"]):
        parameters = entry.get("parameters", {})
        if parameters.pop("binary_data_size", None) is None:
            continue
        shown_as = input_encodings.get(
            index, "utf8" if "content_type" in parameters else bytes_encoding
        )
        if shown_as == "base64" and entry["datatype"] == "BYTES":
            parameters["content_type"] = "base64"
        values = unpack(entry["datatype"], rest.pop(0))
        check(len(values) == math.prod(entry["shape"]), "count")
        entry["data"] = [_shown(x, nonfinite, shown_as) for x in values]
    return header


def _say_empty(entry: Fields, is_binary: bool) -> None:
    """Give an output without elements the requested encoding, unless it is in shared memory."""
    parameters = entry.get("parameters") or {}
    size = parameters.get("binary_data_size")
    if size is None and (0 not in entry["shape"] or "shared_memory_region" in parameters):
        return
    check(not size, "bytes that do not follow", 502)
    if is_binary:
        entry["parameters"] = {**parameters, "binary_data_size": 0}
        return
    entry["data"] = []
    parameters.pop("binary_data_size", None)
    if not parameters and size is not None:
        del entry["parameters"]


def response_in_binary(body: bytes, binary: frozenset[str]) -> tuple[Fields, bytes]:
    """Convert the named outputs of a JSON response to binary form; raises RefusedError."""
    fields, _ = _parse(body)
    tail = b""
    for entry in fields["outputs"]:
        if "data" not in entry:
            _say_empty(entry, entry["name"] in binary)
            continue
        if entry["name"] not in binary:
            continue
        tail += _packed(entry)
    return fields, tail


def _packed(entry: Fields) -> bytes:
    """Return the bytes of a JSON output, and announce them in its parameters."""
    elements = list(_flat(entry.pop("data")))
    check(len(elements) == math.prod(entry["shape"]), "count")
    if entry["datatype"] in FLOATS:
        elements = [BareToken("nan") if x is None else x for x in elements]
    data = pack(entry["datatype"], elements)
    parameters = entry["parameters"] = entry.get("parameters") or {}
    if entry["datatype"] == "BYTES" and parameters.get("content_type") == "base64":
        del parameters["content_type"]
        data = pack_bytes([_from_base64(x) for x in elements])
    parameters["binary_data_size"] = len(data)
    return data
