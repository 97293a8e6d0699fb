"""Reads protobuf messages as JSON documents, by their schema."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.schema import (
    FILE_PREFIX,
    TRACE_LEVEL,
    Enumeration,
    Field,
    Form,
    Message,
    Scalar,
    fields_by_tag,
    has_files,
)
from gateway.protocol.grpc.wire import (
    LENGTH,
    START_GROUP,
    Buffer,
    WireError,
    WireReader,
    to_int32,
)

Range = tuple[int, int]

_FLOAT = struct.Struct("<f")
_DOUBLE = struct.Struct("<d")


class DocumentReader:
    """Reads one message; ``members`` is its JSON, of the form OBJECT.

    ``max_values`` limits fields and values: each takes memory and time, though it may be one byte.
    Raises GatewayError, malformed or too large, that names message and field.
    """

    def __init__(
        self,
        message: Message,
        data: Buffer,
        max_bytes: int,
        max_values: int,
        words: ErrorVocabulary,
    ) -> None:
        self._name: Final = message.name
        self._words: Final = words
        self._data: Final = data
        self._path: Final[list[str]] = []
        self._max_values: Final = max_values
        self._values = 0
        if len(data) > max_bytes:
            raise self._too_large(f"{max_bytes} bytes")
        self.members: Final = self._read_object(message, [(0, len(data))])

    def _read_message(self, message: Message, ranges: list[Range], key: str = "") -> Any:
        """Read a message as JSON; ``key`` is its key in a map."""
        if message.form is Form.OBJECT:
            return self._read_object(message, ranges)
        found = self._read_fields(message, ranges)
        if message.form is Form.CHOICE:
            return self._read_choice(message, found, key)
        assert message.form is Form.STRINGS
        (field,) = message.fields
        values = found.get(field.number, [])
        return values if len(values) > 1 or (values and key == TRACE_LEVEL) else _first(values)

    def _read_object(self, message: Message, ranges: list[Range]) -> dict[str, Any]:
        self._count(len(message.fields))
        found = self._read_fields(message, ranges)
        members = {}
        for field in message.fields:
            value = found.get(field.number)
            if field.number in found:
                value = self._finish(field, value)
            elif field.oneof or (isinstance(field.kind, Message) and _is_single(field)):
                continue
            else:
                value = _default(field)
            if field.json.omit_default and value == _default(field):
                continue
            members[field.member] = value
        return members

    def _read_choice(self, message: Message, found: dict[int, Any], key: str) -> Any:
        for field in message.fields:
            if field.number not in found:
                continue
            if has_files(message) and key.startswith(FILE_PREFIX) != (field.kind is Scalar.BYTES):
                raise self._malformed(
                    f"has a {field.name}; only parameters whose names begin with "
                    f"'{FILE_PREFIX}' must have bytes"
                )
            return self._finish(field, found[field.number])
        return None

    def _finish(self, field: Field, value: Any) -> Any:
        """Return a field's value as JSON has it."""
        if field.json.is_list:
            return [value[key] for key in sorted(value)]
        if isinstance(field.kind, Message) and _is_single(field):
            self._path.append(field.name)
            value = self._read_message(field.kind, value)
            self._path.pop()
        prefix = field.json.drop_prefix
        return value.removeprefix(prefix) if prefix else value

    def _read_fields(self, message: Message, ranges: Iterable[Range]) -> dict[int, Any]:
        """Read the fields that are set, by number; messages that occur once as ranges.

        A message that occurs twice is that of both parts together.
        """
        tags = fields_by_tag(message)
        found: dict[int, Any] = {}
        for start, end in ranges:
            reader = WireReader(self._data, start, end)
            field = None
            try:
                while tag := reader.next_tag():
                    self._count(1)
                    field = tags.get(tag)
                    if field is None:
                        self._skip(reader, tag)
                        continue
                    if field.oneof:
                        self._drop_others(message, field, found)
                    self._read_field(reader, tag, field, found)
                    field = None
            except WireError as error:
                if field is not None:
                    self._path.append(field.name)
                raise self._invalid(error) from None
        return found

    def _read_field(
        self, reader: WireReader, tag: int, field: Field, found: dict[int, Any]
    ) -> None:
        kind = field.kind
        if field.entry is not None:
            values = found.setdefault(field.number, {})
            self._read_entry(field, field.entry, _enter(reader), values)
        elif not field.repeated:
            if isinstance(kind, Message):
                found.setdefault(field.number, []).append(_enter(reader))
            else:
                found[field.number] = _read_value(reader, kind)
        elif isinstance(kind, Message):
            part = _enter(reader)
            values = found.setdefault(field.number, [])
            self._path.append(f"{field.name}[{len(values)}]")
            values.append(self._read_message(kind, [part]))
            self._path.pop()
        elif tag & 7 == LENGTH and field.is_packable:
            values = found.setdefault(field.number, [])
            packed = reader.enter()
            while packed.position < packed.end:
                self._count(1)
                values.append(_read_value(packed, kind))
        else:
            found.setdefault(field.number, []).append(_read_value(reader, kind))

    def _drop_others(self, message: Message, field: Field, found: dict[int, Any]) -> None:
        """Drop what the last field of a oneof replaces; it must be valid all the same."""
        for other in message.fields:
            if other.oneof == field.oneof and other is not field and other.number in found:
                self._finish(other, found.pop(other.number))

    def _read_entry(
        self, field: Field, message: Message, entry: Range, values: dict[str, Any]
    ) -> None:
        """Read an entry of a map; of two with the same key the last counts."""
        key_field, value_field = message.fields
        self._path.append(field.name)
        found = self._read_fields(message, [entry])
        key = str(found.get(key_field.number, _default(key_field)))
        if isinstance(field.kind, Message):
            self._path.append(key)
            value = self._read_message(field.kind, found.get(value_field.number, []), key)
            self._path.pop()
        else:
            value = found.get(value_field.number, _default(value_field))
        self._path.pop()
        values[key] = value

    def _skip(self, reader: WireReader, tag: int) -> None:
        start = reader.position
        reader.skip(tag)
        if tag & 7 == START_GROUP:
            self._count((reader.position - start) // 2)

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > self._max_values:
            raise self._too_large(f"{self._max_values} fields and values")

    # ------------------------------------------------------------------------------ errors

    def _too_large(self, limit: str) -> GatewayError:
        return GatewayError(
            self._words.too_large, f"{self._words.name} ({self._name}) has more than {limit}"
        )

    def _place(self) -> str:
        return ".".join([self._name, *self._path])

    def _invalid(self, error: WireError) -> GatewayError:
        return self._words.malformed(
            f"{self._words.name} is not valid protobuf: {self._place()}: {error}"
        )

    def _malformed(self, what: str) -> GatewayError:
        return self._words.malformed(f"{self._place()} of {self._words.name} {what}")


def _enter(reader: WireReader) -> Range:
    size = reader.read_length()
    start = reader.position
    reader.position = start + size
    return start, start + size


def _is_single(field: Field) -> bool:
    return not field.repeated and field.entry is None


def _first(values: list[Any]) -> Any:
    return values[0] if values else None


def _default(field: Field) -> Any:
    """Return the value of a field that is not set, as JSON has it."""
    if field.entry is not None:
        return [] if field.json.is_list else {}
    if field.repeated:
        return []
    if isinstance(field.kind, Enumeration):
        return field.kind.values[0]
    assert isinstance(field.kind, Scalar)
    return _DEFAULTS[field.kind]


def _read_value(reader: WireReader, kind: Scalar | Enumeration) -> Any:
    if isinstance(kind, Scalar):
        return _READERS[kind](reader)
    number = to_int32(reader.read_varint())
    # An unknown number stays one, as in protobuf's own JSON.
    return kind.values[number] if 0 <= number < len(kind.values) else number


def _read_float(reader: WireReader) -> float | str:
    (value,) = _FLOAT.unpack(reader.read_fixed(4))
    return _json_number(float(str(np.float32(value))))


def _read_double(reader: WireReader) -> float | str:
    (value,) = _DOUBLE.unpack(reader.read_fixed(8))
    return _json_number(value)


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _read_base64(reader: WireReader) -> str:
    return base64.b64encode(reader.read_view()).decode()


_READERS: Final[dict[Scalar, Callable[[WireReader], Any]]] = {
    Scalar.BOOL: lambda reader: reader.read_varint() != 0,
    Scalar.INT32: lambda reader: to_int32(reader.read_varint()),
    Scalar.INT64: WireReader.read_int64,
    Scalar.INT64_TEXT: lambda reader: str(reader.read_int64()),
    Scalar.UINT32: lambda reader: reader.read_varint() % 2**32,
    Scalar.UINT64: WireReader.read_varint,
    Scalar.FLOAT: _read_float,
    Scalar.DOUBLE: _read_double,
    Scalar.TEXT: WireReader.read_text,
    Scalar.BYTES: _read_base64,
    Scalar.HANDLE: lambda reader: {"b64": _read_base64(reader)},
}
_DEFAULTS: Final[dict[Scalar, Any]] = {
    Scalar.BOOL: False,
    Scalar.INT32: 0,
    Scalar.INT64: 0,
    Scalar.INT64_TEXT: "0",
    Scalar.UINT32: 0,
    Scalar.UINT64: 0,
    Scalar.FLOAT: 0.0,
    Scalar.DOUBLE: 0.0,
    Scalar.TEXT: "",
    Scalar.BYTES: "",
    Scalar.HANDLE: {"b64": ""},
}
