"""NVIDIA's load generator runs through the gateway without an error."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.environment import CACHE
from tests.integration.perf_analyzer.install import environment, program
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton

FOLDER = CACHE / "perf_analyzer"
FORMS = ("json", "binary")

INFERRED = re.compile(r'"POST /v2/models/\w+/infer" (\d+) ')


@dataclass(frozen=True, slots=True)
class Report:
    """How many requests were answered, and the file with all that was sent and came back."""

    requests: int
    calls: Path


@pytest.fixture
def gateway(triton: TritonServer, tmp_path: Path) -> Iterator[Gateway]:
    with running_gateway(tmp_path, triton.http_url) as running:
        yield running


def load(gateway: Gateway, folder: Path, model: str, form: str, requests: int) -> Report:
    """Send so many requests over four connections; inputs and outputs have the same form."""
    if not (FOLDER / ".ready").exists():
        pytest.fail(f"no perf_analyzer in {FOLDER}: run `make test`, it sets one up", pytrace=False)
    calls = folder / "exchanges.json"
    options = {
        "-m": model,
        "-u": gateway.address,
        "--input-tensor-format": form,
        "--output-tensor-format": form,
        "--concurrency-range": "4",
        "--request-count": str(requests),
        "--profile-export-file": str(calls),
    }
    run = subprocess.run(
        [program(FOLDER), *(word for option in options.items() for word in option)],
        env=environment(FOLDER),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    counted = re.search(r"\bRequest count: (\d+)", run.stdout)
    assert counted, run.stdout
    return Report(int(counted[1]), calls)


def statuses_of(gateway: Gateway, count: int) -> list[str]:
    """Wait for the access log's lines of so many calls, and return their statuses."""
    end = time.monotonic() + 5
    while len(statuses := INFERRED.findall(gateway.log)) < count:
        assert time.monotonic() < end, f"{len(statuses)} of {count} calls were logged"
        time.sleep(0.1)
    return statuses


@pytest.mark.parametrize("form", FORMS)
def test_many_small_requests(gateway: Gateway, tmp_path: Path, form: str) -> None:
    report = load(gateway, tmp_path, "batched_fp32", form, requests=500)
    assert report.requests >= 500
    assert set(statuses_of(gateway, 500)) == {"200"}
    calls = requests_in(report.calls)
    assert len(calls) >= 500
    for exchange in calls:
        (output,) = exchange["response_outputs"]
        assert output["OUTPUT0"] == exchange["request_inputs"]["INPUT0"]


def requests_in(calls: Path) -> list[dict[str, Any]]:
    (experiment,) = json.loads(calls.read_text())["experiments"]
    requests: list[dict[str, Any]] = experiment["requests"]
    return requests


@pytest.mark.parametrize("form", FORMS)
def test_images(gateway: Gateway, tmp_path: Path, form: str) -> None:
    """Its random values hold some NaN, bare in JSON."""
    report = load(gateway, tmp_path, "image", form, requests=8)
    assert report.requests >= 8
    assert set(statuses_of(gateway, 8)) == {"200"}
