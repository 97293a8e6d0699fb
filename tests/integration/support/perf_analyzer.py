"""Runs NVIDIA's load generator against a gateway."""

import re
import subprocess

import pytest

from tests.integration.environment import CACHE
from tests.integration.perf_analyzer.install import environment, program
from tests.integration.support.gateway import Gateway

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
