"""Makes the tensors of a call: random, zeros, ones, values as JSON, or bytes."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import orjson

from gateway.codec.elements.bytes_elements import pack_strings, split_elements
from gateway.codec.elements.rounding import round_to
from gateway.codec.v2.request import InferRequestReader
from gateway.errors import GatewayError, bad_request
from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from gateway.protocol.json_errors import describe_value
from gateway.protocol.messages import Fields, InferRequest, InputTensor, TensorData
from gateway.protocol.tensors import MAX_TENSORS, element_count

MAX_DATA = 8 * 2**20
"""Bytes of all tensors together."""
_MAX_STRINGS = 100_000
_MAX_HEADER = 2**20
_MAX_DEPTH = 64
_WINDOW = 128 * 1024
"""Bytes of JSON that are read without giving other threads a chance."""

_SOURCES = ("fill", "values", "bytes")
_FILLS = ("random", "zeros", "ones")
_MOST_RANDOM = 100
"""Random integers are below it, and in the range of their datatype."""
_WORDS = ("gateway", "tensor", "proxy", "model", "server", "client", "bytes", "call")


def make_request(inputs: object, outputs: object) -> InferRequest:
    """Make a request of descriptions of its inputs, and names of the wanted outputs.

    Each input has name, datatype, shape, and one of ``fill`` (random, zeros, ones), ``values``
    (JSON) and ``bytes`` (base64). Raises GatewayError (400) that names what is wrong.
    """
    entries: list[Fields] = []
    data: list[bytes] = []
    size = 0
    for index, each in enumerate(_objects(inputs, "inputs")):
        label = f"inputs[{index}]"
        given = [source for source in _SOURCES if source in each]
        if len(given) != 1:
            raise bad_request(f"{label}: expected one of {', '.join(_SOURCES)}")
        entry: Fields = {key: each[key] for key in ("name", "datatype", "shape") if key in each}
        if given == ["values"]:
            entry["data"] = each["values"]
        else:
            data.append(_fill(each, label) if given == ["fill"] else _decode(each["bytes"], label))
            entry["parameters"] = {"binary_data_size": len(data[-1])}
            size += len(data[-1])
        if size > MAX_DATA:
            raise _too_large(label)
        entries.append(entry)
    names = [{"name": name} for name in (outputs if isinstance(outputs, list) else [])]
    fields = {"inputs": entries} | ({"outputs": names} if names else {})
    try:
        text = orjson.dumps(fields)
    except orjson.JSONEncodeError:
        raise bad_request("inputs: nested too deeply") from None
    request = _read(text)
    for index, tensor in enumerate(request.head.inputs):
        if "values" in cast("list[Any]", inputs)[index]:
            size += tensor.binary_size or 0
        if size > MAX_DATA:
            raise _too_large(f"inputs[{index}]")
    return _with_data(request, data)


def _objects(value: object, label: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise bad_request(f"{label}: expected an array of objects, got {describe_value(value)}")
    if len(value) > MAX_TENSORS:
        raise bad_request(f"{label}: at most {MAX_TENSORS} can be sent, got {len(value)}")
    return value


def _too_large(label: str) -> GatewayError:
    return bad_request(f"{label}: all tensors together may have {MAX_DATA >> 20} MiB")


def _read(text: bytes) -> InferRequest:
    """Read a request as a client may send it: so its errors are those that clients get."""
    reader = InferRequestReader(_MAX_HEADER, _MAX_DEPTH)
    for start in range(0, len(text), _WINDOW):
        reader.feed(text[start : start + _WINDOW], last=start + _WINDOW >= len(text))
        while reader.step():
            pass
    return reader.finish()


def _with_data(request: InferRequest, data: Sequence[bytes]) -> InferRequest:
    """Return the request with the data of those tensors that have only a size.

    Raises GatewayError (400) for BYTES that are no elements.
    """
    rest = iter(data)
    tensors: list[TensorData] = []
    for tensor, given in zip(request.head.inputs, request.tensors, strict=True):
        tensors.append([next(rest)] if isinstance(given, int) else given)
        if isinstance(given, int) and tensor.datatype.dtype is None:
            _check_elements(tensor, b"".join(cast("list[bytes]", tensors[-1])))
    return InferRequest(request.head, request.id, tuple(tensors))


def _check_elements(tensor: InputTensor, data: bytes) -> None:
    elements, end = split_elements(data, 0)
    count = element_count(tensor.shape)
    if end < len(data) or len(elements) != count:
        raise bad_request(
            f"input '{tensor.name}': bytes: expected {count} elements,"
            " each its length as uint32 and then its bytes"
        )


def _decode(value: object, label: str) -> bytes:
    if isinstance(value, str):
        try:
            return b64decode(value, validate=True)
        except ValueError:
            pass
    raise bad_request(f"{label}: bytes: expected base64")


def _fill(each: Mapping[str, Any], label: str) -> bytes:
    shape, datatype = _shape(each, label), _datatype(each, label)
    if each["fill"] not in _FILLS:
        raise bad_request(f"{label}: fill: expected one of {', '.join(_FILLS)}")
    count = element_count(shape)
    if count * (datatype.size or 4) > MAX_DATA or (datatype.size is None and count > _MAX_STRINGS):
        raise bad_request(f"{label}: shape {list(shape)} is more than can be tried here")
    if datatype.dtype is None:
        return pack_strings(_texts(each["fill"], count))
    return _numbers(each["fill"], datatype, datatype.dtype, count).tobytes()


def _shape(each: Mapping[str, Any], label: str) -> tuple[int, ...]:
    shape = each.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise bad_request(f"{label}: shape: expected an array of sizes")
    return tuple(shape)


def _datatype(each: Mapping[str, Any], label: str) -> Datatype:
    name = each.get("datatype")
    if not isinstance(name, str) or name not in DATATYPES:
        raise bad_request(f"{label}: datatype: expected one of {', '.join(DATATYPES)}")
    return DATATYPES[name]


def _texts(fill: str, count: int) -> list[str]:
    if fill == "random":
        chosen = np.random.default_rng().integers(len(_WORDS), size=count)
        return [_WORDS[index] for index in chosen]
    return ["0" if fill == "zeros" else "1"] * count


def _numbers(
    fill: str, datatype: Datatype, dtype: np.dtype[Any], count: int
) -> np.ndarray[Any, Any]:
    if fill == "zeros":
        return np.zeros(count, dtype)
    generator = np.random.default_rng()
    if datatype.floats is not None:
        is_random = fill == "random"
        return round_to(generator.standard_normal(count) if is_random else np.ones(count), datatype)
    if fill == "ones":
        return np.ones(count, dtype)
    most = 2 if datatype.family is Family.BOOLEAN else _MOST_RANDOM
    return generator.integers(most, size=count).astype(dtype)
