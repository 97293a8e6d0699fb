"""A server that takes and returns only JSON, as MLServer does."""

from __future__ import annotations

import json
from typing import Any

from tests.support.http_messages import http_response
from tests.support.inference_messages import INFER, metadata
from tests.support.servers.scripted_server import Connection

CONTENT_TYPE = {"BYTES": "str", "BOOL": "bool"}


def as_output(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an input back as an output, as MLServer writes those."""
    parameters = {"content_type": CONTENT_TYPE.get(entry["datatype"], "np")}
    return {
        "name": entry["name"].replace("IN", "OUT"),
        "shape": entry["shape"],
        "datatype": entry["datatype"],
        "parameters": parameters | entry.get("parameters", {}),
        "data": entry["data"],
    }


def json_response(*outputs: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    """Write a response of outputs that are at hand."""
    fields = {"model_name": "m", "model_version": None, "id": "made-up", "parameters": None}
    return http_response(json.dumps({**fields, "outputs": list(outputs)}).encode(), headers)


async def echo_inputs(connection: Connection) -> None:
    """Answer infer requests with their inputs, and with metadata whatever else is asked for."""
    while True:
        received = await connection.request()
        if received.head.target != INFER:
            await connection.send(http_response(metadata(-1)))
            continue
        assert received.head.all("Content-Type") == ["application/json"]
        assert received.head.get("Inference-Header-Content-Length") is None
        inputs = json.loads(received.body)["inputs"]
        await connection.send(json_response(*map(as_output, inputs)))
