"""The methods of gRPC that the gateway knows, and their operations.

Paths are those of PROTOCOL-HTTP2.md, section "Requests": ``/`` service ``/`` method; case counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gateway.protocol.operations import Operation, OperationKind, quote_name


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """A method; ``kind`` is that of the same operation over HTTP.

    ``name_fields`` and ``version_field`` are the field numbers of the model in a request: none if
    it names no model. Of several fields the first that is not empty counts.
    """

    service: str
    name: str
    kind: OperationKind
    request_streams: bool = False
    response_streams: bool = False
    name_fields: tuple[int, ...] = ()
    version_field: int | None = None

    @property
    def path(self) -> str:
        """Return the path of its calls."""
        return f"/{self.service}/{self.name}"

    @property
    def is_reflection(self) -> bool:
        """Tell whether it is server reflection, which the gateway serves itself."""
        return self.service in REFLECTION_SERVICES and self.name == REFLECTION_METHOD


INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
TORCHSERVE_SERVICE: Final = "org.pytorch.serve.grpc.openinference.GRPCInferenceService"
"""TorchServe serves the first six methods, under another package name."""
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
REFLECTION_SERVICES: Final = (
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)
REFLECTION_METHOD: Final = "ServerReflectionInfo"


_MODEL: Final = (1,)
_LOADED: Final = (2, 1)
"""Triton's loads have repository_name = 1 and model_name = 2, KServe's have model_name = 1: field 2
is the model if it is present, else field 1 is. Triton's clients leave the repository out."""

_INFERENCE: Final[tuple[tuple[str, OperationKind, tuple[int, ...]], ...]] = (
    ("ServerLive", OperationKind.LIVENESS, ()),
    ("ServerReady", OperationKind.READINESS, ()),
    ("ModelReady", OperationKind.HEALTH, _MODEL),
    ("ServerMetadata", OperationKind.SERVER_METADATA, ()),
    ("ModelMetadata", OperationKind.MODEL_METADATA, _MODEL),
    ("ModelInfer", OperationKind.INFER, _MODEL),
    # Its messages are infer requests: whoever denies these must deny it, too.
    ("ModelStreamInfer", OperationKind.INFER, _MODEL),
    ("ModelConfig", OperationKind.CONFIG, _MODEL),
    ("ModelStatistics", OperationKind.STATISTICS, _MODEL),
    ("RepositoryIndex", OperationKind.INDEX, ()),
    ("RepositoryModelLoad", OperationKind.LOAD, _LOADED),
    ("RepositoryModelUnload", OperationKind.LOAD, _LOADED),
    ("SystemSharedMemoryStatus", OperationKind.SHARED_MEMORY, ()),
    ("SystemSharedMemoryRegister", OperationKind.SHARED_MEMORY, ()),
    ("SystemSharedMemoryUnregister", OperationKind.SHARED_MEMORY, ()),
    ("CudaSharedMemoryStatus", OperationKind.SHARED_MEMORY, ()),
    ("CudaSharedMemoryRegister", OperationKind.SHARED_MEMORY, ()),
    ("CudaSharedMemoryUnregister", OperationKind.SHARED_MEMORY, ()),
    ("TraceSetting", OperationKind.TRACE_SETTING, (2,)),
    ("LogSettings", OperationKind.LOGGING, ()),
)
"""Triton's methods, of which other servers have some, and the fields of the model's name."""


def _inference_method(
    service: str, name: str, kind: OperationKind, name_fields: tuple[int, ...]
) -> GrpcMethod:
    streams = name == "ModelStreamInfer"
    version_field = 2 if name_fields == _MODEL else None
    return GrpcMethod(service, name, kind, streams, streams, name_fields, version_field)


_METHODS: Final = (
    *(
        _inference_method(service, *each)
        for service in (INFERENCE_SERVICE, TORCHSERVE_SERVICE)
        for each in _INFERENCE
    ),
    # Triton answers SERVING if it is ready.
    GrpcMethod(HEALTH_SERVICE, "Check", OperationKind.READINESS),
    GrpcMethod(HEALTH_SERVICE, "Watch", OperationKind.READINESS, response_streams=True),
    *(
        GrpcMethod(service, REFLECTION_METHOD, OperationKind.OTHER, True, True)
        for service in REFLECTION_SERVICES
    ),
)

METHODS: Final[Mapping[str, GrpcMethod]] = MappingProxyType(
    {method.path: method for method in _METHODS}
)
"""The known methods by path."""


def find_method(path: str) -> GrpcMethod:
    """Return the method of a path; an unknown one is OTHER, and may stream both ways."""
    method = METHODS.get(path)
    if method is None:
        service, _, name = path.removeprefix("/").rpartition("/")
        method = GrpcMethod(service, name, OperationKind.OTHER, True, True)
    return method


def operation_of(method: GrpcMethod, model: str = "", version: str = "") -> Operation:
    """Return the operation of a method for a model as its request names it, empty for none.

    The names are quoted, as those of ``parse_operation`` are; ``decode_names`` gives what routes
    match.
    """
    kind = method.kind
    if kind is OperationKind.STATISTICS and not model:
        kind = OperationKind.ALL_STATISTICS
    return Operation(kind, quote_name(model) or None, quote_name(version) or None)
