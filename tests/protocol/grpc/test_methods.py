"""The methods of gRPC, beside the same operations over HTTP."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.grpc import fields
from gateway.protocol.grpc.methods import (
    INFERENCE_SERVICE,
    TORCHSERVE_SERVICE,
    GrpcMethod,
    find_method,
    operation_of,
)
from gateway.protocol.operations import (
    Operation,
    OperationKind,
    decode_names,
    parse_operation,
    parse_operation_variants,
)
from tests.support.scale import scaled

NONE: tuple[tuple[int, ...], int | None] = ((), None)
NAMED = ((1,), 2)

# Method, the same over HTTP, and the field numbers of name and version in Triton's
# grpc_service.proto.
INFERENCE = [
    ("ServerLive", "GET", "/v2/health/live", NONE),
    ("ServerReady", "GET", "/v2/health/ready", NONE),
    ("ModelReady", "GET", "/v2/models/m/ready", NAMED),
    ("ServerMetadata", "GET", "/v2", NONE),
    ("ModelMetadata", "GET", "/v2/models/m", NAMED),
    ("ModelInfer", "POST", "/v2/models/m/infer", NAMED),
    ("ModelStreamInfer", "POST", "/v2/models/m/infer", NAMED),
    ("ModelConfig", "GET", "/v2/models/m/config", NAMED),
    ("ModelStatistics", "GET", "/v2/models/m/stats", NAMED),
    ("RepositoryIndex", "POST", "/v2/repository/index", NONE),
    ("RepositoryModelLoad", "POST", "/v2/repository/models/m/load", ((2, 1), None)),
    ("RepositoryModelUnload", "POST", "/v2/repository/models/m/unload", ((2, 1), None)),
    ("SystemSharedMemoryStatus", "GET", "/v2/systemsharedmemory/status", NONE),
    ("SystemSharedMemoryRegister", "POST", "/v2/systemsharedmemory/region/r/register", NONE),
    ("SystemSharedMemoryUnregister", "POST", "/v2/systemsharedmemory/unregister", NONE),
    ("CudaSharedMemoryStatus", "GET", "/v2/cudasharedmemory/status", NONE),
    ("CudaSharedMemoryRegister", "POST", "/v2/cudasharedmemory/region/r/register", NONE),
    ("CudaSharedMemoryUnregister", "POST", "/v2/cudasharedmemory/unregister", NONE),
    ("TraceSetting", "POST", "/v2/models/m/trace/setting", ((2,), None)),
    ("LogSettings", "POST", "/v2/logging", NONE),
]
OTHERS = [
    ("grpc.health.v1.Health", "Check", OperationKind.READINESS, (False, False)),
    ("grpc.health.v1.Health", "Watch", OperationKind.READINESS, (False, True)),
    *(
        (service, "ServerReflectionInfo", OperationKind.OTHER, (True, True))
        for service in (
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        )
    ),
]

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@pytest.mark.parametrize(("name", "http_method", "http_path", "numbers"), INFERENCE)
def test_inference_method_is_the_operation_that_it_is_over_http(
    name: str, http_method: str, http_path: str, numbers: tuple[tuple[int, ...], int | None]
) -> None:
    for service in (INFERENCE_SERVICE, TORCHSERVE_SERVICE):
        method = find_method(f"/{service}/{name}")
        assert (method.service, method.name) == (service, name)
        assert (method.name_fields, method.version_field) == numbers
        is_stream = name == "ModelStreamInfer"
        assert (method.request_streams, method.response_streams) == (is_stream, is_stream)
        model = "m" if numbers[0] else ""
        assert operation_of(method, model) == parse_operation(http_method, http_path)


def test_method_of_another_service_has_its_kind() -> None:
    for service, name, kind, streams in OTHERS:
        assert find_method(f"/{service}/{name}") == GrpcMethod(service, name, kind, *streams)


def test_fields_of_an_infer_request_are_those_of_the_proto_file() -> None:
    method = find_method("/inference.GRPCInferenceService/ModelInfer")
    assert method.name_fields == (fields.MODEL_NAME >> 3,)
    assert method.version_field == fields.MODEL_VERSION >> 3


@pytest.mark.parametrize(
    ("path", "service", "name"),
    [
        ("/inference.GRPCInferenceService/Other", "inference.GRPCInferenceService", "Other"),
        (
            "/inference.grpcinferenceservice/ModelInfer",
            "inference.grpcinferenceservice",
            "ModelInfer",
        ),
        ("/inference.GRPCInferenceService/ModelInfer/", "*", ""),
        ("", "", ""),
    ],
)
def test_unknown_method_is_other_and_may_stream_both_ways(
    path: str, service: str, name: str
) -> None:
    service = service.replace("*", "inference.GRPCInferenceService/ModelInfer")
    assert find_method(path) == GrpcMethod(service, name, OperationKind.OTHER, True, True)


@pytest.mark.parametrize(
    ("model", "quoted"),
    [
        ("a/b", "a%2Fb"),
        ("a%2Fb", "a%252Fb"),
        ("a b?c#ö", "a%20b%3Fc%23%C3%B6"),
        # Triton does not decode: what a segment may have must stay.
        ("ns:a@b+c,d;e=f!(g)*'$&~-._", "ns:a@b+c,d;e=f!(g)*'$&~-._"),
    ],
)
def test_name_of_a_model_is_quoted_for_paths(model: str, quoted: str) -> None:
    method = find_method("/inference.GRPCInferenceService/ModelInfer")
    assert operation_of(method, model, model) == Operation(OperationKind.INFER, quoted, quoted)


@settings(max_examples=scaled(300))
@given(NAMES, NAMES)
def test_operation_is_that_of_a_path_with_the_quoted_names(model: str, version: str) -> None:
    method = find_method("/inference.GRPCInferenceService/ModelInfer")
    operation = operation_of(method, model, version)
    assert decode_names(operation) == Operation(OperationKind.INFER, model, version)
    path = f"/v2/models/{operation.model}/versions/{operation.version}/infer"
    assert path.isascii()
    assert parse_operation("POST", path) == operation
    assert parse_operation_variants("POST", path)[0] == decode_names(operation)
