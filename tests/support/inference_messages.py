"""Writes infer requests and responses in every encoding."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.support.http_messages import HEADER_LENGTH as HEADER_LENGTH
from tests.support.http_messages import http_response, request

INFER = "/v2/models/m/infer"

FLOATS = np.array([1.5, -2, 3e30], "<f4")


def json_request(*values: float) -> bytes:
    """Write the body of a JSON request of one FP32 input."""
    data = list(values) or FLOATS.tolist()
    entry = {"name": "IN", "shape": [len(data)], "datatype": "FP32", "data": data}
    return json.dumps({"inputs": [entry]}).encode()


def binary_part(size: int, name: str = "IN") -> dict[str, Any]:
    """Return the header's entry of an FP32 tensor that follows as ``size`` bytes."""
    return {
        "name": name,
        "shape": [size // 4],
        "datatype": "FP32",
        "parameters": {"binary_data_size": size},
    }


def binary_header(*sizes: int, binary_output: bool = False) -> bytes:
    """Write the JSON part of a request whose inputs follow in binary form."""
    fields: dict[str, Any] = {
        "inputs": [binary_part(size, f"IN{i}") for i, size in enumerate(sizes)]
    }
    if binary_output:
        fields["parameters"] = {"binary_data_output": True}
    return json.dumps(fields).encode()


def infer_json(body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    """Write a JSON infer request."""
    return request("POST", INFER, json_request() if body is None else body, headers)


def infer_binary(header: bytes, tensors: bytes, headers: dict[str, str] | None = None) -> bytes:
    """Write a binary infer request."""
    return request(
        "POST", INFER, header + tensors, {HEADER_LENGTH: str(len(header)), **(headers or {})}
    )


def infer_raw(body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """Write a raw binary infer request."""
    return request("POST", INFER, body, {HEADER_LENGTH: "0", **(headers or {})})


def binary_response_header(*sizes: int) -> bytes:
    """Write the JSON part of a response whose outputs follow in binary form."""
    outputs = [binary_part(size, f"OUT{i}") for i, size in enumerate(sizes)]
    fields = {"model_name": "m", "model_version": "1", "outputs": outputs}
    return json.dumps(fields, separators=(",", ":")).encode()


def binary_response(*tensors: bytes, headers: dict[str, str] | None = None) -> bytes:
    """Write a binary response of FP32 outputs; ``headers`` go before those made here."""
    header = binary_response_header(*map(len, tensors))
    made = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return http_response(header + b"".join(tensors), {**made, **(headers or {})})


def metadata(*shape: int) -> bytes:
    """Write the metadata of a model of one input."""
    entry = {"name": "IN", "datatype": "FP32", "shape": list(shape)}
    return json.dumps({"name": "m", "versions": ["1"], "inputs": [entry], "outputs": []}).encode()
