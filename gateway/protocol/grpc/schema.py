"""Describes protobuf messages, and the JSON that stands for them over HTTP, as data.

The messages are those of the .proto files; the tables here say where their JSON is another one than
that of protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from gateway.protocol.grpc.descriptors import Descriptor, Kind, find_symbol, text_of
from gateway.protocol.grpc.wire import FIXED32, FIXED64, LENGTH, VARINT


class Scalar(Enum):
    """The kinds of values that are no messages: name, wire type, number in descriptors."""

    BOOL = "bool", VARINT, 8
    INT32 = "int32", VARINT, 5
    INT64 = "int64", VARINT, 3
    INT64_TEXT = "int64", VARINT, 0
    """A number that is a string in Triton's JSON: its list of numbers to convert misses some."""
    UINT32 = "uint32", VARINT, 13
    UINT64 = "uint64", VARINT, 4
    FLOAT = "float", FIXED32, 2
    DOUBLE = "double", FIXED64, 1
    TEXT = "string", LENGTH, 9
    BYTES = "bytes", LENGTH, 12
    """Base64 in JSON."""
    HANDLE = "bytes", LENGTH, 0
    """Base64 in JSON, in an object: ``{"b64": …}``."""

    def __init__(self, protobuf_name: str, wire_type: int, number: int) -> None:
        self.protobuf_name: Final = protobuf_name
        self.wire_type: Final = wire_type
        self.number: Final = number


@dataclass(frozen=True, slots=True, eq=False)
class Enumeration:
    """An enumeration; its values have the numbers from 0 on."""

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


class Json(NamedTuple):
    """The JSON of a field, where it is not simply its value.

    A member is there even if its value is the default, as in Triton's responses, except messages
    and fields of a ``oneof`` that are not set, and fields with ``omit_default``.
    """

    member: str = ""
    """The member's name, if it is not that of the field."""
    omit_default: bool = False
    drop_prefix: str = ""
    """What JSON leaves out at the start of a text."""
    is_list: bool = False
    """In JSON the map is an array of its values, sorted by key, whose ``name`` is the key."""
    kind: Scalar | None = None
    """Another kind than that of the descriptor."""


_AS_ALL: Final = Json()


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A field of a message."""

    number: int
    name: str
    kind: Scalar | Enumeration | Message
    repeated: bool = False
    entry: Message | None = None
    """The message that an entry of a map is; the field's own kind is that of the values."""
    oneof: str = ""
    json: Json = _AS_ALL

    @property
    def member(self) -> str:
        """Return the name of the member in JSON."""
        return self.json.member or self.name

    @property
    def in_path(self) -> bool:
        """Tell whether a field of a request is part of the path over HTTP."""
        return self.name in _PATH_NAMES

    @property
    def wire_type(self) -> int:
        """Return the wire type of one value, not packed."""
        if isinstance(self.kind, Scalar):
            return self.kind.wire_type
        return VARINT if isinstance(self.kind, Enumeration) else LENGTH

    @property
    def is_packable(self) -> bool:
        """Tell whether many values may stand in one field of the wire."""
        return self.repeated and self.wire_type != LENGTH


# ------------------------------------------------------------------- exceptions of the JSON

_PATH_NAMES: Final = ("name", "version", "repository_name", "model_name")

FORMS: Final[Mapping[str, Form]] = {
    "InferParameter": Form.CHOICE,
    "ModelRepositoryParameter": Form.CHOICE,
    "ModelConfigResponse": Form.BODY,
    "RepositoryIndexResponse": Form.BODY,
    "SystemSharedMemoryStatusResponse": Form.BODY,
    "CudaSharedMemoryStatusResponse": Form.BODY,
    "TraceSettingRequest": Form.BODY,
    "TraceSettingRequest.SettingValue": Form.STRINGS,
    "TraceSettingResponse": Form.BODY,
    "TraceSettingResponse.SettingValue": Form.STRINGS,
    "LogSettingsRequest": Form.BODY,
    "LogSettingsRequest.SettingValue": Form.CHOICE,
    "LogSettingsResponse": Form.BODY,
    "LogSettingsResponse.SettingValue": Form.CHOICE,
}

_OMITTED: Final = Json(omit_default=True)
_AS_TEXT: Final = Json(kind=Scalar.INT64_TEXT)
_REGIONS: Final = Json(is_list=True)

EXCEPTIONS: Final[Mapping[str, Json]] = {
    # Only MLServer's metadata has parameters.
    "ModelMetadataResponse.parameters": _OMITTED,
    "ModelMetadataResponse.TensorMetadata.parameters": _OMITTED,
    # Triton's JSON has only what is known.
    "RepositoryIndexResponse.ModelIndex.version": _OMITTED,
    # MLServer's is State.READY over gRPC, READY over HTTP.
    "RepositoryIndexResponse.ModelIndex.state": Json(omit_default=True, drop_prefix="State."),
    "RepositoryIndexResponse.ModelIndex.reason": _OMITTED,
    "RepositoryModelLoadRequest.parameters": _OMITTED,
    "RepositoryModelUnloadRequest.parameters": _OMITTED,
    # KServe's responses; those of other servers are empty, in both forms.
    "RepositoryModelLoadResponse.model_name": Json("name", omit_default=True),
    "RepositoryModelLoadResponse.isLoaded": Json("load", omit_default=True),
    "RepositoryModelUnloadResponse.model_name": Json("name", omit_default=True),
    "RepositoryModelUnloadResponse.isUnloaded": Json("unload", omit_default=True),
    "SystemSharedMemoryStatusResponse.regions": _REGIONS,
    "CudaSharedMemoryStatusResponse.regions": _REGIONS,
    "CudaSharedMemoryRegisterRequest.raw_handle": Json(kind=Scalar.HANDLE),
    # Triton 2.51 does not know it, so its JSON lacks it.
    "ModelEnsembling.max_inflight_requests": _OMITTED,
    "ModelInstanceGroup.SecondaryDevice.device_id": _AS_TEXT,
    "ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim": _AS_TEXT,
    "ModelSequenceBatching.InitialState.dims": _AS_TEXT,
}

TRACE_LEVEL: Final = "trace_level"
"""The only trace setting that is an array of strings even if it has one value."""

FILE_PREFIX: Final = "file:"
"""Begins the parameters of a load whose values are files: bytes over gRPC, base64 over HTTP."""

# ------------------------------------------------------------------ messages of descriptors

_PACKAGE: Final = "inference."

# FieldDescriptorProto, and what two of its fields may be.
_NUMBER, _LABEL, _TYPE, _TYPE_NAME, _ONEOF_INDEX = 3, 4, 5, 6, 9
_REPEATED: Final = 3
_TYPES: Final = {kind.number: kind for kind in Scalar if kind.number}
# DescriptorProto: the only option in the files says that the message is an entry of a map.
_OPTIONS: Final = 7


@cache
def find_message(full_name: str) -> Message:
    """Return a message of the .proto files."""
    message = find_symbol(full_name)
    oneofs = [part.name for part in message.parts if part.kind is Kind.ONEOF]
    name = full_name.removeprefix(_PACKAGE)
    fields = tuple(
        _make_field(part, oneofs, EXCEPTIONS.get(f"{name}.{part.name}", _AS_ALL))
        for part in message.parts
        if part.kind is Kind.FIELD
    )
    return Message(name, fields, FORMS.get(name, Form.OBJECT))


@cache
def find_enumeration(full_name: str) -> Enumeration:
    """Return an enumeration of the .proto files."""
    return Enumeration(tuple(value.name for value in find_symbol(full_name).parts))


def _make_field(field: Descriptor, oneofs: list[str], json: Json) -> Field:
    kind: Scalar | Enumeration | Message
    repeated = field.values[_LABEL] == _REPEATED
    entry = None
    if _TYPE_NAME not in field.values:
        kind = json.kind or _TYPES[field.values[_TYPE]]
    else:
        name = text_of(field.values[_TYPE_NAME]).removeprefix(".")
        symbol = find_symbol(name)
        if symbol.kind is Kind.ENUM:
            kind = find_enumeration(name)
        else:
            kind = find_message(name)
            if _OPTIONS in symbol.values:
                entry, kind, repeated = kind, kind.fields[1].kind, False
    oneof = oneofs[field.values[_ONEOF_INDEX]] if _ONEOF_INDEX in field.values else ""
    return Field(field.values[_NUMBER], field.name, kind, repeated, entry, oneof, json)


@cache
def fields_by_tag(message: Message) -> Mapping[int, Field]:
    """Return the fields by each tag that they may have, packed ones included."""
    tags = {}
    for field in message.fields:
        tags[field.number << 3 | (LENGTH if field.entry else field.wire_type)] = field
        if field.is_packable:
            tags[field.number << 3 | LENGTH] = field
    return MappingProxyType(tags)


@cache
def fields_by_number(message: Message) -> tuple[Field, ...]:
    """Return the fields in the order in which they are written."""
    return tuple(sorted(message.fields, key=lambda field: field.number))


@cache
def has_files(message: Message) -> bool:
    """Tell whether some of the values that a message may have are files; see FILE_PREFIX."""
    return any(field.kind is Scalar.BYTES for field in message.fields)


def body_field(message: Message) -> Field:
    """Return the field that is the whole JSON of a message of the form BODY."""
    (field,) = (field for field in message.fields if not field.in_path)
    return field
