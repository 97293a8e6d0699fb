"""One connection of a gRPC client reaches two servers, and does not notice that one dies."""

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.support.client_forms import open_channel, stub_of
from tests.integration.support.gateway import Gateway, gateway_with_settings
from tests.integration.triton.models import named
from tests.integration.triton.server import HOST, TritonServer

pytestmark = pytest.mark.triton

MODEL = "identity_fp32"
CALLS = 200
CALLERS = 8
PATIENCE = 20.0


@pytest.fixture
def servers() -> Iterator[list[TritonServer]]:
    """Two servers of one model."""
    with ExitStack() as stack:
        pair = [TritonServer(named(MODEL)) for _ in range(2)]
        # Each watches the thread that starts it, so they start one after the other.
        yield [stack.enter_context(server) for server in pair]


@pytest.fixture
def gateway(servers: list[TritonServer], tmp_path: Path) -> Iterator[Gateway]:
    """A gateway in front of both, which retries what gets no response."""
    upstream = {"endpoints": [each.grpc_url for each in servers], "dialect": "triton"}
    settings = {
        "listen": f"{HOST}:0",
        "upstreams": {"pair": upstream},
        "routes": [{"upstream": "pair", "retry_on": ["no_response"]}],
    }
    with gateway_with_settings(tmp_path, settings) as running:
        yield running


class Load:
    """Callers that share one connection, each with tensors of its own."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()

    def run(self, calls: int, callers: int = CALLERS) -> None:
        """Make so many calls, as many at a time as there are callers."""
        with ThreadPoolExecutor(callers) as pool:
            for done in [pool.submit(self._call) for _ in range(calls)]:
                done.result()

    @property
    def made(self) -> int:
        """Return how many calls have ended."""
        return self.outcomes.total()

    def _call(self) -> None:
        number = next(self._numbers)
        array = np.arange(number, number + 1 + number % 50, dtype=np.float32)
        request = service_pb2.ModelInferRequest(model_name=MODEL, id=str(number))
        request.inputs.add(name="INPUT0", datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
        try:
            response = self._stub.ModelInfer(request, timeout=PATIENCE)
        except grpc.RpcError as error:
            outcome = f"{error.code().name}: {error.details()}"
        else:
            (data,) = response.raw_output_contents
            is_own = (response.id, data) == (request.id, array.tobytes())
            outcome = "OK" if is_own else "MIXED UP"
        with self._lock:
            self.outcomes[outcome] += 1


def count_inferences(server: TritonServer) -> int:
    with open_channel(f"{HOST}:{server.grpc_port}") as channel:
        request = service_pb2.ModelStatisticsRequest(name=MODEL)
        (statistics,) = stub_of(channel).ModelStatistics(request, timeout=PATIENCE).model_stats
    return int(statistics.inference_count)


def run_and_kill(gateway: Gateway, victim: TritonServer) -> Counter[str]:
    """Kill a server while calls are made; return their outcomes."""
    with open_channel(gateway.address) as channel:
        load = Load(stub_of(channel))
        running = threading.Thread(target=load.run, args=(CALLS * 2,))
        running.start()
        while load.made < CALLS // 2 and running.is_alive():
            time.sleep(0.001)
        os.kill(victim.pid, signal.SIGKILL)
        running.join()
    return load.outcomes


def test_calls_are_balanced_and_none_fails_with_a_server(
    gateway: Gateway, servers: list[TritonServer]
) -> None:
    with open_channel(gateway.address) as channel:
        load = Load(stub_of(channel))
        load.run(CALLS, callers=1)
    assert load.outcomes == {"OK": CALLS}
    # With several calls at a time, the faster server gets more.
    counts = [count_inferences(server) for server in servers]
    assert sum(counts) == CALLS
    assert all(abs(count - CALLS / 2) <= CALLS / 20 for count in counts), counts
    assert run_and_kill(gateway, servers[0]) == {"OK": CALLS * 2}
