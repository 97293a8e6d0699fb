from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.protocol.operations import (
    PASSTHROUGH,
    PASSTHROUGH_IF_SINGLE,
    Operation,
    OperationKind,
    parse_operation,
    parse_operation_variants,
    replace_model,
    strip_version,
)

INFER, PREDICT, GENERATE = OperationKind.INFER, OperationKind.PREDICT, OperationKind.GENERATE
METADATA, MODEL_METADATA = OperationKind.SERVER_METADATA, OperationKind.MODEL_METADATA
TRACE, LOGGING, CONFIG = OperationKind.TRACE_SETTING, OperationKind.LOGGING, OperationKind.CONFIG
LIVENESS, READINESS = OperationKind.LIVENESS, OperationKind.READINESS
STATISTICS, ALL_STATISTICS = OperationKind.STATISTICS, OperationKind.ALL_STATISTICS
LOAD, INDEX, REPOSITORY = OperationKind.LOAD, OperationKind.INDEX, OperationKind.REPOSITORY
V1_MODEL, V1_MODELS = OperationKind.V1_MODEL, OperationKind.V1_MODELS
HEALTH, OTHER = OperationKind.HEALTH, OperationKind.OTHER
SHARED_MEMORY = OperationKind.SHARED_MEMORY


HANDLED = [
    ("POST", "/v2/models/m/infer", Operation(INFER, "m")),
    ("POST", "/v2/models/m/versions/7/infer", Operation(INFER, "m", "7")),
    (
        "POST",
        "/v2/models/versions/versions/versions/infer",
        Operation(INFER, *["versions"] * 2),
    ),
    ("GET", "/v2", Operation(METADATA)),
    ("GET", "/v2/trace/setting", Operation(TRACE)),
    ("POST", "/v2/models/m/trace", Operation(TRACE, "m")),
    ("POST", "/v2/repository/r/models/m/load?x", Operation(LOAD, "m")),
    ("POST", "/v2/repository/models/models/load", Operation(LOAD, "models")),
    ("GET", "/v2/health/ready?x", Operation(READINESS)),
    ("POST", "/v1/models/a:b/versions/1:2:predict", Operation(PREDICT, "a:b", "1:2")),
    ("GET", "/v1/models/m/versions/7", Operation(V1_MODEL, "m", "7")),
    ("GET", "/v1/models", Operation(V1_MODELS)),
]
FOR_A_SINGLE_SERVER = [
    ("GET", "/v2/models/stats", Operation(ALL_STATISTICS)),
    ("POST", "/v2/repository/index", Operation(INDEX)),
    ("GET", "/v2/logging", Operation(LOGGING)),
    ("PUT", "/v2/logging/x", Operation(LOGGING)),
]
PASSED = [
    ("POST", "/v2/models/m/versions/2/generate_stream", Operation(GENERATE, "m", "2")),
    ("PUT", "/v2/health/ready?x", Operation(HEALTH)),
    ("GET", "/v2/models/m/ready", Operation(HEALTH, "m")),
    ("GET", "/v2/models/m/versions/1", Operation(MODEL_METADATA, "m", "1")),
    ("HEAD", "/v2/models/stats", Operation(STATISTICS)),
    ("POST", "/v2/repository/r/s/models/m/load", Operation(REPOSITORY)),
    ("GET", "/v2/repository/models/m/load", Operation(REPOSITORY, "m")),
    ("POST", "/v2/cudasharedmemory/region/r/register", Operation(SHARED_MEMORY)),
    ("POST", "/v2/models/m/infer/", Operation(OTHER, "m")),
    ("POST", "/v2/models/m\n/infer\n", Operation(OTHER, "m\n")),
    ("GET", "/v2/models/m/versions/3/x/y", Operation(OTHER, "m", "3")),
    ("POST", "/v2/models/m/versions//infer", Operation(OTHER, "m")),
    ("PUT", "/v2/models/m/versions/1", Operation(OTHER, "m", "1")),
    ("GET", "/v2/%72epository/index", Operation(OTHER)),
    ("GET", "/v1/models/m:predict", Operation(OTHER, "m")),
    ("POST", "/v1/models/m:predict/", Operation(OTHER, "m:predict")),
    ("POST", "/v1/models/m/labels/l:predict", Operation(OTHER, "m")),
    ("POST", "/v1/models/:predict", Operation(OTHER)),
    ("OPTIONS", "*", Operation(OTHER)),
]


@pytest.mark.parametrize("row", [*HANDLED, *FOR_A_SINGLE_SERVER, *PASSED], ids=str)
def test_operations_are_parsed_and_passed_on_or_handled(row: tuple[str, str, Operation]) -> None:
    method, target, operation = row
    assert parse_operation(method, target) == operation
    assert (operation.kind in PASSTHROUGH_IF_SINGLE) is (row in FOR_A_SINGLE_SERVER)
    assert (operation.kind in PASSTHROUGH) is (row in PASSED)


@pytest.mark.parametrize(
    ("method", "target", "readings"),
    [
        ("POST", "/v2/models/m/infer?%2F..//", [Operation(INFER, "m")]),
        ("OPTIONS", "*", [Operation(OTHER)]),
        # Needless or required percent-encoding reads the same everywhere.
        ("POST", "/v2/models/a%20b/versions/%31/infer", [Operation(INFER, "a b", "1")]),
        # Servers decode once.
        ("POST", "/v2/models/%256d/infer", [Operation(INFER, "%6d")]),
        # The operation depends on when a server decodes.
        ("POST", "/v2/models/m%2Finfer", [Operation(OTHER, "m/infer"), Operation(INFER, "m")]),
        ("POST", "/v2/models/m/%69nfer", [Operation(OTHER, "m"), Operation(INFER, "m")]),
        ("POST", "/v2/models/m/infer%0A", [Operation(OTHER, "m"), Operation(INFER, "m")]),
        (
            "POST",
            "/v2/models/m%2Fversions%2F1%2Finfer",
            [Operation(OTHER, "m/versions/1/infer"), Operation(INFER, "m", "1")],
        ),
        (
            "POST",
            "/v1/models/m%3Apredict",
            [Operation(OTHER, "m:predict"), Operation(PREDICT, "m")],
        ),
        (
            "GET",
            "/v2/models/stat%73",
            [Operation(MODEL_METADATA, "stats"), Operation(ALL_STATISTICS)],
        ),
        ("POST", "/v2/repository/models%2Fm/load", [Operation(REPOSITORY), Operation(LOAD, "m")]),
        # The same for servers that normalize paths.
        ("POST", "/v2/models/m/infer/", [Operation(OTHER, "m"), Operation(INFER, "m")]),
        ("POST", "/../v2/models/x/../m/infer", [Operation(OTHER), Operation(INFER, "m")]),
        (
            "POST",
            "/v2/models/x%2F%2e%2E%2fm/infer",
            [Operation(INFER, "x/../m"), Operation(OTHER, "x"), Operation(INFER, "m")],
        ),
    ],
)
def test_path_variants_of_servers_are_parsed(
    method: str, target: str, readings: list[Operation]
) -> None:
    assert list(parse_operation_variants(method, target)) == readings


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
        ("/v2/models/a%2Fb/x//y", "/v2/models/n/x//y", "/v2/models/n/versions/3/x//y"),
        ("/v2/models/stats/stats", "/v2/models/n/stats", "/v2/models/n/versions/3/stats"),
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
                "/v2/models/stats?x",
                "/v1/models",
                "/v2/models//infer",
                "/x/v2/models/m/infer",
                "*",
            )
        ],
    ],
)
def test_model_in_a_path_is_replaced(target: str, renamed: str, with_version: str) -> None:
    assert replace_model(target, "n") == renamed
    assert replace_model(target, "n", "3") == with_version
    for method in ("GET", "POST"):
        before = parse_operation(method, target)
        version = None if before.model is None or "repository" in target else "3"
        model = None if before.model is None else "n"
        assert parse_operation(method, renamed) == Operation(before.kind, model, before.version)
        assert parse_operation(method, with_version) == Operation(before.kind, model, version)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v2/models/m/versions/1/infer", "/v2/models/m/infer"),
        ("/v2/models/m/versions/1/a/versions/2?x=/versions/3", "/v2/models/m/a/versions/2"),
        ("/v2/models/m/infer", "/v2/models/m/infer"),
    ],
)
def test_version_is_removed_from_a_path(target: str, path: str) -> None:
    assert strip_version(target) == path


@pytest.mark.parametrize("parse", [parse_operation, parse_operation_variants])
def test_operation_is_still_cached_after_a_flood_of_other_models(
    parse: Callable[[str, str], object],
) -> None:
    target = "/v2/models/an%20innocent/infer"
    before = [parse("POST", target) for _ in range(2)][1]  # a full cache takes it at its second use
    for number in range(5000):
        parse("POST", f"/v2/models/a{number}/infer")
    assert parse("POST", target) is before
