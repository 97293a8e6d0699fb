"""Random messages of the official runtime, and their JSON made from the runtime's own view."""

from __future__ import annotations

import base64
import math
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal.type_checkers import ToShortestFloat
from hypothesis import strategies as st

from gateway.protocol.grpc.rpcs import RPCS
from tests.support.grpc.proto_file import message_class

INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
CHOICES = (
    *("InferParameter", "ModelRepositoryParameter"),
    *("LogSettingsRequest.SettingValue", "LogSettingsResponse.SettingValue"),
)
TRACE_VALUES = ("TraceSettingRequest.SettingValue", "TraceSettingResponse.SettingValue")
AS_TEXT = {
    "ModelSequenceBatching.InitialState": "dims",
    "ModelOptimizationPolicy.Cuda.GraphSpec.Shape": "dim",
    "ModelInstanceGroup.SecondaryDevice": "device_id",
}
OMITTED = {
    "ModelMetadataResponse": ("parameters",),
    "ModelMetadataResponse.TensorMetadata": ("parameters",),
    "RepositoryIndexResponse.ModelIndex": ("version", "state", "reason"),
    "RepositoryModelLoadRequest": ("parameters",),
    "RepositoryModelUnloadRequest": ("parameters",),
    "RepositoryModelLoadResponse": ("model_name", "isLoaded"),
    "RepositoryModelUnloadResponse": ("model_name", "isUnloaded"),
    "ModelEnsembling": ("max_inflight_requests",),
}
RENAMED = {
    ("RepositoryModelLoadResponse", "model_name"): "name",
    ("RepositoryModelLoadResponse", "isLoaded"): "load",
    ("RepositoryModelUnloadResponse", "model_name"): "name",
    ("RepositoryModelUnloadResponse", "isUnloaded"): "unload",
}
BODIES = {
    "ModelConfigResponse": "config",
    "RepositoryIndexResponse": "models",
    "SystemSharedMemoryStatusResponse": "regions",
    "CudaSharedMemoryStatusResponse": "regions",
    "TraceSettingRequest": "settings",
    "TraceSettingResponse": "settings",
    "LogSettingsRequest": "settings",
    "LogSettingsResponse": "settings",
}
PATHS = {
    **{
        f"{rpc}Request": ("name", "version")
        for rpc in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
    },
    **{
        f"{memory}SharedMemory{rpc}Request": ("name",)
        for memory in ("System", "Cuda")
        for rpc in ("Status", "Register", "Unregister")
    },
    "RepositoryIndexRequest": ("repository_name",),
    "RepositoryModelLoadRequest": ("repository_name", "model_name"),
    "RepositoryModelUnloadRequest": ("repository_name", "model_name"),
    "TraceSettingRequest": ("model_name",),
}

_TEXT = st.text(max_size=4)
_KEYS = st.sampled_from(["a", "é", "", "trace_level", "file:1/m", "name"])


def _scalar(field: Any) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return _TEXT
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=4)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.one_of(
            st.integers(0, len(field.enum_type.values) - 1), st.integers(-2, 2**31 - 1)
        )
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return st.floats(width=32, allow_nan=False)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return st.floats(allow_nan=False)
    low, high = INTEGERS[field.type]
    if field.name == "uint64_param":
        low = 2**63  # smaller ones are written as int64_param
    return st.one_of(st.integers(low, high), st.integers(max(low, 0), max(low, 3)))


@st.composite
def _fill(draw: st.DrawFn, message: Any) -> None:
    chosen = {oneof.name: draw(st.sampled_from(list(oneof.fields))) for oneof in oneofs(message)}
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if (oneof is not None and chosen[oneof.name] is not field) or not draw(st.booleans()):
            continue
        if is_map(field):
            draw(_fill_map(message, field))
        elif field.is_repeated:
            for _ in range(draw(st.integers(1, 2))):
                if field.message_type is not None:
                    draw(_fill(getattr(message, field.name).add()))
                else:
                    getattr(message, field.name).append(draw(_scalar(field)))
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            draw(_fill(part))
        else:
            setattr(message, field.name, draw(_scalar(field)))


@st.composite
def _fill_map(draw: st.DrawFn, message: Any, field: Any) -> None:
    entries = getattr(message, field.name)
    value = field.message_type.fields_by_name["value"]
    key = field.message_type.fields_by_name["key"]
    is_text = key.type == FieldDescriptor.TYPE_STRING
    keys: st.SearchStrategy[Any] = _KEYS if is_text else st.integers(0, 2**64 - 1)
    for each in draw(st.lists(keys, max_size=2, unique=True)):
        if value.message_type is None:
            entries[each] = draw(_scalar(value))
            continue
        entries[each].SetInParent()
        draw(_fill(entries[each]))
        if field.name == "regions":
            entries[each].name = each
        if name_of(value.message_type) == "ModelRepositoryParameter" and (
            entries[each].WhichOneof("parameter_choice") == "bytes_param"
        ) != each.startswith("file:"):
            del entries[each]


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, Any]:
    """Generate a message: a request or a response of one of the RPCs."""
    rpc = draw(st.sampled_from(sorted(RPCS)))
    name = f"{rpc}{draw(st.sampled_from(['Request', 'Response']))}"
    message = message_class(name)()
    draw(_fill(message))
    return rpc, message


# ---------------------------------------------------------------------------------- the JSON


def document_of(message: Any, key: str = "") -> Any:
    """Return the JSON of a message."""
    name = name_of(message.DESCRIPTOR)
    if name in CHOICES:
        chosen = message.WhichOneof("parameter_choice")
        return (
            None if chosen is None else _value(message, message.DESCRIPTOR.fields_by_name[chosen])
        )
    if name in TRACE_VALUES:
        values = list(message.value)
        return (
            values if len(values) > 1 or (values and key == "trace_level") else [*values, None][0]
        )
    if name in BODIES:
        field = message.DESCRIPTOR.fields_by_name[BODIES[name]]
        is_missing = field.has_presence and not message.HasField(field.name)
        return {} if is_missing else _value(message, field)
    members = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = _value(message, field)
        if field.name in PATHS.get(name, ()):
            continue
        if field.name in OMITTED.get(name, ()) and not value:
            continue
        if name == "RepositoryIndexResponse.ModelIndex" and field.name == "state":
            value = value.removeprefix("State.")
        members[RENAMED.get((name, field.name), field.name)] = value
    return members


def path_of(message: Any) -> dict[str, str]:
    """Return the names in the path of a request."""
    return {name: getattr(message, name) for name in PATHS.get(name_of(message.DESCRIPTOR), ())}


def _value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if is_map(field):
        value_field = field.message_type.fields_by_name["value"]
        found = {
            str(key): document_of(each, str(key)) if value_field.message_type is not None else each
            for key, each in value.items()
        }
        return [found[key] for key in sorted(found)] if field.name == "regions" else found
    if field.is_repeated:
        return [_one(message, field, each) for each in value]
    return _one(message, field, value)


def _one(message: Any, field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return document_of(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.type == FieldDescriptor.TYPE_BYTES:
        text = base64.b64encode(value).decode()
        return {"b64": text} if field.name == "raw_handle" else text
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        if not math.isfinite(value):
            return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
        return ToShortestFloat(value) if field.type == FieldDescriptor.TYPE_FLOAT else value
    if AS_TEXT.get(name_of(message.DESCRIPTOR)) == field.name:
        return str(value)
    return value


def name_of(descriptor: Any) -> str:
    return str(descriptor.full_name).removeprefix("inference.")


def oneofs(message: Any) -> list[Any]:
    return list(message.DESCRIPTOR.oneofs)


def is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)
