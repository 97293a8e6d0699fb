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


def _inference_methods(service: str) -> tuple[GrpcMethod, ...]:
    """Return Triton's methods; other servers have some of them.

    Triton's load and unload have repository_name = 1 and model_name = 2, KServe's have
    model_name = 1: field 2 is the model if it is present, else field 1 is. Triton's clients leave
    the repository out.
    """

    def model_method(name: str, kind: OperationKind) -> GrpcMethod:
        return GrpcMethod(service, name, kind, name_fields=(1,), version_field=2)

    def load(name: str) -> GrpcMethod:
        return GrpcMethod(service, name, OperationKind.LOAD, name_fields=(2, 1))

    def shared_memory(name: str) -> GrpcMethod:
        return GrpcMethod(service, name, OperationKind.SHARED_MEMORY)

    return (
        GrpcMethod(service, "ServerLive", OperationKind.LIVENESS),
        GrpcMethod(service, "ServerReady", OperationKind.READINESS),
        model_method("ModelReady", OperationKind.HEALTH),
        GrpcMethod(service, "ServerMetadata", OperationKind.SERVER_METADATA),
        model_method("ModelMetadata", OperationKind.MODEL_METADATA),
        model_method("ModelInfer", OperationKind.INFER),
        # Its messages are infer requests: whoever denies these must deny it, too.
        GrpcMethod(service, "ModelStreamInfer", OperationKind.INFER, True, True, (1,), 2),
        model_method("ModelConfig", OperationKind.CONFIG),
        model_method("ModelStatistics", OperationKind.STATISTICS),
        GrpcMethod(service, "RepositoryIndex", OperationKind.INDEX),
        load("RepositoryModelLoad"),
        load("RepositoryModelUnload"),
        shared_memory("SystemSharedMemoryStatus"),
        shared_memory("SystemSharedMemoryRegister"),
        shared_memory("SystemSharedMemoryUnregister"),
        shared_memory("CudaSharedMemoryStatus"),
        shared_memory("CudaSharedMemoryRegister"),
        shared_memory("CudaSharedMemoryUnregister"),
        GrpcMethod(service, "TraceSetting", OperationKind.TRACE_SETTING, name_fields=(2,)),
        GrpcMethod(service, "LogSettings", OperationKind.LOGGING),
    )


_METHODS: Final = (
    *_inference_methods(INFERENCE_SERVICE),
    *_inference_methods(TORCHSERVE_SERVICE),
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
