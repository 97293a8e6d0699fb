"""Dialects, and what the metadata of servers shows of them, as their sources write it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.protocol.dialect_detection import parse_server_metadata
from gateway.protocol.dialects import (
    BINARY,
    DIALECTS,
    JSON,
    KSERVE,
    MLSERVER,
    OPENVINO,
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


TRITONS = [
    *("classification", "sequence", "model_repository", "model_repository(unload_dependents)"),
    *("schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory"),
    *("binary_tensor_data", "parameters", "statistics", "trace", "logging"),
]
SURVIVING_TRITON = replace(TRITON, grpc=replace(TRITON.grpc, survives_cancellation=True))
KSERVES = ["model_repository_extension"]
OF_OPENVINO = "OpenVINO Model Server"


def _kserve(version: str) -> dict[str, Any]:
    return {"name": "kserve", "version": version, "extensions": KSERVES}


def _without(*names: str) -> list[str]:
    return [name for name in TRITONS if name not in names]


@pytest.mark.parametrize(
    ("document", "dialect"),
    [
        ({"name": "triton", "version": "2.51.0", "extensions": TRITONS}, TRITON),
        ({"name": "triton", "version": "2.59.0", "extensions": TRITONS}, SURVIVING_TRITON),
        (
            {"name": "triton", "version": "2.2.0", "extensions": _without("trace", "logging")},
            replace(TRITON, trace=None),
        ),
        (_kserve("0.14.0"), KSERVE),
        (_kserve("0.13.1"), replace(KSERVE, binary=False)),
        ({"name": OF_OPENVINO, "version": "2022.3"}, OPENVINO),
        (
            {"name": OF_OPENVINO, "version": "2022.2.0"},
            replace(OPENVINO, binary=False, binary_only_if_listed=False),
        ),
        ({"name": "mlserver", "version": "1.7.1", "extensions": []}, MLSERVER),
        # Extensions count more than the name: a gateway in front may have added them.
        ({"name": "mlserver", "version": "9", "extensions": ["binary_tensor_data"]}, BINARY),
        ({**_kserve("0.9"), "extensions": ["binary_tensor_data"]}, KSERVE),
        ({"name": OF_OPENVINO, "version": "x", "extensions": ["binary_tensor_data"]}, OPENVINO),
        ({"extensions": ["binary_tensor_data"]}, BINARY),
        (
            {"name": "other", "extensions": ["binary_tensor_data", "model_configuration"]},
            replace(BINARY, has_config=True),
        ),
    ],
    ids=str,
)
def test_dialect_of_known_servers_is_detected(document: dict[str, Any], dialect: Dialect) -> None:
    found = parse_server_metadata(200, json.dumps(document).encode())
    assert found.dialect == dialect
    assert found.certain


@pytest.mark.parametrize(
    ("extensions", "lists"),
    [
        (TRITONS, True),
        (["system_shared_memory"], True),
        (_without("system_shared_memory"), False),
        ([["system_shared_memory"], {}, None], False),
        ("system_shared_memory", False),
        (None, False),
    ],
)
def test_server_lists_shared_memory_among_its_extensions(extensions: object, lists: bool) -> None:
    document = json.dumps({"name": "triton", "extensions": extensions}).encode()
    assert parse_server_metadata(200, document).lists_shared_memory is lists
    assert not parse_server_metadata(404, document).lists_shared_memory


@pytest.mark.parametrize(
    ("status", "document", "said"),
    [
        (200, b'{"name":"triton","version":"2.51.0"}', "lists no binary_tensor_data"),
        (200, b'{"name":"kserve","version":"main"}', "'main', which is no release's"),
        (200, b'{"name":"seldon","extensions":["x"]}', "names itself 'seldon' and lists no"),
        (200, b'{"name":"a","extensions":[["binary_tensor_data"],{},7,null]}', "lists no binary"),
        (200, b'{"name":["triton"],"version":null}', "has no name"),
        (200, b"[]", "no JSON object"),
        (404, b'{"name":"triton","extensions":["binary_tensor_data"]}', "returned 404 to GET /v2"),
    ],
)
def test_server_without_binary_extension_gets_json(status: int, document: bytes, said: str) -> None:
    found = parse_server_metadata(status, document)
    assert found.dialect is JSON
    assert said in found.reason
    assert found.reason.endswith("nothing shows that it takes the binary form")
    assert not found.certain


def test_reason_names_the_evidence() -> None:
    found = parse_server_metadata(200, json.dumps({"name": "triton", "version": "2.51.0"}).encode())
    assert "names itself 'triton', version '2.51.0'" in found.reason
    found = parse_server_metadata(200, json.dumps(_kserve("0.13.1")).encode())
    assert found.reason == (
        "names itself 'kserve', version '0.13.1': it takes the binary form since 0.14"
    )


def test_quotations_of_a_server_are_short_and_on_one_line() -> None:
    named = {"name": "a\nERROR all is lost\x1b[2J" + "é" * 10_000, "version": "1" * 10_000}
    reason = parse_server_metadata(200, json.dumps(named).encode()).reason
    assert reason.isprintable()
    assert reason.isascii()
    assert len(reason) < 500
