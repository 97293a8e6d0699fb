"""Writes JSON documents as protobuf messages."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from gateway.errors import GatewayError, shorten
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.descriptors import message_class
from gateway.protocol.grpc.json_form import (
    CHOICES,
    FILE_PREFIX,
    TRACE_VALUES,
    is_map,
    json_form,
    name_of,
)
from gateway.protocol.json_errors import describe_value
from gateway.sizes import QUOTED_NAME

_INT32: Final = range(-(2**31), 2**31)
_INTEGERS: Final = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: range(-(2**63), 2**63),
    FieldDescriptor.TYPE_UINT32: range(2**32),
    FieldDescriptor.TYPE_UINT64: range(2**64),
    FieldDescriptor.TYPE_ENUM: _INT32,
}
_FLOATS: Final = {FieldDescriptor.TYPE_FLOAT: "<f", FieldDescriptor.TYPE_DOUBLE: "<d"}
_TYPES: Final = {
    **dict.fromkeys(_INTEGERS, int),
    **dict.fromkeys(_FLOATS, float),
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BYTES: str,
}
_WORDS: Final = {
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "a string",
    FieldDescriptor.TYPE_BYTES: "base64",
    FieldDescriptor.TYPE_FLOAT: "a number of the type float",
    FieldDescriptor.TYPE_DOUBLE: "a number of the type double",
}
"""What values must be, but for integers."""

_DECIMAL: Final = re.compile("-?[0-9]{1,20}")
_FLOAT_TEXTS: Final = ("NaN", "Infinity", "-Infinity")
_BYTES_PARAM: Final = "bytes_param"


class DocumentWriter:
    """Writes JSON as messages; errors name message and field."""

    def __init__(self, words: ErrorVocabulary) -> None:
        self._words: Final = words

    def write(self, full_name: str, members: Any, more: Mapping[str, Any] | None = None) -> Any:
        """Make a message of an object; ``more`` are further members, which replace its own.

        Raises GatewayError (400, 502) that names message and field.
        """
        message = message_class(full_name)()
        place = name_of(message.DESCRIPTOR)
        self._fill_object(message, {**self._object(members, place), **(more or {})}, place)
        return message

    def _fill(self, message: Any, value: Any, place: str, key: str = "") -> None:
        """Fill a message by its JSON; ``key`` is its key in a map."""
        name = name_of(message.DESCRIPTOR)
        if name in CHOICES:
            self._fill_choice(message, value, place, key)
        elif name in TRACE_VALUES:
            self._fill_trace_value(message, value, place)
        else:
            self._fill_object(message, self._object(value, place), place)

    def _fill_object(self, message: Any, members: Mapping[str, Any], place: str) -> None:
        for field in message.DESCRIPTOR.fields:
            member = json_form(field).member or field.name
            value = members.get(member)
            if value is None:
                continue
            oneof = field.containing_oneof
            if oneof is not None and (other := message.WhichOneof(oneof.name)):
                raise self._malformed(place, f"has both {other} and {member}")
            self._fill_field(message, field, value, f"{place}.{member}")

    def _fill_field(self, message: Any, field: Any, value: Any, place: str) -> None:
        part = getattr(message, field.name)
        if is_map(field):
            if json_form(field).is_list:
                entries = self._named(value, place)
            else:
                entries = self._object(value, place).items()
            self._fill_map(part, field.message_type, entries, place)
        elif field.is_repeated:
            self._extend(part, field, value, place)
        elif field.message_type is not None:
            part.SetInParent()
            self._fill(part, value, place)
        else:
            setattr(message, field.name, self._scalar(field, value, place))

    def _extend(self, values: Any, field: Any, array: Any, place: str) -> None:
        for index, value in enumerate(self._array(array, place)):
            if field.message_type is not None:
                self._fill(values.add(), value, f"{place}[{index}]")
            else:
                values.append(self._scalar(field, value, f"{place}[{index}]"))

    def _named(self, values: Any, place: str) -> Iterable[tuple[str, Any]]:
        """Yield the entries of a map that is an array of objects, whose keys are their names."""
        for index, value in enumerate(self._array(values, place)):
            name = self._object(value, f"{place}[{index}]").get("name")
            if not isinstance(name, str):
                raise self._malformed(f"{place}[{index}]", "must have a name")
            yield name, value

    def _fill_map(
        self, target: Any, entry: Any, entries: Iterable[tuple[str, Any]], place: str
    ) -> None:
        key_field, field = entry.fields
        name = field.message_type and name_of(field.message_type)
        for key, value in entries:
            # Null leaves a setting of the log as it is, an empty array one of the trace: in both
            # cases servers over gRPC must not see the setting.
            if (value is None and name in CHOICES) or (value == [] and name in TRACE_VALUES):
                continue
            at = f"{place}.{shorten(key, QUOTED_NAME)}"
            found = self._scalar(key_field, key, at)
            if name:
                self._fill(target[found], value, at, key)
            else:
                target[found] = self._scalar(field, value, at)

    def _fill_choice(self, message: Any, value: Any, place: str, key: str) -> None:
        """Set the field for a value's type; null is a message without a value."""
        if value is None:
            return
        fields = message.DESCRIPTOR.fields_by_name
        is_file = _BYTES_PARAM in fields and key.startswith(FILE_PREFIX) and isinstance(value, str)
        for field in fields.values():
            fits = type(value) is _TYPES[field.type] and is_file == (field.name == _BYTES_PARAM)
            if fits and value in _INTEGERS.get(field.type, (value,)):
                setattr(message, field.name, self._scalar(field, value, place))
                return
        raise self._must_be(place, f"a value for one of {', '.join(fields)}", value)

    def _fill_trace_value(self, message: Any, value: Any, place: str) -> None:
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list):
            raise self._must_be(place, "a string, an array of strings or null", value)
        self._extend(message.value, message.DESCRIPTOR.fields[0], texts, place)

    # ------------------------------------------------------------------------------ values

    def _scalar(self, field: Any, value: Any, place: str) -> Any:
        """Return a value that is no message as protobuf takes it."""
        if json_form(field).is_handle:
            value = self._object(value, place).get("b64")
        try:
            return _convert(field, value)
        except (ValueError, KeyError, OverflowError):
            raise self._must_be(place, _what_it_must_be(field), value) from None

    # ------------------------------------------------------------------------------ errors

    def _object(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._must_be(place, "an object", value)
        return value

    def _array(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._must_be(place, "an array", value)
        return value

    def _must_be(self, place: str, what: str, value: Any) -> GatewayError:
        return self._malformed(place, f"must be {what}, got {describe_value(value)}")

    def _malformed(self, place: str, what: str) -> GatewayError:
        return self._words.malformed(f"{place} of {self._words.name} {what}")


def _convert(field: Any, value: Any) -> Any:
    """Return a value as protobuf takes it; raises ValueError, KeyError or OverflowError."""
    kind = field.type
    if isinstance(value, str):
        if kind == FieldDescriptor.TYPE_BYTES:
            return base64.b64decode(value, validate=True)
        if kind == FieldDescriptor.TYPE_ENUM:
            return field.enum_type.values_by_name[value].number
        # In protobuf's own JSON, integers of 64 bits are strings, and so are keys of maps.
        if kind in _INTEGERS and _DECIMAL.fullmatch(value):
            value = int(value)
    if kind in _FLOATS and (type(value) is int or value in _FLOAT_TEXTS):
        value = float(value)
    # Not of another class: a bool is an integer, too.
    if type(value) is not _TYPES[kind] or value not in _INTEGERS.get(kind, (value,)):
        raise ValueError
    if kind in _FLOATS:
        struct.pack(_FLOATS[kind], value)
    return value


def _what_it_must_be(field: Any) -> str:
    if field.enum_type is not None:
        return f"one of {', '.join(field.enum_type.values_by_name)}"
    if field.type in _INTEGERS:
        allowed = _INTEGERS[field.type]
        return f"an integer from {allowed.start} to {allowed.stop - 1}"
    return _WORDS[field.type]
