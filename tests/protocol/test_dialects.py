from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.protocol.dialects import (
    DIALECTS,
    JSON,
    KSERVE,
    TORCHSERVE,
    TRITON,
    Dialect,
    GrpcForm,
    common_dialect,
)


@pytest.mark.parametrize(
    ("model", "version", "path"),
    [
        (None, None, "/v2/trace/setting"),
        ("m", None, "/v2/models/m/trace/setting"),
        ("m", "3", "/v2/models/m/trace/setting"),
    ],
)
def test_triton_has_trace_settings_per_model(
    model: str | None, version: str | None, path: str
) -> None:
    assert TRITON.trace is not None
    assert TRITON.trace.path(model, version) == path


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda each: each.name)
def test_common_dialect_of_equal_dialects_is_the_same(dialect: Dialect) -> None:
    assert common_dialect([dialect]) is dialect
    assert common_dialect([dialect, replace(dialect), dialect]) is dialect


@pytest.mark.parametrize(
    ("dialects", "expected"),
    [
        (
            [TRITON, JSON],
            replace(
                TRITON,
                name="triton and json",
                binary=False,
                honors_output_encoding=False,
                requires_json_type=True,
                trace=None,
                faster_over_grpc=True,
            ),
        ),
        (
            [TRITON, KSERVE],
            replace(
                TRITON,
                name="triton and kserve",
                honors_output_encoding=False,
                versioned_paths=False,
                requires_json_type=True,
                trace=None,
                faster_over_grpc=True,
                grpc=GrpcForm(checks_tensors=False, survives_cancellation=False),
            ),
        ),
        ([TRITON, replace(TRITON, trace=None)], replace(TRITON, trace=None)),
        # All releases of KServe speak V1.
        ([KSERVE, replace(KSERVE, binary=False)], replace(KSERVE, binary=False)),
    ],
)
def test_common_dialect_is_what_all_servers_understand(
    dialects: Sequence[Dialect], expected: Dialect
) -> None:
    assert common_dialect(dialects) == expected
    turned = common_dialect(dialects[::-1])
    assert replace(turned, name="") == replace(expected, name="")


def test_endpoints_of_all_dialects_are_alike_over_grpc_but_for_its_own_columns() -> None:
    for dialect in DIALECTS.values():
        over_grpc = dialect.over_grpc()
        assert over_grpc.binary
        assert over_grpc.honors_output_encoding
        assert not over_grpc.speaks_v1
        assert (over_grpc.name, over_grpc.grpc) == (dialect.name, dialect.grpc)
        assert over_grpc.versioned_paths == dialect.versioned_paths


def test_servers_that_differ_over_grpc_get_what_most_understand() -> None:
    common = common_dialect([KSERVE.over_grpc(), TORCHSERVE.over_grpc()])
    assert common.grpc == GrpcForm(takes_raw=False, checks_tensors=False)
