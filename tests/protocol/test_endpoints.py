from __future__ import annotations

import pytest

from gateway.protocol.endpoints import (
    KINDS,
    UNTOUCHED,
    UNTOUCHED_IF_ONE,
    Endpoint,
    EndpointKind,
    kind_word,
    model_path,
    parse_endpoint,
    with_model,
    without_version,
)

INFER = EndpointKind.INFER
TRACE = EndpointKind.TRACE_SETTING
METADATA = EndpointKind.SERVER_METADATA
LOAD = EndpointKind.LOAD
GENERATE = EndpointKind.GENERATE
LIVENESS = EndpointKind.LIVENESS
READINESS = EndpointKind.READINESS
HEALTH = EndpointKind.HEALTH
MODEL_METADATA = EndpointKind.MODEL_METADATA
CONFIG = EndpointKind.CONFIG
STATISTICS = EndpointKind.STATISTICS
ALL_STATISTICS = EndpointKind.ALL_STATISTICS
INDEX = EndpointKind.INDEX
REPOSITORY = EndpointKind.REPOSITORY
LOGGING = EndpointKind.LOGGING
SHARED_MEMORY = EndpointKind.SHARED_MEMORY
OTHER = EndpointKind.OTHER


@pytest.mark.parametrize(
    ("method", "target", "endpoint"),
    [
        ("POST", "/v2/models/m/infer", Endpoint(INFER, "m")),
        ("POST", "/v2/models/m/infer?x=/y", Endpoint(INFER, "m")),
        ("POST", "/v2/models/m/versions/7/infer", Endpoint(INFER, "m", "7")),
        ("POST", "/v2/models/a%2Fb%20c/infer", Endpoint(INFER, "a%2Fb%20c")),
        ("POST", "/v2/models/infer/infer", Endpoint(INFER, "infer")),
        ("POST", "/v2/models/stats/infer", Endpoint(INFER, "stats")),
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
        ("POST", "/v2/repository/r/models/m/load?x", Endpoint(LOAD, "m")),
        ("POST", "/v2/repository/models/models/m/unload", Endpoint(LOAD, "m")),
        ("POST", "/v2/repository/models/models/load", Endpoint(LOAD, "models")),
        ("GET", "/v2/health/live", Endpoint(LIVENESS)),
        ("HEAD", "/v2/health/live", Endpoint(LIVENESS)),
        ("GET", "/v2/health/ready?x", Endpoint(READINESS)),
        ("HEAD", "/v2/health/ready", Endpoint(READINESS)),
    ],
)
def test_endpoints_that_are_treated_in_a_way_of_their_own(
    method: str, target: str, endpoint: Endpoint
) -> None:
    assert parse_endpoint(method, target) == endpoint
    assert endpoint.kind not in UNTOUCHED | UNTOUCHED_IF_ONE


@pytest.mark.parametrize(
    ("method", "target", "endpoint"),
    [
        ("GET", "/v2/models/stats", Endpoint(ALL_STATISTICS)),
        ("POST", "/v2/repository/index", Endpoint(INDEX)),
        ("GET", "/v2/repository/index?x", Endpoint(INDEX)),
        ("GET", "/v2/logging", Endpoint(LOGGING)),
        ("POST", "/v2/logging", Endpoint(LOGGING)),
        ("PUT", "/v2/logging/x", Endpoint(LOGGING)),
    ],
)
def test_endpoints_that_are_forwarded_where_there_is_one_server(
    method: str, target: str, endpoint: Endpoint
) -> None:
    assert parse_endpoint(method, target) == endpoint
    assert endpoint.kind in UNTOUCHED_IF_ONE
    assert endpoint.kind not in UNTOUCHED


@pytest.mark.parametrize(
    ("method", "target", "endpoint"),
    [
        ("POST", "/v2/models/m/generate", Endpoint(GENERATE, "m")),
        ("POST", "/v2/models/m/versions/2/generate_stream", Endpoint(GENERATE, "m", "2")),
        ("POST", "/v2/health/live", Endpoint(HEALTH)),
        ("PUT", "/v2/health/ready?x", Endpoint(HEALTH)),
        ("GET", "/v2/health/live/", Endpoint(OTHER)),
        ("GET", "/v2/models/m/ready", Endpoint(HEALTH, "m")),
        ("GET", "/v2/models/m", Endpoint(MODEL_METADATA, "m")),
        ("GET", "/v2/models/m?x", Endpoint(MODEL_METADATA, "m")),
        ("GET", "/v2/models/m/versions/1", Endpoint(MODEL_METADATA, "m", "1")),
        ("GET", "/v2/models/m/config", Endpoint(CONFIG, "m")),
        ("GET", "/v2/models/m/versions/1/stats", Endpoint(STATISTICS, "m", "1")),
        ("HEAD", "/v2/models/stats", Endpoint(STATISTICS)),
        ("GET", "/v2/models/stats/stats", Endpoint(STATISTICS, "stats")),
        ("PUT", "/v2/repository/index", Endpoint(REPOSITORY)),
        ("POST", "/v2/repository/r/index", Endpoint(REPOSITORY)),
        ("POST", "/v2/repository/r/s/models/m/load", Endpoint(REPOSITORY)),
        ("GET", "/v2/repository/models/m/load", Endpoint(REPOSITORY, "m")),
        ("GET", "/v2/repository/r/models/m/load", Endpoint(REPOSITORY, "m")),
        ("POST", "/v2/repository", Endpoint(REPOSITORY)),
        ("GET", "/v2/systemsharedmemory/status", Endpoint(SHARED_MEMORY)),
        ("POST", "/v2/cudasharedmemory/region/r/register", Endpoint(SHARED_MEMORY)),
        ("GET", "/v2/models/m/infer", Endpoint(OTHER, "m")),
        ("POST", "/v2/models/m/infer/", Endpoint(OTHER, "m")),
        ("POST", "/v2/models/m/infer\n", Endpoint(OTHER, "m")),
        ("POST", "/v2/models/m\n/infer\n", Endpoint(OTHER, "m\n")),
        ("POST", "/v2/models/a/b/infer", Endpoint(OTHER, "a")),
        ("GET", "/v2/models/m/versions/3/x/y", Endpoint(OTHER, "m", "3")),
        ("POST", "/v2/models/m/versions//infer", Endpoint(OTHER, "m")),
        ("GET", "/v2/models/m/", Endpoint(OTHER, "m")),
        ("POST", "/v2/models//infer", Endpoint(OTHER)),
        ("POST", "/prefix/v2/models/m/infer", Endpoint(OTHER)),
        ("POST", "/v2", Endpoint(OTHER)),
        ("PUT", "/v2/trace", Endpoint(OTHER)),
        ("PUT", "/v2/models/m/trace", Endpoint(OTHER, "m")),
        ("GET", "/v2/trace/", Endpoint(OTHER)),
        ("GET", "/v2/trace/settings", Endpoint(OTHER)),
        ("GET", "/v2/repositories", Endpoint(OTHER)),
        ("GET", "/v2/%72epository/index", Endpoint(OTHER)),
        ("GET", "/v2/models", Endpoint(OTHER)),
        ("GET", "/v2/x", Endpoint(OTHER)),
        ("GET", "/v1/models", Endpoint(OTHER)),
        ("GET", "/", Endpoint(OTHER)),
        ("OPTIONS", "*", Endpoint(OTHER)),
        ("GET", "", Endpoint(OTHER)),
    ],
)
def test_whatever_else_is_forwarded(method: str, target: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(method, target) == endpoint
    assert endpoint.kind in UNTOUCHED


def test_every_kind_has_one_word() -> None:
    named = [kind for kinds in KINDS.values() for kind in kinds]
    assert sorted(kind.name for kind in named) == sorted(kind.name for kind in EndpointKind)
    for word, kinds in KINDS.items():
        assert {kind_word(kind) for kind in kinds} == {word}


def test_paths_of_a_model() -> None:
    assert model_path("m") == "/v2/models/m"
    assert model_path("a%20b", "3") == "/v2/models/a%20b/versions/3"


@pytest.mark.parametrize("version", [None, "1", "v.2"])
@pytest.mark.parametrize("model", ["m", "a%2Fb", "infer"])
def test_a_model_path_is_parsed_back(model: str, version: str | None) -> None:
    path = model_path(model, version) + "/infer"
    assert parse_endpoint("POST", path) == Endpoint(INFER, model, version)


@pytest.mark.parametrize(
    ("target", "renamed", "with_version"),
    [
        ("/v2/models/m/infer", "/v2/models/n/infer", "/v2/models/n/versions/3/infer"),
        (
            "/v2/models/m/versions/1/infer",
            "/v2/models/n/versions/1/infer",
            "/v2/models/n/versions/3/infer",
        ),
        (
            "/v2/models/m/infer?a=/v2/models/m/infer?b#",
            "/v2/models/n/infer?a=/v2/models/m/infer?b#",
            "/v2/models/n/versions/3/infer?a=/v2/models/m/infer?b#",
        ),
        ("/v2/models/m", "/v2/models/n", "/v2/models/n/versions/3"),
        ("/v2/models/m?", "/v2/models/n?", "/v2/models/n/versions/3?"),
        ("/v2/models/m/versions/1", "/v2/models/n/versions/1", "/v2/models/n/versions/3"),
        ("/v2/models/m/generate", "/v2/models/n/generate", "/v2/models/n/versions/3/generate"),
        ("/v2/models/m/stats", "/v2/models/n/stats", "/v2/models/n/versions/3/stats"),
        ("/v2/models/m/trace", "/v2/models/n/trace", "/v2/models/n/versions/3/trace"),
        (
            "/v2/models/m/versions/2/trace/setting?x",
            "/v2/models/n/versions/2/trace/setting?x",
            "/v2/models/n/versions/3/trace/setting?x",
        ),
        ("/v2/models/a%2Fb/x//y", "/v2/models/n/x//y", "/v2/models/n/versions/3/x//y"),
        ("/v2/models/models/models", "/v2/models/n/models", "/v2/models/n/versions/3/models"),
        ("/v2/models/stats/stats", "/v2/models/n/stats", "/v2/models/n/versions/3/stats"),
        *[
            (f"/v2/repository{room}/m/{verb}", *[f"/v2/repository{room}/n/{verb}"] * 2)
            for room in ("/models", "/r/models", "/models/models")
            for verb in ("load", "unload?x")
        ],
        *[
            (target, target, target)
            for target in (
                "/v2",
                "/v2/trace/setting",
                "/v2/models/stats?x",
                "/v2/repository/index",
                "/v2/models//infer",
                "/x/v2/models/m/infer",
                "*",
            )
        ],
    ],
)
def test_another_model_in_a_path(target: str, renamed: str, with_version: str) -> None:
    assert with_model(target, "n") == renamed
    assert with_model(target, "n", "3") == with_version
    for method in ("GET", "POST"):
        before = parse_endpoint(method, target)
        version = None if before.model is None or "repository" in target else "3"
        model = None if before.model is None else "n"
        assert parse_endpoint(method, renamed) == Endpoint(before.kind, model, before.version)
        assert parse_endpoint(method, with_version) == Endpoint(before.kind, model, version)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v2/models/m/versions/1/infer", "/v2/models/m/infer"),
        ("/v2/models/m/versions/1", "/v2/models/m"),
        ("/v2/models/m/versions/1/a/versions/2?x=/versions/3", "/v2/models/m/a/versions/2"),
        ("/v2/models/m/infer", "/v2/models/m/infer"),
        ("/v2/models/m/versions", "/v2/models/m/versions"),
        ("/v2", "/v2"),
    ],
)
def test_the_path_without_a_version(target: str, path: str) -> None:
    assert without_version(target) == path
