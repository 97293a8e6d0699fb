"""Builds requests as bytes, once, to be sent many times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

Values = npt.NDArray[Any]

HEADER_LENGTH = "Inference-Header-Content-Length"
_DATATYPES = {"float32": "FP32", "float16": "FP16"}
_FP32 = _DATATYPES["float32"]

ID_PLACE = "0f0f0f0f"
"""What stands twice in the head of each variant, for digits that no other request has."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its head with any short part of the body, then the rest of the body.

    ``body`` is the whole body if it is JSON or a gRPC message, else empty. Load of a request with
    ``variants`` consists of these in turn, each time with a different head.
    """

    wire: Sequence[bytes | memoryview]
    body: bytes = b""
    variants: Sequence[Request] = ()


def normal(count: int) -> Values:
    """Return normally distributed FP32 values, which have no short decimal fractions."""
    return np.random.default_rng(count).standard_normal(count, np.float32)


def with_nan(values: Values, share: float) -> Values:
    """Return a copy with this share of NaN."""
    places = np.random.default_rng(0).random(values.size) < share
    return np.where(places, np.float32("nan"), values)


def json_of_doubles(model: str, values: Values, flat: bool = False) -> Request:
    """Build a JSON request as most Python clients do: ``json.dumps`` of ``tolist()``.

    That widens each float32 to a double and prints all of its some 17 digits. The data is nested
    as the values are, unless ``flat``.
    """
    data = (values.ravel() if flat else values).tolist()
    return _json_request(model, json.dumps(_json_body(values, data)).encode())


def json_of_shortest(model: str, values: Values) -> Request:
    """Build a JSON request with the shortest digits of each float32, as orjson prints."""
    text = orjson.dumps(_json_body(values, values), option=orjson.OPT_SERIALIZE_NUMPY)
    return _json_request(model, text)


def binary(model: str, values: Values) -> Request:
    """Build a binary request for a binary response."""
    return binary_of_blocks(model, values.shape, [values.tobytes()])


def binary_of_blocks(model: str, shape: Sequence[int], blocks: Sequence[bytes]) -> Request:
    """Build a binary request with a tensor of these blocks."""
    size = sum(map(len, blocks))
    spec = {
        "name": "INPUT0",
        "shape": list(shape),
        "datatype": _FP32,
        "parameters": {"binary_data_size": size},
    }
    text = orjson.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}})
    head = _head(model, "application/octet-stream", len(text) + size, len(text))
    return Request([head + text, *blocks])


def _json_body(values: Values, data: object) -> dict[str, Any]:
    datatype = _DATATYPES[values.dtype.name]
    shape = list(values.shape)
    return {"inputs": [{"name": "INPUT0", "shape": shape, "datatype": datatype, "data": data}]}


def _json_request(model: str, body: bytes) -> Request:
    return Request([_head(model, "application/json", len(body)) + body], body)


def _head(model: str, content_type: str, length: int, json_length: int | None = None) -> bytes:
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        f"Content-Length: {length}",
    ]
    if json_length is not None:
        lines.append(f"{HEADER_LENGTH}: {json_length}")
    return "\r\n".join((*lines, "", "")).encode()
