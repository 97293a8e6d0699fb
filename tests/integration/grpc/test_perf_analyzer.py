"""NVIDIA's load generator drives every server over gRPC through the gateway."""

import re
import subprocess

import pytest

from tests.integration.environment import CACHE
from tests.integration.perf_analyzer.install import environment, program
from tests.integration.support.fixtures import Reached
from tests.integration.support.gateway import Gateway

FOLDER = CACHE / "perf_analyzer"


def run(gateway: Gateway, model: str, *options: str) -> int:
    """Send 100 requests over two connections; return how many were answered."""
    if not (FOLDER / ".ready").exists():
        pytest.fail(f"no perf_analyzer in {FOLDER}: run `make test`, it sets one up", pytrace=False)
    words = ("-i", "grpc", "-u", gateway.address, "-m", model, "--concurrency-range", "2")
    done = subprocess.run(
        [program(FOLDER), *words, "--request-count", "100", *options],
        env=environment(FOLDER),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"\bRequest count: (\d+)", done.stdout)
    assert counted, done.stdout
    return int(counted[1])


def test_model_with_two_inputs(any_gateway: Gateway, any_upstream: Reached) -> None:
    shapes = ("--shape", "INPUT0:8", "--shape", "INPUT1:8")
    assert run(any_gateway, "add", *shapes) >= 100


def test_text(any_gateway: Gateway) -> None:
    shape = ("--shape", "INPUT0:2", "--string-length", "16")
    assert run(any_gateway, "identity_bytes", *shape) >= 100


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed(any_gateway: Gateway, algorithm: str) -> None:
    shape = ("--shape", "INPUT0:8", "--grpc-compression-algorithm", algorithm)
    assert run(any_gateway, "identity_fp32", *shape) >= 100


def test_stream(any_gateway: Gateway, any_upstream: Reached) -> None:
    if not any_upstream.over_grpc or any_upstream.name == "triton":
        assert run(any_gateway, "identity_fp32", "--streaming", "--shape", "INPUT0:8") >= 100
