"""Writes JSON documents as protobuf messages, by their schema."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway.errors import GatewayError, shorten
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.schema import (
    FILE_PREFIX,
    Enumeration,
    Field,
    Form,
    Message,
    Scalar,
    fields_by_number,
    has_files,
)
from gateway.protocol.grpc.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    bytes_field,
    field_tag,
    varint,
)
from gateway.protocol.json_errors import describe_value
from gateway.sizes import QUOTED_NAME

_INTEGERS: Final = {
    Scalar.INT32: range(-(2**31), 2**31),
    Scalar.INT64: range(-(2**63), 2**63),
    Scalar.INT64_TEXT: range(-(2**63), 2**63),
    Scalar.UINT32: range(2**32),
    Scalar.UINT64: range(2**64),
}
_ENUM_RANGE: Final = _INTEGERS[Scalar.INT32]
_DECIMAL: Final = re.compile("-?[0-9]{1,20}")

_FLOATS: Final = {Scalar.FLOAT: struct.Struct("<f"), Scalar.DOUBLE: struct.Struct("<d")}
_FLOAT_TEXTS: Final = ("NaN", "Infinity", "-Infinity")

_DEFAULTS: Final = {VARINT: b"\0", FIXED32: bytes(4), FIXED64: bytes(8), LENGTH: b""}
"""What values of each wire type that equal their default are written as."""


class DocumentWriter:
    """Writes one message; errors name it and the field."""

    def __init__(self, message: Message, words: ErrorVocabulary) -> None:
        self._message: Final = message
        self._words: Final = words
        self._path: Final = [message.name]

    def write(self, document: Any, more: Mapping[str, Any] | None = None) -> bytes:
        """Write a document; ``more`` are members in addition, which replace its own.

        Raises GatewayError (400, 502) that names message and field.
        """
        return self._write_object(self._message, {**self._check_object(document), **(more or {})})

    def _write_message(self, message: Message, value: Any, key: str = "") -> bytes:
        if message.form is Form.OBJECT:
            return self._write_object(message, self._check_object(value))
        if message.form is Form.CHOICE:
            return self._write_choice(message, value, key)
        assert message.form is Form.STRINGS
        (field,) = message.fields
        if isinstance(value, str):
            value = [value]
        elif value is None:
            value = []
        elif not isinstance(value, list):
            raise self._must_be("a string, an array of strings or null", value)
        return self._write_repeated(field, value)

    def _write_object(self, message: Message, members: Mapping[str, Any]) -> bytes:
        parts = []
        chosen: dict[str, str] = {}
        for field in fields_by_number(message):
            value = members.get(field.member)
            if value is None:
                continue
            other = chosen.setdefault(field.oneof, field.member) if field.oneof else field.member
            if other != field.member:
                raise self._malformed(f"has both {other} and {field.member}")
            self._path.append(field.member)
            parts.append(self._write_field(field, value))
            self._path.pop()
        return b"".join(parts)

    def _write_choice(self, message: Message, value: Any, key: str) -> bytes:
        """Write a value as the field for its type; null is a message without a value."""
        if value is None:
            return b""
        text = Scalar.TEXT
        if has_files(message) and key.startswith(FILE_PREFIX):
            text = Scalar.BYTES
        for field in message.fields:
            if _is_choice_for(field, value, text):
                return self._write_single(field, value)
        names = ", ".join(field.name for field in message.fields)
        raise self._must_be(f"a value for one of {names}", value)

    def _write_field(self, field: Field, value: Any) -> bytes:
        if field.json.is_list:
            return self._write_list(field, value)
        if field.entry is not None:
            return self._write_map(field, self._check_object(value).items())
        if field.repeated:
            return self._write_repeated(field, value)
        return self._write_single(field, value)

    def _write_single(self, field: Field, value: Any) -> bytes:
        if isinstance(field.kind, Message):
            return bytes_field(field.number, self._write_message(field.kind, value))
        code = self._write_value(field.kind, value)
        if not field.oneof and code == _DEFAULTS[field.wire_type]:
            return b""
        return _with_tag(field, code)

    def _write_repeated(self, field: Field, values: Any) -> bytes:
        codes = []
        for index, value in enumerate(self._check_array(values)):
            self._path.append(f"[{index}]")
            if isinstance(field.kind, Message):
                codes.append(self._write_message(field.kind, value))
            else:
                codes.append(self._write_value(field.kind, value))
            self._path.pop()
        if not field.is_packable:
            return b"".join(bytes_field(field.number, code) for code in codes)
        return bytes_field(field.number, b"".join(codes)) if codes else b""

    def _write_list(self, field: Field, values: Any) -> bytes:
        """Write an array of objects as a map whose keys are their names."""
        entries = []
        for index, value in enumerate(self._check_array(values)):
            self._path.append(f"[{index}]")
            name = self._check_object(value).get("name")
            if not isinstance(name, str):
                raise self._malformed("must have a name")
            entries.append((name, value))
            self._path.pop()
        return self._write_map(field, entries)

    def _write_map(self, field: Field, entries: Iterable[tuple[str, Any]]) -> bytes:
        assert field.entry is not None
        key_field, value_field = field.entry.fields
        form = field.kind.form if isinstance(field.kind, Message) else Form.OBJECT
        parts = []
        for key, value in entries:
            # Null leaves a setting of the log as it is, an empty array one of the trace: in both
            # cases servers over gRPC must not see the setting.
            if (form is Form.CHOICE and value is None) or (form is Form.STRINGS and value == []):
                continue
            self._path.append(shorten(key, QUOTED_NAME))
            code = self._write_single(key_field, key)
            if isinstance(field.kind, Message):
                code += bytes_field(2, self._write_message(field.kind, value, key))
            else:
                code += self._write_single(value_field, value)
            parts.append(bytes_field(field.number, code))
            self._path.pop()
        return b"".join(parts)

    # ------------------------------------------------------------------------------ values

    def _write_value(self, kind: Scalar | Enumeration, value: Any) -> bytes:
        """Write a value without its tag."""
        if isinstance(kind, Enumeration):
            return self._write_enum(kind, value)
        if kind in _INTEGERS:
            return varint(self._check_integer(kind, value))
        if kind in _FLOATS:
            return self._write_float(kind, value)
        if kind is Scalar.BOOL:
            if not isinstance(value, bool):
                raise self._must_be("true or false", value)
            return varint(value)
        if kind is Scalar.HANDLE:
            value = self._check_object(value).get("b64")
        if isinstance(value, bytes) and kind is Scalar.BYTES:
            return value  # of the gateway itself: JSON has none
        if not isinstance(value, str):
            raise self._must_be("a string", value)
        return value.encode() if kind is Scalar.TEXT else self._decode(value)

    def _write_enum(self, kind: Enumeration, value: Any) -> bytes:
        if isinstance(value, str) and value in kind.values:
            return varint(kind.values.index(value))
        if isinstance(value, int) and not isinstance(value, bool) and value in _ENUM_RANGE:
            return varint(value)
        raise self._must_be(f"one of {', '.join(kind.values)}", value)

    def _check_integer(self, kind: Scalar, value: Any) -> int:
        allowed = _INTEGERS[kind]
        number = value
        # In protobuf's own JSON, integers of 64 bits are strings, and so are keys of maps.
        if isinstance(value, str) and _DECIMAL.fullmatch(value):
            number = int(value)
        # Of another class of integers, such as bool, a range would look at each of its numbers.
        if type(number) is not int or number not in allowed:
            limits = f"{allowed.start} to {allowed.stop - 1}"
            raise self._must_be(f"an integer from {limits}", value)
        return number

    def _write_float(self, kind: Scalar, value: Any) -> bytes:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and value in _FLOAT_TEXTS):
            try:
                return _FLOATS[kind].pack(float(value))
            except OverflowError:
                pass
        raise self._must_be(f"a number of the type {kind.protobuf_name}", value)

    def _decode(self, value: str) -> bytes:
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise self._must_be("base64", value) from None

    # ------------------------------------------------------------------------------ errors

    def _check_object(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._must_be("an object", value)
        return value

    def _check_array(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._must_be("an array", value)
        return value

    def _must_be(self, what: str, value: Any) -> GatewayError:
        return self._malformed(f"must be {what}, got {describe_value(value)}")

    def _malformed(self, what: str) -> GatewayError:
        return self._words.malformed(f"{self._place()} of {self._words.name} {what}")

    def _place(self) -> str:
        return ".".join(self._path).replace(".[", "[")


def _is_choice_for(field: Field, value: Any, text: Scalar) -> bool:
    """Tell whether a field of a CHOICE has the type of a value, and ``text`` for strings."""
    if isinstance(value, bool):
        return field.kind is Scalar.BOOL
    if isinstance(value, int):
        return field.kind in _INTEGERS and value in _INTEGERS[field.kind]
    if isinstance(value, str):
        return field.kind is text
    return isinstance(value, float) and field.kind is Scalar.DOUBLE


def _with_tag(field: Field, code: bytes) -> bytes:
    kind = field.wire_type
    if kind == LENGTH:
        return bytes_field(field.number, code)
    return field_tag(field.number, kind) + code
