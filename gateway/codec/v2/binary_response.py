"""Writes the inference header of responses in binary form."""

from __future__ import annotations

from typing import Final

import orjson

from gateway.codec.policies import DEFAULT_POLICIES
from gateway.codec.v2.response import response_fields
from gateway.protocol.messages import InferResponse, InferResponseHead

_WRITTEN: Final = "binary"
"""The key of what was written of a head."""


def write_binary_response_header(response: InferResponse) -> bytes:
    """Write the inference header of a response whose data follow it; none may be JSON text."""
    text: bytes | None = response.head.written.get(_WRITTEN)
    if text is None:
        text = response.head.written[_WRITTEN] = _write_head(response.head)
    if response.id is None:
        return text
    between = b"" if text == b"{}" else b","
    return b"".join((b'{"id":', orjson.dumps(response.id), between, text[1:]))


def _write_head(head: InferResponseHead) -> bytes:
    fields = response_fields(InferResponse(head), DEFAULT_POLICIES)
    for entry, output in zip(fields.get("outputs", ()), head.outputs, strict=True):
        if output.binary_size is not None:
            entry["parameters"] = {**output.parameters, "binary_data_size": output.binary_size}
    return orjson.dumps(fields)
