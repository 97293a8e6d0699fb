"""The RPCs beside inference, with their messages; inference.proto has them, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gateway.protocol.grpc.model_config import MODEL_CONFIG
from gateway.protocol.grpc.schema import (
    Field,
    Form,
    Message,
    Scalar,
    choice,
    many,
    mapped,
)

_BOOL, _TEXT, _INT64, _UINT64 = Scalar.BOOL, Scalar.TEXT, Scalar.INT64, Scalar.UINT64


@dataclass(frozen=True, slots=True, eq=False)
class Rpc:
    """A method of ``inference.GRPCInferenceService``."""

    name: str
    request: Message
    response: Message


def _path(number: int, name: str) -> Field:
    return Field(number, name, _TEXT, in_path=True)


def _of_model(rpc: str) -> Message:
    return Message(f"{rpc}Request", (_path(1, "name"), _path(2, "version")))


def _of_region(rpc: str) -> Message:
    return Message(f"{rpc}Request", (_path(1, "name"),))


# ---------------------------------------------------------------------- health and metadata

_INFER_PARAMETER = Message(
    "InferParameter",
    choice(
        Field(1, "bool_param", _BOOL),
        Field(2, "int64_param", _INT64),
        Field(3, "string_param", _TEXT),
        Field(4, "double_param", Scalar.DOUBLE),
        Field(5, "uint64_param", _UINT64),
    ),
    Form.CHOICE,
)


def _metadata_parameters(number: int) -> Field:
    """Only MLServer's metadata has them."""
    return Field(number, "parameters", _INFER_PARAMETER, key=_TEXT, omit_default=True)


_TENSOR_METADATA = Message(
    "ModelMetadataResponse.TensorMetadata",
    (
        Field(1, "name", _TEXT),
        Field(2, "datatype", _TEXT),
        many(3, "shape", _INT64),
        _metadata_parameters(4),
    ),
)
_MODEL_METADATA = Message(
    "ModelMetadataResponse",
    (
        Field(1, "name", _TEXT),
        many(2, "versions", _TEXT),
        Field(3, "platform", _TEXT),
        many(4, "inputs", _TENSOR_METADATA),
        many(5, "outputs", _TENSOR_METADATA),
        _metadata_parameters(6),
    ),
)
_SERVER_METADATA = Message(
    "ServerMetadataResponse",
    (Field(1, "name", _TEXT), Field(2, "version", _TEXT), many(3, "extensions", _TEXT)),
)

# ------------------------------------------------------------------------------ statistics

_DURATION = Message("StatisticDuration", (Field(1, "count", _UINT64), Field(2, "ns", _UINT64)))


def _durations(*names: str, first: int = 1) -> tuple[Field, ...]:
    return tuple(Field(number, name, _DURATION) for number, name in enumerate(names, first))


_INFER_STATISTICS = Message(
    "InferStatistics",
    _durations(
        *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
        *("cache_hit", "cache_miss"),
    ),
)
_RESPONSE_STATISTICS = Message(
    "InferResponseStatistics",
    _durations("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"),
)
_BATCH_STATISTICS = Message(
    "InferBatchStatistics",
    (
        Field(1, "batch_size", _UINT64),
        *_durations("compute_input", "compute_infer", "compute_output", first=2),
    ),
)
_MEMORY_USAGE = Message(
    "MemoryUsage",
    (Field(1, "type", _TEXT), Field(2, "id", _INT64), Field(3, "byte_size", _UINT64)),
)
_MODEL_STATISTICS = Message(
    "ModelStatistics",
    (
        Field(1, "name", _TEXT),
        Field(2, "version", _TEXT),
        Field(3, "last_inference", _UINT64),
        Field(4, "inference_count", _UINT64),
        Field(5, "execution_count", _UINT64),
        Field(6, "inference_stats", _INFER_STATISTICS),
        mapped(9, "response_stats", _RESPONSE_STATISTICS),
        many(7, "batch_stats", _BATCH_STATISTICS),
        many(8, "memory_usage", _MEMORY_USAGE),
    ),
)

# ------------------------------------------------------------------------------ repository

_REPOSITORY_PARAMETER = Message(
    "ModelRepositoryParameter",
    choice(
        Field(1, "bool_param", _BOOL),
        Field(2, "int64_param", _INT64),
        Field(3, "string_param", _TEXT),
        Field(4, "bytes_param", Scalar.BYTES),
    ),
    Form.CHOICE,
)
_INDEX_REQUEST = Message(
    "RepositoryIndexRequest", (_path(1, "repository_name"), Field(2, "ready", _BOOL))
)
_MODEL_INDEX = Message(
    "RepositoryIndexResponse.ModelIndex",
    (
        Field(1, "name", _TEXT),
        # Triton's JSON has only what is known.
        Field(2, "version", _TEXT, omit_default=True),
        # MLServer's is State.READY over gRPC, READY over HTTP.
        Field(3, "state", _TEXT, omit_default=True, drop_prefix="State."),
        Field(4, "reason", _TEXT, omit_default=True),
    ),
)
_INDEX_RESPONSE = Message("RepositoryIndexResponse", (many(1, "models", _MODEL_INDEX),), Form.BODY)


def _load_request(rpc: str) -> Message:
    return Message(
        f"{rpc}Request",
        (
            _path(1, "repository_name"),
            _path(2, "model_name"),
            Field(3, "parameters", _REPOSITORY_PARAMETER, key=_TEXT, omit_default=True),
        ),
    )


def _kserve_request(rpc: str) -> Message:
    return Message(f"{rpc}Request", (_path(1, "model_name"),))


def _load_response(rpc: str, done: str, member: str) -> Message:
    """KServe's response; that of other servers is empty, in both forms."""
    name = Field(1, "model_name", _TEXT, json_name="name", omit_default=True)
    result = Field(2, done, _BOOL, json_name=member, omit_default=True)
    return Message(f"{rpc}Response", (name, result))


_LOAD, _UNLOAD = "RepositoryModelLoad", "RepositoryModelUnload"
_LOAD_RESPONSE = _load_response(_LOAD, "isLoaded", "load")
_UNLOAD_RESPONSE = _load_response(_UNLOAD, "isUnloaded", "unload")

# --------------------------------------------------------------------------- shared memory

_SYSTEM_REGION = Message(
    "SystemSharedMemoryStatusResponse.RegionStatus",
    (
        Field(1, "name", _TEXT),
        Field(2, "key", _TEXT),
        Field(3, "offset", _UINT64),
        Field(4, "byte_size", _UINT64),
    ),
)
_CUDA_REGION = Message(
    "CudaSharedMemoryStatusResponse.RegionStatus",
    (Field(1, "name", _TEXT), Field(2, "device_id", _UINT64), Field(3, "byte_size", _UINT64)),
)


def _regions(rpc: str, region: Message) -> Message:
    return Message(f"{rpc}Response", (mapped(1, "regions", region, is_list=True),), Form.BODY)


_SYSTEM_REGISTER = Message(
    "SystemSharedMemoryRegisterRequest",
    (
        _path(1, "name"),
        Field(2, "key", _TEXT),
        Field(3, "offset", _UINT64),
        Field(4, "byte_size", _UINT64),
    ),
)
_CUDA_REGISTER = Message(
    "CudaSharedMemoryRegisterRequest",
    (
        _path(1, "name"),
        Field(2, "raw_handle", Scalar.HANDLE),
        Field(3, "device_id", _INT64),
        Field(4, "byte_size", _UINT64),
    ),
)

# -------------------------------------------------------------------------------- settings


def _trace(message: str, *more: Field) -> Message:
    value = Message(f"{message}.SettingValue", (many(1, "value", _TEXT),), Form.STRINGS)
    return Message(message, (mapped(1, "settings", value), *more), Form.BODY)


def _log(message: str) -> Message:
    value = Message(
        f"{message}.SettingValue",
        choice(
            Field(1, "bool_param", _BOOL),
            Field(2, "uint32_param", Scalar.UINT32),
            Field(3, "string_param", _TEXT),
        ),
        Form.CHOICE,
    )
    return Message(message, (mapped(1, "settings", value),), Form.BODY)


# ------------------------------------------------------------------------------------ RPCs


def _rpc(
    name: str, request: Message | None = None, response: Message | None = None
) -> tuple[str, Rpc]:
    request = request or Message(f"{name}Request")
    return name, Rpc(name, request, response or Message(f"{name}Response"))


def _ready(rpc: str, field: str) -> Message:
    return Message(f"{rpc}Response", (Field(1, field, _BOOL),))


def _wrapped(rpc: str, field: Field, form: Form = Form.BODY) -> Message:
    return Message(f"{rpc}Response", (field,), form)


_SYSTEM, _CUDA = "SystemSharedMemory", "CudaSharedMemory"

RPCS: Final[Mapping[str, Rpc]] = MappingProxyType(
    dict(
        (
            _rpc("ServerLive", None, _ready("ServerLive", "live")),
            _rpc("ServerReady", None, _ready("ServerReady", "ready")),
            _rpc("ModelReady", _of_model("ModelReady"), _ready("ModelReady", "ready")),
            _rpc("ServerMetadata", None, _SERVER_METADATA),
            _rpc("ModelMetadata", _of_model("ModelMetadata"), _MODEL_METADATA),
            _rpc(
                "ModelConfig",
                _of_model("ModelConfig"),
                _wrapped("ModelConfig", Field(1, "config", MODEL_CONFIG)),
            ),
            _rpc(
                "ModelStatistics",
                _of_model("ModelStatistics"),
                _wrapped("ModelStatistics", many(1, "model_stats", _MODEL_STATISTICS), Form.OBJECT),
            ),
            _rpc("RepositoryIndex", _INDEX_REQUEST, _INDEX_RESPONSE),
            _rpc(_LOAD, _load_request(_LOAD), _LOAD_RESPONSE),
            _rpc(_UNLOAD, _load_request(_UNLOAD), _UNLOAD_RESPONSE),
            _rpc(
                f"{_SYSTEM}Status",
                _of_region(f"{_SYSTEM}Status"),
                _regions(f"{_SYSTEM}Status", _SYSTEM_REGION),
            ),
            _rpc(f"{_SYSTEM}Register", _SYSTEM_REGISTER),
            _rpc(f"{_SYSTEM}Unregister", _of_region(f"{_SYSTEM}Unregister")),
            _rpc(
                f"{_CUDA}Status",
                _of_region(f"{_CUDA}Status"),
                _regions(f"{_CUDA}Status", _CUDA_REGION),
            ),
            _rpc(f"{_CUDA}Register", _CUDA_REGISTER),
            _rpc(f"{_CUDA}Unregister", _of_region(f"{_CUDA}Unregister")),
            _rpc(
                "TraceSetting",
                _trace("TraceSettingRequest", _path(2, "model_name")),
                _trace("TraceSettingResponse"),
            ),
            _rpc("LogSettings", _log("LogSettingsRequest"), _log("LogSettingsResponse")),
        )
    )
)
"""The RPCs by name, as Triton and MLServer have them. KServe's clients are understood, too."""

KSERVE_RPCS: Final[Mapping[str, Rpc]] = MappingProxyType(
    {
        **RPCS,
        _LOAD: Rpc(_LOAD, _kserve_request(_LOAD), _LOAD_RESPONSE),
        _UNLOAD: Rpc(_UNLOAD, _kserve_request(_UNLOAD), _UNLOAD_RESPONSE),
    }
)
"""The RPCs as KServe's server has them: its loads have other field numbers."""
