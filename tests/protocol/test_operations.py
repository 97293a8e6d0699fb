from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.protocol.operations import (
    PASSTHROUGH,
    PASSTHROUGH_IF_SINGLE,
    Operation,
    parse_operation,
    parse_operation_variants,
    replace_model,
    strip_version,
)
from gateway.protocol.operations import OperationKind as Kind

HANDLED = [
    ("POST", "/v2/models/m/infer", Operation(Kind.INFER, "m")),
    ("POST", "/v2/models/m/versions/7/infer", Operation(Kind.INFER, "m", "7")),
    (
        "POST",
        "/v2/models/versions/versions/versions/infer",
        Operation(Kind.INFER, *["versions"] * 2),
    ),
    ("GET", "/v2", Operation(Kind.SERVER_METADATA)),
    ("GET", "/v2/trace/setting", Operation(Kind.TRACE_SETTING)),
    ("POST", "/v2/models/m/trace", Operation(Kind.TRACE_SETTING, "m")),
    ("POST", "/v2/repository/r/models/m/load?x", Operation(Kind.LOAD, "m")),
    ("POST", "/v2/repository/models/models/load", Operation(Kind.LOAD, "models")),
    ("GET", "/v2/health/ready?x", Operation(Kind.READINESS)),
    ("POST", "/v1/models/a:b/versions/1:2:predict", Operation(Kind.PREDICT, "a:b", "1:2")),
    ("GET", "/v1/models/m/versions/7", Operation(Kind.V1_MODEL, "m", "7")),
    ("GET", "/v1/models", Operation(Kind.V1_MODELS)),
]
FOR_A_SINGLE_SERVER = [
    ("GET", "/v2/models/stats", Operation(Kind.ALL_STATISTICS)),
    ("POST", "/v2/repository/index", Operation(Kind.INDEX)),
    ("GET", "/v2/logging", Operation(Kind.LOGGING)),
    ("PUT", "/v2/logging/x", Operation(Kind.LOGGING)),
]
PASSED = [
    ("POST", "/v2/models/m/versions/2/generate_stream", Operation(Kind.GENERATE, "m", "2")),
    ("PUT", "/v2/health/ready?x", Operation(Kind.HEALTH)),
    ("GET", "/v2/models/m/ready", Operation(Kind.HEALTH, "m")),
    ("GET", "/v2/models/m/versions/1", Operation(Kind.MODEL_METADATA, "m", "1")),
    ("HEAD", "/v2/models/stats", Operation(Kind.STATISTICS)),
    ("POST", "/v2/repository/r/s/models/m/load", Operation(Kind.REPOSITORY)),
    ("GET", "/v2/repository/models/m/load", Operation(Kind.REPOSITORY, "m")),
    ("POST", "/v2/cudasharedmemory/region/r/register", Operation(Kind.SHARED_MEMORY)),
    ("POST", "/v2/models/m/infer/", Operation(Kind.OTHER, "m")),
    ("POST", "/v2/models/m\n/infer\n", Operation(Kind.OTHER, "m\n")),
    ("GET", "/v2/models/m/versions/3/x/y", Operation(Kind.OTHER, "m", "3")),
    ("POST", "/v2/models/m/versions//infer", Operation(Kind.OTHER, "m")),
    ("PUT", "/v2/models/m/versions/1", Operation(Kind.OTHER, "m", "1")),
    ("GET", "/v2/%72epository/index", Operation(Kind.OTHER)),
    ("GET", "/v1/models/m:predict", Operation(Kind.OTHER, "m")),
    ("POST", "/v1/models/m:predict/", Operation(Kind.OTHER, "m:predict")),
    ("POST", "/v1/models/m/labels/l:predict", Operation(Kind.OTHER, "m")),
    ("POST", "/v1/models/:predict", Operation(Kind.OTHER)),
    ("OPTIONS", "*", Operation(Kind.OTHER)),
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
        ("POST", "/v2/models/m/infer?%2F..//", [Operation(Kind.INFER, "m")]),
        ("OPTIONS", "*", [Operation(Kind.OTHER)]),
        # Needless or required percent-encoding reads the same everywhere.
        ("POST", "/v2/models/a%20b/versions/%31/infer", [Operation(Kind.INFER, "a b", "1")]),
        # Servers decode once.
        ("POST", "/v2/models/%256d/infer", [Operation(Kind.INFER, "%6d")]),
        # The operation depends on when a server decodes.
        (
            "POST",
            "/v2/models/m%2Finfer",
            [Operation(Kind.OTHER, "m/infer"), Operation(Kind.INFER, "m")],
        ),
        ("POST", "/v2/models/m/%69nfer", [Operation(Kind.OTHER, "m"), Operation(Kind.INFER, "m")]),
        ("POST", "/v2/models/m/infer%0A", [Operation(Kind.OTHER, "m"), Operation(Kind.INFER, "m")]),
        (
            "POST",
            "/v2/models/m%2Fversions%2F1%2Finfer",
            [Operation(Kind.OTHER, "m/versions/1/infer"), Operation(Kind.INFER, "m", "1")],
        ),
        (
            "POST",
            "/v1/models/m%3Apredict",
            [Operation(Kind.OTHER, "m:predict"), Operation(Kind.PREDICT, "m")],
        ),
        (
            "GET",
            "/v2/models/stat%73",
            [Operation(Kind.MODEL_METADATA, "stats"), Operation(Kind.ALL_STATISTICS)],
        ),
        (
            "POST",
            "/v2/repository/models%2Fm/load",
            [Operation(Kind.REPOSITORY), Operation(Kind.LOAD, "m")],
        ),
        # The same for servers that normalize paths.
        ("POST", "/v2/models/m/infer/", [Operation(Kind.OTHER, "m"), Operation(Kind.INFER, "m")]),
        ("POST", "/../v2/models/x/../m/infer", [Operation(Kind.OTHER), Operation(Kind.INFER, "m")]),
        (
            "POST",
            "/v2/models/x%2F%2e%2E%2fm/infer",
            [
                Operation(Kind.INFER, "x/../m"),
                Operation(Kind.OTHER, "x"),
                Operation(Kind.INFER, "m"),
            ],
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
            "/v2/models/a%2Fb/versions/1/infer?a=/v2/models/m/infer?b#",
            "/v2/models/n/versions/1/infer?a=/v2/models/m/infer?b#",
            "/v2/models/n/versions/3/infer?a=/v2/models/m/infer?b#",
        ),
        ("/v2/models/stats/stats", "/v2/models/n/stats", "/v2/models/n/versions/3/stats"),
        ("/v1/models/a:b:predict", "/v1/models/n:predict", "/v1/models/n/versions/3:predict"),
        *[
            (f"/v2/repository{room}/m/{verb}", *[f"/v2/repository{room}/n/{verb}"] * 2)
            for room in ("/models", "/r/models", "/models/models")
            for verb in ("load", "unload?x")
        ],
        *[(same,) * 3 for same in ("/v2", "/v2/models/stats?x", "/v2/models//infer", "*")],
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
