from __future__ import annotations

import pytest

from gateway.protocol.operations import (
    KINDS,
    UNTOUCHED,
    UNTOUCHED_IF_ONE,
    Endpoint,
    EndpointKind,
    kind_word,
    model_path,
    parse_endpoint,
    read_endpoint,
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
PREDICT = EndpointKind.PREDICT
V1_MODEL = EndpointKind.V1_MODEL
V1_MODELS = EndpointKind.V1_MODELS
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
        ("POST", "/v1/models/m:predict", Endpoint(PREDICT, "m")),
        ("POST", "/v1/models/m:predict?x=:y", Endpoint(PREDICT, "m")),
        ("POST", "/v1/models/m/versions/7:predict", Endpoint(PREDICT, "m", "7")),
        ("POST", "/v1/models/a%3Ab%20c:predict", Endpoint(PREDICT, "a%3Ab%20c")),
        ("POST", "/v1/models/a:b:predict", Endpoint(PREDICT, "a:b")),
        ("POST", "/v1/models/a:b/versions/1:2:predict", Endpoint(PREDICT, "a:b", "1:2")),
        ("GET", "/v1/models/m", Endpoint(V1_MODEL, "m")),
        ("GET", "/v1/models/m/versions/7", Endpoint(V1_MODEL, "m", "7")),
        ("GET", "/v1/models", Endpoint(V1_MODELS)),
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
        ("HEAD", "/v2/models/m", Endpoint(MODEL_METADATA, "m")),
        ("POST", "/v2/models/m", Endpoint(OTHER, "m")),
        ("PUT", "/v2/models/m/versions/1", Endpoint(OTHER, "m", "1")),
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
        ("POST", "/v1/models", Endpoint(OTHER)),
        ("GET", "/v1/models/", Endpoint(OTHER)),
        ("HEAD", "/v1/models/m", Endpoint(OTHER, "m")),
        ("GET", "/v1/models/m:predict", Endpoint(OTHER, "m")),
        ("POST", "/v1/models/m:explain", Endpoint(OTHER, "m")),
        ("POST", "/v1/models/m:predict/", Endpoint(OTHER, "m:predict")),
        ("POST", "/v1/models/m/x:predict", Endpoint(OTHER, "m")),
        ("POST", "/v1/models/a:b:explain", Endpoint(OTHER, "a:b")),
        ("POST", "/v1/models/a:b/explain", Endpoint(OTHER, "a:b")),
        ("GET", "/v1/models/a:b", Endpoint(OTHER, "a")),
        ("POST", "/v1/models/m/labels/l:predict", Endpoint(OTHER, "m")),
        ("GET", "/v1/models/m/metadata", Endpoint(OTHER, "m")),
        ("POST", "/v1/models/:predict", Endpoint(OTHER)),
        ("POST", "/v1/chat/completions", Endpoint(OTHER)),
        ("GET", "/", Endpoint(OTHER)),
        ("OPTIONS", "*", Endpoint(OTHER)),
        ("GET", "", Endpoint(OTHER)),
    ],
)
def test_whatever_else_is_forwarded(method: str, target: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(method, target) == endpoint
    assert endpoint.kind in UNTOUCHED


@pytest.mark.parametrize(
    ("method", "target", "readings"),
    [
        ("POST", "/v2/models/m/infer?%2F..//", [Endpoint(INFER, "m")]),
        ("GET", "/v2", [Endpoint(METADATA)]),
        ("GET", "/v2/", [Endpoint(METADATA)]),
        ("OPTIONS", "*", [Endpoint(OTHER)]),
        ("GET", "", [Endpoint(OTHER)]),
        # What is encoded without need, or has to be, is the same to all.
        ("POST", "/v2/models/%6d/infer", [Endpoint(INFER, "m")]),
        ("POST", "/v2/models/a%20b/versions/%31/infer", [Endpoint(INFER, "a b", "1")]),
        ("POST", "/v2/models/%C3%A9/infer", [Endpoint(INFER, "é")]),
        ("POST", "/v2/models/%zz%/infer", [Endpoint(INFER, "%zz%")]),
        ("POST", "/v1/models/%6d:predict", [Endpoint(PREDICT, "m")]),
        ("POST", "/v2/repository/models/%6d/load", [Endpoint(LOAD, "m")]),
        # Servers decode once.
        ("POST", "/v2/models/%256d/infer", [Endpoint(INFER, "%6d")]),
        ("POST", "/v2/models/m%252Finfer", [Endpoint(OTHER, "m%2Finfer")]),
        # Where they decode tells what is asked for.
        ("POST", "/v2/models/m%2Finfer", [Endpoint(OTHER, "m/infer"), Endpoint(INFER, "m")]),
        (
            "GET",
            "/v2/models/m%2fready",
            [Endpoint(MODEL_METADATA, "m/ready"), Endpoint(HEALTH, "m")],
        ),
        ("POST", "/v2/models/m/%69nfer", [Endpoint(OTHER, "m"), Endpoint(INFER, "m")]),
        ("POST", "/v2%2Fmodels/m/infer", [Endpoint(OTHER), Endpoint(INFER, "m")]),
        ("POST", "/%762/models/m/infer", [Endpoint(OTHER), Endpoint(INFER, "m")]),
        ("POST", "/v2/models/m/infer%0A", [Endpoint(OTHER, "m"), Endpoint(INFER, "m")]),
        ("POST", "/v2/models/m/infer%3Fx", [Endpoint(OTHER, "m")]),
        (
            "POST",
            "/v2/models/m%2Fversions%2F1%2Finfer",
            [Endpoint(OTHER, "m/versions/1/infer"), Endpoint(INFER, "m", "1")],
        ),
        ("POST", "/v1/models/m%3Apredict", [Endpoint(OTHER, "m:predict"), Endpoint(PREDICT, "m")]),
        ("POST", "/v1/models/a%3Ab:predict", [Endpoint(PREDICT, "a:b")]),
        ("POST", "/v1/models/m:%70redict", [Endpoint(OTHER, "m"), Endpoint(PREDICT, "m")]),
        (
            "GET",
            "/v2/models/stat%73",
            [Endpoint(MODEL_METADATA, "stats"), Endpoint(ALL_STATISTICS)],
        ),
        ("POST", "/v2/%72epository/index", [Endpoint(OTHER), Endpoint(INDEX)]),
        (
            "POST",
            "/v2/repository/models%2Fm/load",
            [Endpoint(REPOSITORY), Endpoint(LOAD, "m")],
        ),
        # And where they tidy up.
        ("POST", "/v2/models/m/infer/", [Endpoint(OTHER, "m"), Endpoint(INFER, "m")]),
        ("POST", "//v2/models//m/infer", [Endpoint(OTHER), Endpoint(INFER, "m")]),
        ("POST", "/v2/models/./m/infer", [Endpoint(OTHER, "."), Endpoint(INFER, "m")]),
        ("POST", "/../v2/models/x/../m/infer", [Endpoint(OTHER), Endpoint(INFER, "m")]),
        (
            "POST",
            "/v2/models/x%2F%2e%2E%2fm/infer",
            [Endpoint(INFER, "x/../m"), Endpoint(OTHER, "x"), Endpoint(INFER, "m")],
        ),
        ("GET", "/v2/health/live/", [Endpoint(OTHER), Endpoint(LIVENESS)]),
    ],
)
def test_the_ways_in_which_servers_read_a_path(
    method: str, target: str, readings: list[Endpoint]
) -> None:
    assert list(read_endpoint(method, target)) == readings


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
        ("/v1/models/m:predict", "/v1/models/n:predict", "/v1/models/n/versions/3:predict"),
        (
            "/v1/models/m/versions/1:predict?x",
            "/v1/models/n/versions/1:predict?x",
            "/v1/models/n/versions/3:predict?x",
        ),
        ("/v1/models/m", "/v1/models/n", "/v1/models/n/versions/3"),
        ("/v1/models/m:explain", "/v1/models/n:explain", "/v1/models/n/versions/3:explain"),
        ("/v1/models/a:b:predict", "/v1/models/n:predict", "/v1/models/n/versions/3:predict"),
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
                "/v1/models",
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
