"""Writes responses as OpenVINO Model Server does."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy.typing as npt

from tests.integration.triton.models import Model
from tests.support.servers.numpy_models import Arrays
from tests.support.servers.openvino.request import ParsedRequest, RefusedError


def error_body(message: str) -> bytes:
    """Write the body of an error."""
    return json.dumps({"error": message}).encode()


def metadata_body(model: Model) -> bytes:
    """Write a model's metadata."""
    fields = {
        "name": model.name,
        "versions": ["1"],
        "platform": "OpenVINO",
        "inputs": [each.metadata() for each in model.inputs],
        "outputs": [each.metadata() for each in model.outputs],
    }
    return json.dumps(fields).encode()


def infer_response(model: Model, request: ParsedRequest, arrays: Arrays) -> tuple[bytes, bytes]:
    """Write a response's JSON part and its binary one; raises RefusedError.

    All outputs come back, whichever were listed.
    """
    outputs, binary = [], b""
    for declared in model.outputs:
        array = arrays[declared.name]
        if declared.datatype == "FP16":
            message = "Could not parse input content. Unsupported data precision detected"
            raise RefusedError(400, f"{message} - Unsupported precisionFP16")
        head = {"name": declared.name, "shape": list(array.shape), "datatype": declared.datatype}
        if declared.name not in request.binary:
            outputs.append(f'{json.dumps(head)[:-1]}, "data": [{_json_data(array)}]}}')
            continue
        data = _bytes(array)
        # A size of nothing is not told.
        size = {"parameters": {"binary_data_size": len(data)}} if data else {}
        outputs.append(json.dumps(head | size))
        binary += data
    members = {"model_name": model.name, "id": request.id, "model_version": "1"}
    text = json.dumps({key: value for key, value in members.items() if value})
    return f'{text[:-1]}, "outputs": [{", ".join(outputs)}]}}'.encode(), binary


def _json_data(array: npt.NDArray[Any]) -> str:
    """Write the elements; for what is not finite its JSON writer has nothing, not even null."""
    values = array.ravel().tolist()
    if array.dtype == object:
        return ", ".join(json.dumps(value.decode("utf-8", "replace")) for value in values)
    return ", ".join(json.dumps(value) if math.isfinite(value) else "" for value in values)


def _bytes(array: npt.NDArray[Any]) -> bytes:
    if array.dtype != object:
        return array.tobytes()
    return b"".join(struct.pack("<I", len(each)) + each for each in array.ravel())
