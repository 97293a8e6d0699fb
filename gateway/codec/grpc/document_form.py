"""Reads protobuf messages as JSON documents, and writes these as messages.

A message is an object with a member for each field, in the order of the .proto file. A member is
there even if its value is the default, as in Triton's responses, except messages and fields of a
``oneof`` that are not set. Integers are numbers. The tables here have the exceptions.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from gateway.errors import GatewayError, shorten
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.descriptors import message_class
from gateway.protocol.grpc.rpcs import FILE_PREFIX, PACKAGE
from gateway.protocol.grpc.wire import LENGTH, START_GROUP, Buffer, WireError, WireReader
from gateway.protocol.json_errors import describe_value
from gateway.sizes import QUOTED_NAME

CHOICES: Final = (
    "InferParameter",
    "ModelRepositoryParameter",
    "LogSettingsRequest.SettingValue",
    "LogSettingsResponse.SettingValue",
)
"""Messages whose JSON is the value of the field that is set, or null."""

TRACE_VALUES: Final = ("TraceSettingRequest.SettingValue", "TraceSettingResponse.SettingValue")
"""Messages that are a string, an array of strings, or null, which clears a setting."""

TRACE_LEVEL: Final = "trace_level"
"""The only trace setting that is an array of strings even if it has one value."""


class JsonForm(NamedTuple):
    """The JSON of a field, where it is not simply its value."""

    member: str = ""
    """The member's name, if it is not that of the field."""
    omits_default: bool = False
    drop_prefix: str = ""
    """What JSON leaves out at the start of a text."""
    is_list: bool = False
    """In JSON the map is an array of its values, sorted by key, whose ``name`` is the key."""
    is_text: bool = False
    """A number that is a string in Triton's JSON: its list of numbers to convert misses some."""
    is_handle: bool = False
    """Base64 in an object: ``{"b64": …}``."""


_AS_ALL: Final = JsonForm()
_OMITTED: Final = JsonForm(omits_default=True)
_AS_TEXT: Final = JsonForm(is_text=True)
_REGIONS: Final = JsonForm(is_list=True)

FIELDS: Final[Mapping[str, JsonForm]] = {
    # Only MLServer's metadata has parameters.
    "ModelMetadataResponse.parameters": _OMITTED,
    "ModelMetadataResponse.TensorMetadata.parameters": _OMITTED,
    # Triton's JSON has only what is known.
    "RepositoryIndexResponse.ModelIndex.version": _OMITTED,
    # MLServer's is State.READY over gRPC, READY over HTTP.
    "RepositoryIndexResponse.ModelIndex.state": JsonForm(omits_default=True, drop_prefix="State."),
    "RepositoryIndexResponse.ModelIndex.reason": _OMITTED,
    "RepositoryModelLoadRequest.parameters": _OMITTED,
    "RepositoryModelUnloadRequest.parameters": _OMITTED,
    # KServe's responses; those of other servers are empty, in both forms.
    "RepositoryModelLoadResponse.model_name": JsonForm("name", omits_default=True),
    "RepositoryModelLoadResponse.isLoaded": JsonForm("load", omits_default=True),
    "RepositoryModelUnloadResponse.model_name": JsonForm("name", omits_default=True),
    "RepositoryModelUnloadResponse.isUnloaded": JsonForm("unload", omits_default=True),
    "SystemSharedMemoryStatusResponse.regions": _REGIONS,
    "CudaSharedMemoryStatusResponse.regions": _REGIONS,
    "CudaSharedMemoryRegisterRequest.raw_handle": JsonForm(is_handle=True),
    # Triton 2.51 does not know it, so its JSON lacks it.
    "ModelEnsembling.max_inflight_requests": _OMITTED,
    "ModelInstanceGroup.SecondaryDevice.device_id": _AS_TEXT,
    "ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim": _AS_TEXT,
    "ModelSequenceBatching.InitialState.dims": _AS_TEXT,
}


def name_of(descriptor: Any) -> str:
    """Return the name that errors and the tables here have for a message or field."""
    return str(descriptor.full_name).removeprefix(PACKAGE)


@cache
def is_map(field: Any) -> bool:
    """Tell whether a field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


@cache
def json_form(field: Any) -> JsonForm:
    """Return the form of a field's JSON."""
    return FIELDS.get(name_of(field), _AS_ALL)


# --------------------------------------------------------------------------------- reading


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


def members_of(message: Any) -> dict[str, Any]:
    """Return the JSON object that has a message's fields, as ``json_form`` says."""
    members = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        form, value = json_form(field), getattr(message, field.name)
        if is_map(field):
            each = field.message_type.fields_by_name["value"]
            value = {str(key): _value(each, value[key], form, str(key)) for key in sorted(value)}
            value = [*value.values()] if form.is_list else value
        elif field.is_repeated:
            value = [_value(field, each, form) for each in value]
        else:
            value = _value(field, value, form)
        if value or not form.omits_default:
            members[form.member or field.name] = value
    return members


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


# --------------------------------------------------------------------------------- writing

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
