"""KServe's own gRPC client, in front of each server, over HTTP and over gRPC."""

from __future__ import annotations

import json

import numpy as np

from tests.integration.support.gateway import Gateway
from tests.integration.support.python_server import Script
from tests.integration.support.real_server import Reached

# What tests/integration/kserve/grpc_client.py sends.
MIXED = {
    "OUT_FP32": ("FP32", "float32", np.array([0.1, -2, 3e38, 0], np.float32).tolist()),
    "OUT_INT64": ("INT64", "int64", [2**53 + 1, -(2**63)]),
    "OUT_BYTES": ("BYTES", "object", ["é", "", "a\0b"]),
    "OUT_BOOL": ("BOOL", "bool", [True, False]),
}
HALVES = np.array([0.1, -2, 65504], np.float16).tolist()


def test_each_call_ends_as_it_should(
    any_gateway: Gateway, any_upstream: Reached, kserve_grpc_client: Script
) -> None:
    asked = json.loads(kserve_grpc_client.ask(any_gateway.address))
    assert [asked[call] for call in ("live", "ready", "model ready")] == [True] * 3
    for call in ("raw", "typed", "after"):
        outputs = asked[call]["outputs"]
        assert {name: tuple(output.values()) for name, output in outputs.items()} == MIXED
    assert asked["error"]["code"] == "NOT_FOUND"
    if any_upstream.name == "openvino":  # it knows no FP16, and has no slow model
        assert asked["halves"]["code"] == "INVALID_ARGUMENT"
        return
    assert asked["halves"]["outputs"]["OUTPUT0"]["values"] == HALVES
    assert asked["deadline"]["code"] == "DEADLINE_EXCEEDED"
    assert asked["cancel"] is True
