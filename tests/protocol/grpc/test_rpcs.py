"""Each RPC beside inference has a request over HTTP, and each such request leads back to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.methods import INFERENCE_SERVICE, METHODS
from gateway.protocol.grpc.rpcs import RPCS, HttpRequest, RpcRequest, http_request_of, rpc_of
from gateway.protocol.operations import OperationKind

MODEL = {"name": "a/b c", "version": "2"}
OF_R = {"repository_name": "r", "model_name": "m"}
REGION = {"name": "r"}
BODY = {"key": "/k"}

REQUESTS: list[tuple[str, dict[str, str], Any, str]] = [
    ("ServerLive", {}, {}, "GET /v2/health/live"),
    ("ServerMetadata", {}, {}, "GET /v2"),
    ("ModelReady", MODEL, {}, "GET /v2/models/a%2Fb%20c/versions/2/ready"),
    ("ModelConfig", {"name": "m", "version": ""}, {}, "GET /v2/models/m/config"),
    ("ModelStatistics", {"name": "", "version": ""}, {}, "GET /v2/models/stats"),
    ("ModelStatistics", MODEL, {}, "GET /v2/models/a%2Fb%20c/versions/2/stats"),
    ("RepositoryIndex", {"repository_name": ""}, {"ready": True}, "POST /v2/repository/index {}"),
    ("RepositoryIndex", {"repository_name": "r"}, {}, "POST /v2/repository/r/index {}"),
    ("RepositoryModelUnload", OF_R, {}, "POST /v2/repository/r/models/m/unload {}"),
    ("TraceSetting", {"model_name": ""}, {}, "GET /v2/trace/setting"),
    ("TraceSetting", {"model_name": "m"}, {"a": "1"}, "POST /v2/models/m/trace/setting {}"),
    ("LogSettings", {}, {}, "GET /v2/logging"),
    ("LogSettings", {}, {"log_info": True}, "POST /v2/logging {}"),
    ("SystemSharedMemoryStatus", {"name": ""}, {}, "GET /v2/systemsharedmemory/status"),
    ("CudaSharedMemoryRegister", REGION, BODY, "POST /v2/cudasharedmemory/region/r/register {}"),
    ("CudaSharedMemoryUnregister", REGION, {}, "POST /v2/cudasharedmemory/region/r/unregister"),
    ("CudaSharedMemoryStatus", REGION, {}, "GET /v2/cudasharedmemory/region/r/status"),
]
"""RPCs, the names and the rest of their requests, and the requests over HTTP, {} for a body."""


@pytest.mark.parametrize(("rpc", "path", "body", "expected"), REQUESTS)
def test_rpc_has_a_request_over_http_that_leads_back_to_it(
    rpc: str, path: dict[str, str], body: Any, expected: str
) -> None:
    method, target, has_body = (*expected.split(" "), "")[:3]
    assert http_request_of(rpc, path, body) == HttpRequest(method, target, bool(has_body))
    found = rpc_of(method, target)
    assert found == RpcRequest(rpc, {key: value for key, value in path.items() if value})


def test_every_method_beside_inference_has_a_request_over_http() -> None:
    methods = [each for each in METHODS.values() if each.service == INFERENCE_SERVICE]
    assert {each.name for each in methods if each.kind is not OperationKind.INFER} == RPCS
    for rpc in RPCS:
        request = http_request_of(rpc, {"name": "m", "model_name": "m"}, {})
        found = rpc_of(request.method, request.target)
        assert found is not None
        assert found.rpc == rpc


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/v2/models/m?x=1", RpcRequest("ModelMetadata", {"name": "m"})),
        ("HEAD", "/v2/", RpcRequest("ServerMetadata", {})),
        ("GET", "/v2/models/m/trace", RpcRequest("TraceSetting", {"model_name": "m"})),
        ("POST", "/v2/trace", RpcRequest("TraceSetting", {})),
        ("POST", "/v2/models/m", None),
        ("GET", "/v2/models/m/generate", None),
        ("DELETE", "/v2/logging", None),
        ("GET", "/v1/models", None),
        ("GET", "/", None),
    ],
)
def test_request_over_http_has_an_rpc_or_none(
    method: str, target: str, expected: RpcRequest | None
) -> None:
    assert rpc_of(method, target) == expected


@given(name=st.text(min_size=1), version=st.text())
def test_any_name_survives_the_way_through_a_path(name: str, version: str) -> None:
    request = http_request_of("ModelReady", {"name": name, "version": version}, {})
    assert request.target.isascii()
    path = {"name": name, "version": version} if version else {"name": name}
    assert rpc_of(request.method, request.target) == RpcRequest("ModelReady", path)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v2/models/a%FFb", "name"),
        ("/v2/models/m/versions/a%FFb/ready", "version"),
        ("/v2/models/a%FFb/trace/setting", "model"),
        ("/v2/repository/a%FFb/index", "repository"),
    ],
)
def test_name_that_is_not_utf8_is_invalid(path: str, name: str) -> None:
    with pytest.raises(GatewayError, match=f'the {name} "a%FFb", which is not UTF-8') as caught:
        rpc_of("GET", path)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
