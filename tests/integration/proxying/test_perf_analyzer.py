"""NVIDIA's load generator runs through the gateway without an error, over HTTP and over gRPC."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.environment import CACHE
from tests.integration.perf_analyzer.install import environment, program
from tests.integration.proxying.shared_memory_calls import gateway_before, our_regions
from tests.integration.support.gateway import Gateway
from tests.integration.support.real_server import Reached
from tests.integration.triton.server import TritonServer

FOLDER = CACHE / "perf_analyzer"


def perf_analyzer(gateway: Gateway, model: str, requests: int, *options: str) -> int:
    """Send so many requests over two connections; return how many were answered."""
    if not (FOLDER / ".ready").exists():
        pytest.fail(f"no perf_analyzer in {FOLDER}: run `make test`, it sets one up", pytrace=False)
    words = ("-u", gateway.address, "-m", model, "--concurrency-range", "2")
    done = subprocess.run(
        [program(FOLDER), *words, "--request-count", str(requests), *options],
        env=environment(FOLDER),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"\bRequest count: (\d+)", done.stdout)
    assert counted, done.stdout
    return int(counted[1])


@pytest.mark.triton
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


CALLS = 100


@pytest.mark.triton
def test_shared_memory_of_its_own_leaves_that_of_the_gateway(
    triton: TritonServer, tmp_path: Path
) -> None:
    """It unregisters all regions at its start and at its end."""
    endpoint = {"http": triton.http_url, "grpc": triton.grpc_url}
    memory = ("--shared-memory", "system", "--output-shared-memory-size", "200000")
    others = our_regions(triton)
    with gateway_before(tmp_path, triton, endpoints=[endpoint]) as gateway:
        own = our_regions(triton) - others
        for protocol in ("http", "grpc"):
            for options in ((), memory):
                words = ("-i", protocol, "--shape", "INPUT0:50000", *options)
                assert perf_analyzer(gateway, "identity_fp32", CALLS, *words) >= CALLS
        assert len(own) == 1
        assert own <= our_regions(triton)


def test_each_server_answers_over_grpc(any_gateway: Gateway, any_upstream: Reached) -> None:
    shapes = ("--shape", "INPUT0:8", "--shape", "INPUT1:8")
    text = ("--shape", "INPUT0:2", "--string-length", "16", "--grpc-compression-algorithm", "gzip")
    assert perf_analyzer(any_gateway, "add", CALLS, "-i", "grpc", *shapes) >= CALLS
    assert perf_analyzer(any_gateway, "identity_bytes", CALLS, "-i", "grpc", *text) >= CALLS
    if not any_upstream.over_grpc or any_upstream.name == "triton":
        stream = ("--streaming", "--shape", "INPUT0:8")
        assert perf_analyzer(any_gateway, "identity_fp32", CALLS, "-i", "grpc", *stream) >= CALLS
