"""Writes the inference header of responses in binary form."""

from __future__ import annotations

import orjson

from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.response import response_fields
from gateway.protocol.messages import InferResponse

_NO_POLICIES = JsonPolicies()


def write_binary_response_header(response: InferResponse) -> bytes:
    """Write the inference header of a response whose data follow it; none may be JSON text."""
    fields = response_fields(response, _NO_POLICIES)
    for entry, output in zip(fields.get("outputs", ()), response.head.outputs, strict=True):
        if output.binary_size is not None:
            entry["parameters"] = {**output.parameters, "binary_data_size": output.binary_size}
    return orjson.dumps(fields)
