"""Where the JSON over HTTP is not simply that of the message over gRPC.

A message is an object with a member for each field, in the order of the .proto file. A member is
there even if its value is the default, as in Triton's responses, except messages and fields of a
``oneof`` that are not set. Integers are numbers. The tables here have the exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

PACKAGE: Final = "inference."

PATH_NAMES: Final = ("name", "version", "repository_name", "model_name")
"""Fields of requests that are part of the path over HTTP."""

BODIES: Final[Mapping[str, str]] = {
    "ModelConfigResponse": "config",
    "RepositoryIndexResponse": "models",
    "SystemSharedMemoryStatusResponse": "regions",
    "CudaSharedMemoryStatusResponse": "regions",
    "TraceSettingRequest": "settings",
    "TraceSettingResponse": "settings",
    "LogSettingsRequest": "settings",
    "LogSettingsResponse": "settings",
}
"""Messages whose JSON is the value of one field."""

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

FILE_PREFIX: Final = "file:"
"""Begins the parameters of a load whose values are files: bytes over gRPC, base64 over HTTP."""


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
