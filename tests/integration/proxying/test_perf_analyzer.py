"""NVIDIA's load generator runs through the gateway over HTTP without an error."""

import json
from pathlib import Path

import pytest

from tests.integration.support.gateway import Gateway
from tests.integration.support.perf_analyzer import perf_analyzer

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("form", ["json", "binary"])
def test_many_small_requests_come_back_as_they_were(
    gateway: Gateway, tmp_path: Path, form: str
) -> None:
    calls = tmp_path / "calls.json"
    forms = ("--input-tensor-format", form, "--output-tensor-format", form)
    file = ("--profile-export-file", str(calls))
    assert perf_analyzer(gateway, "batched_fp32", 500, *forms, *file) >= 500
    (experiment,) = json.loads(calls.read_text())["experiments"]
    assert len(experiment["requests"]) >= 500
    for exchange in experiment["requests"]:
        (output,) = exchange["response_outputs"]
        assert output["OUTPUT0"] == exchange["request_inputs"]["INPUT0"]


def test_images_as_json(gateway: Gateway) -> None:
    """Its random values hold some NaN, bare in JSON."""
    forms = ("--input-tensor-format", "json", "--output-tensor-format", "json")
    assert perf_analyzer(gateway, "image", 4, *forms) >= 4
