"""Describes protobuf messages, and the JSON that stands for them over HTTP, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Final

from gateway.protocol.grpc.wire import FIXED32, FIXED64, LENGTH, VARINT


class Scalar(Enum):
    """The kinds of values that are no messages, with their wire types."""

    BOOL = "bool", VARINT
    INT32 = "int32", VARINT
    INT64 = "int64", VARINT
    INT64_TEXT = "int64", VARINT, "as text"
    """A number that is a string in Triton's JSON: its list of numbers to convert misses some."""
    UINT32 = "uint32", VARINT
    UINT64 = "uint64", VARINT
    FLOAT = "float", FIXED32
    DOUBLE = "double", FIXED64
    TEXT = "string", LENGTH
    BYTES = "bytes", LENGTH
    """Base64 in JSON."""
    HANDLE = "bytes", LENGTH, "as an object"
    """Base64 in JSON, in an object: ``{"b64": …}``."""

    def __init__(self, protobuf_name: str, wire_type: int, _json: str = "") -> None:
        self.protobuf_name: Final = protobuf_name
        self.wire_type: Final = wire_type


@dataclass(frozen=True, slots=True, eq=False)
class Enumeration:
    """An enumeration; its values have the numbers from 0 on."""

    name: str
    values: tuple[str, ...]


class Form(Enum):
    """The JSON that stands for a message."""

    OBJECT = "an object with a member for each field"
    BODY = "the value of its only field that is not part of the path"
    CHOICE = "the value of the field that is set, or null"
    STRINGS = "a string, an array of strings, or null"
    """The value of a trace setting. Null clears it; so does a message without values."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message; its fields are in the order of their members in JSON."""

    name: str
    fields: tuple[Field, ...] = ()
    form: Form = Form.OBJECT


Kind = Scalar | Enumeration | Message


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A field of a message.

    Over HTTP a member is there even if its value is the default, as in Triton's responses, except
    messages and fields of a ``oneof`` that are not set, and fields with ``omit_default``.
    """

    number: int
    name: str
    kind: Kind
    repeated: bool = False
    key: Scalar | None = None
    """The kind of a map's keys; the field's own kind is that of the values."""
    oneof: str = ""
    json_name: str = ""
    """The member in JSON, if it has another name."""
    omit_default: bool = False
    in_path: bool = False
    """Over HTTP the value is part of the request's path."""
    drop_prefix: str = ""
    """What JSON leaves out at the start of a text."""
    is_list: bool = False
    """In JSON the map is an array of its values, sorted by key, whose ``name`` is the key."""

    @property
    def member(self) -> str:
        """Return the name of the member in JSON."""
        return self.json_name or self.name

    @property
    def is_packable(self) -> bool:
        """Tell whether many values may stand in one field of the wire."""
        return self.repeated and wire_type(self.kind) != LENGTH


def many(number: int, name: str, kind: Kind) -> Field:
    """Make a repeated field."""
    return Field(number, name, kind, repeated=True)


def mapped(
    number: int, name: str, kind: Kind, key: Scalar = Scalar.TEXT, *, is_list: bool = False
) -> Field:
    """Make a map with values of a kind."""
    return Field(number, name, kind, key=key, is_list=is_list)


def choice(*fields: Field, oneof: str = "parameter_choice") -> tuple[Field, ...]:
    """Make fields of which one at most is set."""
    return tuple(replace(each, oneof=oneof) for each in fields)


def wire_type(kind: Kind) -> int:
    """Return the wire type of a value of a kind, not packed."""
    if isinstance(kind, Scalar):
        return kind.wire_type
    return VARINT if isinstance(kind, Enumeration) else LENGTH


@cache
def fields_by_tag(message: Message) -> Mapping[int, Field]:
    """Return the fields by each tag that they may have, packed ones included."""
    tags = {}
    for field in message.fields:
        tags[field.number << 3 | (wire_type(field.kind) if field.key is None else LENGTH)] = field
        if field.is_packable:
            tags[field.number << 3 | LENGTH] = field
    return MappingProxyType(tags)


@cache
def fields_by_number(message: Message) -> tuple[Field, ...]:
    """Return the fields in the order in which they are written."""
    return tuple(sorted(message.fields, key=lambda field: field.number))


@cache
def entry_of(field: Field) -> Message:
    """Return the message that an entry of a map is."""
    assert field.key is not None
    entries = (Field(1, "key", field.key), Field(2, "value", field.kind))
    return Message(f"{field.name} entry", entries)


@cache
def has_files(message: Message) -> bool:
    """Tell whether some of the values that a message may have are files; see FILE_PREFIX."""
    return any(field.kind is Scalar.BYTES for field in message.fields)


def body_field(message: Message) -> Field:
    """Return the field that is the whole JSON of a message of the form BODY."""
    (field,) = (field for field in message.fields if not field.in_path)
    return field


TRACE_LEVEL: Final = "trace_level"
"""The only trace setting that is an array of strings even if it has one value."""

FILE_PREFIX: Final = "file:"
"""Begins the parameters of a load whose values are files: bytes over gRPC, base64 over HTTP."""
