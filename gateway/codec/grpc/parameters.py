"""Reads and writes maps of parameters."""

from __future__ import annotations

import struct

from gateway.errors import shorten
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import (
    WireReader,
    bytes_field,
    fixed_field,
    varint_field,
)
from gateway.protocol.json_errors import describe_value
from gateway.protocol.messages import Fields
from gateway.sizes import QUOTED_NAME

ParameterValue = bool | int | float | str | None
"""None is a parameter of which no value is set, or one of a type that is not known."""

_DOUBLE = struct.Struct("<d")


def read_parameter(reader: WireReader, parameters: Fields) -> None:
    """Read one entry of a map into ``parameters``; of two with the same key the last counts."""
    entry = reader.enter()
    key = ""
    value: ParameterValue = None
    while tag := entry.next_tag():
        if tag == fields.KEY_TAG:
            key = entry.read_text()
        elif tag == fields.VALUE_TAG:
            value = _read_value(entry.enter(), value)
        else:
            entry.skip(tag)
    parameters[key] = value


def _read_value(reader: WireReader, value: ParameterValue) -> ParameterValue:
    """Read a value: the last of its alternatives, or ``value`` without any."""
    while tag := reader.next_tag():
        if tag == fields.INT64_PARAM_TAG:
            value = reader.read_int64()
        elif tag == fields.STRING_PARAM_TAG:
            value = reader.read_text()
        elif tag == fields.BOOL_PARAM_TAG:
            value = reader.read_varint() != 0
        elif tag == fields.UINT64_PARAM_TAG:
            value = reader.read_varint()
        elif tag == fields.DOUBLE_PARAM_TAG:
            value = float(_DOUBLE.unpack(reader.read_fixed(8))[0])
        else:
            reader.skip(tag)
    return value


def write_parameters(number: int, parameters: Fields, label: str, words: ErrorVocabulary) -> bytes:
    """Write a map of parameters as field ``number``; ``label`` names whose parameters they are.

    Raises GatewayError (400, 502) that names a parameter whose value protobuf cannot carry: an
    array or an object.
    """
    entries = []
    for key, value in parameters.items():
        code = _write_value(value)
        if code is None:
            raise words.malformed(
                f"{label}: parameter '{shorten(key, QUOTED_NAME)}' must be true, false, a string "
                f"or a number to be sent over gRPC, got {describe_value(value)}"
            )
        entry = bytes_field(fields.KEY, key.encode()) + bytes_field(fields.VALUE, code)
        entries.append(bytes_field(number, entry))
    return b"".join(entries)


def _write_value(value: object) -> bytes | None:
    """Write an InferParameter; None if it cannot carry the value."""
    if value is None:
        return b""
    if isinstance(value, bool):
        return varint_field(fields.BOOL_PARAM, value)
    if isinstance(value, int):
        # Only Triton knows uint64_param, so smaller numbers are int64. Larger ones are floats
        # already: no reader has integers of more than 64 bits.
        number = fields.INT64_PARAM if value < 2**63 else fields.UINT64_PARAM
        return varint_field(number, value)
    if isinstance(value, str):
        return bytes_field(fields.STRING_PARAM, value.encode())
    if isinstance(value, float):
        return fixed_field(fields.DOUBLE_PARAM, _DOUBLE.pack(value))
    return None
