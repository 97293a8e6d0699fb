from __future__ import annotations

import pytest

from gateway.protocol.endpoints import Endpoint, EndpointKind, model_path, parse_endpoint

INFER = EndpointKind.INFER
TRACE = EndpointKind.TRACE_SETTING
METADATA = EndpointKind.SERVER_METADATA
LOAD = EndpointKind.LOAD


@pytest.mark.parametrize(
    ("method", "target", "endpoint"),
    [
        ("POST", "/v2/models/m/infer", Endpoint(INFER, "m")),
        ("POST", "/v2/models/m/infer?x=/y", Endpoint(INFER, "m")),
        ("POST", "/v2/models/m/versions/7/infer", Endpoint(INFER, "m", "7")),
        ("POST", "/v2/models/a%2Fb%20c/infer", Endpoint(INFER, "a%2Fb%20c")),
        ("POST", "/v2/models/infer/infer", Endpoint(INFER, "infer")),
        ("POST", "/v2/models/versions/versions/versions/infer", Endpoint(INFER, *["versions"] * 2)),
        ("GET", "/v2", Endpoint(METADATA)),
        ("GET", "/v2/", Endpoint(METADATA)),
        ("GET", "/v2?x", Endpoint(METADATA)),
        ("GET", "/v2/trace", Endpoint(TRACE)),
        ("POST", "/v2/trace", Endpoint(TRACE)),
        ("GET", "/v2/trace/setting", Endpoint(TRACE)),
        ("POST", "/v2/models/m/trace", Endpoint(TRACE, "m")),
        ("GET", "/v2/models/m/trace/setting", Endpoint(TRACE, "m")),
        ("GET", "/v2/models/m/versions/1/trace", Endpoint(TRACE, "m", "1")),
        ("POST", "/v2/models/m/versions/1/trace/setting", Endpoint(TRACE, "m", "1")),
        ("POST", "/v2/repository/models/m/load", Endpoint(LOAD, "m")),
        ("POST", "/v2/repository/models/m/unload", Endpoint(LOAD, "m")),
    ],
)
def test_endpoints_that_are_treated_in_a_way_of_their_own(
    method: str, target: str, endpoint: Endpoint
) -> None:
    assert parse_endpoint(method, target) == endpoint


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/v2/models/m/infer"),
        ("POST", "/v2/models/m/infer/"),
        ("POST", "/v2/models//infer"),
        ("POST", "/v2/models/a/b/infer"),
        ("POST", "/v2/models/m/versions//infer"),
        ("POST", "/v2/models/m/generate"),
        ("POST", "/v2/models/m/generate_stream"),
        ("POST", "/prefix/v2/models/m/infer"),
        ("POST", "/v2/models/m/infer\n"),
        ("POST", "/v2"),
        ("PUT", "/v2/trace"),
        ("GET", "/v2/trace/"),
        ("GET", "/v2/trace/settings"),
        ("GET", "/v2/repository/models/m/load"),
        ("POST", "/v2/repository/index"),
        ("GET", "/v2/models/m"),
        ("GET", "/v2/models/m/config"),
        ("GET", "/v2/health/ready"),
        ("GET", "/v1/models"),
        ("GET", "/"),
        ("OPTIONS", "*"),
        ("GET", ""),
    ],
)
def test_whatever_else_is_forwarded(method: str, target: str) -> None:
    assert parse_endpoint(method, target) == Endpoint(EndpointKind.OTHER)


def test_paths_of_a_model() -> None:
    assert model_path("m") == "/v2/models/m"
    assert model_path("a%20b", "3") == "/v2/models/a%20b/versions/3"


@pytest.mark.parametrize("version", [None, "1", "v.2"])
@pytest.mark.parametrize("model", ["m", "a%2Fb", "infer"])
def test_a_model_path_is_parsed_back(model: str, version: str | None) -> None:
    path = model_path(model, version) + "/infer"
    assert parse_endpoint("POST", path) == Endpoint(INFER, model, version)
