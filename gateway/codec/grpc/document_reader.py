"""Reads protobuf messages as JSON documents."""

from __future__ import annotations

import base64
import math
from functools import cache
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.descriptors import message_class
from gateway.protocol.grpc.json_form import (
    CHOICES,
    TRACE_LEVEL,
    TRACE_VALUES,
    JsonForm,
    is_map,
    json_form,
    name_of,
)
from gateway.protocol.grpc.wire import LENGTH, START_GROUP, Buffer, WireError, WireReader

_FLOATS: Final = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


def read_message(
    full_name: str, data: Buffer, max_bytes: int, max_values: int, words: ErrorVocabulary
) -> Any:
    """Parse a message by protobuf.

    ``max_values`` limits fields and values: each takes memory and time, though it may be one byte.
    Raises GatewayError, malformed or too large, that names the message, and the field as far as it
    is known.
    """
    make = message_class(full_name)
    name = name_of(make.DESCRIPTOR)
    if len(data) > max_bytes:
        raise _too_large(name, f"{max_bytes} bytes", words)
    scan = _Scan(name, max_values, words)
    try:
        scan.read(make.DESCRIPTOR, WireReader(data), name)
        return make.FromString(bytes(data))
    except WireError as error:
        raise words.malformed(
            f"{words.name} is not valid protobuf: {scan.place}: {error}"
        ) from None
    except DecodeError:
        raise words.malformed(f"{words.name} is not valid protobuf: {name}") from None


class _Scan:
    """Counts the fields and values of a message, as protobuf parses all before they can be counted.

    ``place`` is the field that is read, for errors.
    """

    def __init__(self, name: str, max_values: int, words: ErrorVocabulary) -> None:
        self.place = name
        self._name: Final = name
        self._max_values: Final = max_values
        self._words: Final = words
        self._values = 0

    def read(self, message: Any, reader: WireReader, place: str) -> None:
        """Count a message; raises WireError, and GatewayError above the limit."""
        fields, defaults = _fields_of(message)
        self._count(defaults)
        while tag := reader.next_tag():
            self._count(1)
            field = fields.get(tag >> 3)
            if field is None:
                self._skip(reader, tag)
                continue
            self.place = f"{place}.{field.name}"
            if tag & 7 != LENGTH or field.type == FieldDescriptor.TYPE_BYTES:
                self._skip(reader, tag)
            elif field.message_type is not None:
                self.read(field.message_type, reader.enter(), self.place)
            elif field.type == FieldDescriptor.TYPE_STRING:
                reader.read_text()
            else:
                # Packed numbers of a byte or more.
                self._count(len(reader.read_view()))
            self.place = place

    def _skip(self, reader: WireReader, tag: int) -> None:
        if tag & 7 == START_GROUP:
            self._count(reader.skip_group(tag >> 3))
        else:
            reader.skip(tag)

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > self._max_values:
            raise _too_large(self._name, f"{self._max_values} fields and values", self._words)


@cache
def _fields_of(message: Any) -> tuple[dict[int, Any], int]:
    """Return the fields of a message by number, and how many JSON has even if they are not set."""
    fields = {field.number: field for field in message.fields}
    return fields, sum(not field.has_presence for field in message.fields)


def _too_large(name: str, limit: str, words: ErrorVocabulary) -> GatewayError:
    return GatewayError(words.too_large, f"{words.name} ({name}) has more than {limit}")


# ------------------------------------------------------------------------------------ JSON


def members_of(message: Any) -> dict[str, Any]:
    """Return the JSON object that has a message's fields, as ``json_form`` says."""
    members = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        form = json_form(field)
        value = json_of_field(field, getattr(message, field.name), form)
        if value or not form.omits_default:
            members[form.member or field.name] = value
    return members


def json_of_field(field: Any, value: Any, form: JsonForm) -> Any:
    """Return the JSON of a field's value."""
    if is_map(field):
        each = field.message_type.fields_by_name["value"]
        found = {str(key): _value(each, value[key], form, str(key)) for key in sorted(value)}
        return [*found.values()] if form.is_list else found
    if field.is_repeated:
        return [_value(field, each, form) for each in value]
    return _value(field, value, form)


def _value(field: Any, value: Any, form: JsonForm, key: str = "") -> Any:
    kind = field.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return _json_of(value, key)
    if kind == FieldDescriptor.TYPE_ENUM:
        known = field.enum_type.values_by_number.get(value)
        # An unknown number stays one, as in protobuf's own JSON.
        return value if known is None else known.name
    if kind == FieldDescriptor.TYPE_BYTES:
        text = base64.b64encode(value).decode()
        return {"b64": text} if form.is_handle else text
    if kind in _FLOATS:
        return _number(value, is_single=kind == FieldDescriptor.TYPE_FLOAT)
    if form.drop_prefix:
        return value.removeprefix(form.drop_prefix)
    return str(value) if form.is_text else value


def _json_of(message: Any, key: str) -> Any:
    """Return the JSON of a message; ``key`` is its key in a map."""
    name = name_of(message.DESCRIPTOR)
    if name in CHOICES:
        for field, value in message.ListFields():
            return _value(field, value, json_form(field))
        return None
    if name in TRACE_VALUES:
        values = list(message.value)
        if len(values) > 1 or (values and key == TRACE_LEVEL):
            return values
        return values[0] if values else None
    return members_of(message)


def _number(value: float, *, is_single: bool) -> float | str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return float(str(np.float32(value))) if is_single else value
