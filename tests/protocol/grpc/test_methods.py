"""The methods of gRPC, beside the same operations over HTTP."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.grpc.descriptors import POOL
from gateway.protocol.grpc.methods import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    REFLECTION_METHOD,
    REFLECTION_SERVICES,
    TORCHSERVE_SERVICE,
    GrpcMethod,
    find_method,
    operation_of,
)
from gateway.protocol.grpc.rpcs import RPCS, HttpRequest, http_request_of
from gateway.protocol.operations import (
    Operation,
    OperationKind,
    decode_names,
    parse_operation,
    parse_operation_variants,
)
from tests.support.scale import scaled

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


NAMES_OF_OTHERS = (OperationKind.SHARED_MEMORY, OperationKind.INDEX)
"""The requests of these operations have the names of regions and repositories."""


@pytest.mark.parametrize("service", [INFERENCE_SERVICE, TORCHSERVE_SERVICE])
@pytest.mark.parametrize("name", [*sorted(RPCS), "ModelInfer", "ModelStreamInfer"])
def test_inference_method_is_the_operation_that_it_is_over_http(name: str, service: str) -> None:
    method = find_method(f"/{service}/{name}")
    assert (method.service, method.name) == (service, name)
    is_stream = name == "ModelStreamInfer"
    assert (method.request_streams, method.response_streams) == (is_stream, is_stream)
    http = HttpRequest("POST", "/v2/models/m/infer")
    if name in RPCS:
        http = http_request_of(name, {"name": "m", "model_name": "m"}, {"setting": "1"})
    expected = parse_operation(http.method, http.target)
    assert operation_of(method, "m" if method.name_fields else "") == expected
    descriptor = POOL.FindMethodByName(f"{INFERENCE_SERVICE}.{name}").input_type
    numbers = {field.name: field.number for field in descriptor.fields}
    names = [numbers.get(each) for each in ("model_name", "repository_name", "name")]
    is_model = expected.kind not in NAMES_OF_OTHERS
    assert method.name_fields == (tuple(filter(None, names)) if is_model else ())
    assert method.version_field == numbers.get("version", numbers.get("model_version"))


@pytest.mark.parametrize(
    ("service", "name", "kind", "streams"),
    [
        (HEALTH_SERVICE, "Check", OperationKind.READINESS, (False, False)),
        (HEALTH_SERVICE, "Watch", OperationKind.READINESS, (False, True)),
        (REFLECTION_SERVICES[0], REFLECTION_METHOD, OperationKind.OTHER, (True, True)),
        # What is not known may stream both ways.
        (INFERENCE_SERVICE, "Other", OperationKind.OTHER, (True, True)),
        (INFERENCE_SERVICE.lower(), "ModelInfer", OperationKind.OTHER, (True, True)),
        (f"{INFERENCE_SERVICE}/ModelInfer", "", OperationKind.OTHER, (True, True)),
        ("", "", OperationKind.OTHER, (True, True)),
    ],
)
def test_other_method_has_its_kind(
    service: str, name: str, kind: OperationKind, streams: tuple[bool, bool]
) -> None:
    assert find_method(f"/{service}/{name}") == GrpcMethod(service, name, kind, *streams)


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
