"""A real Triton outlives clients that cancel calls and miss deadlines, if the gateway is between.

Without the gateway, or with ``grpc_cancellation: forward``, this Triton dies within seconds of
deadlines of 0.5 to 3 ms, cancelled unary calls, decoupled streams that are left while they respond,
and connections that break.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.support.gateway import gateway_with_settings
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer
from tests.support.addresses import HOST, free_port
from tests.support.checks.nothing_left_in_process import until_nothing_is_left

pytestmark = pytest.mark.triton

MODELS = ("identity_fp32", "decoupled")
"""Those of the tests' Triton that are called."""

_EACH = 4
"""Clients of each kind."""
_RESPONSES = 5
_PAUSE = 0.1
"""Seconds between two streams of a client at most: the model serves one at a time, also those
that nobody waits for."""


def infer_request() -> Any:
    """Make a request to the model that returns its input."""
    request = service_pb2.ModelInferRequest(model_name=MODELS[0])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[8])
    request.raw_input_contents.append(np.arange(8, dtype=np.float32).tobytes())
    return request


def stream_request() -> Any:
    """Make a request to the model that responds some times."""
    request = service_pb2.ModelInferRequest(model_name=MODELS[1])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\3\0\0\0abc")
    request.parameters["count"].int64_param = _RESPONSES
    return request


async def _miss_deadline(stub: Any) -> None:
    await stub.ModelInfer(infer_request(), timeout=random.uniform(0.0005, 0.003))


async def _cancel(stub: Any) -> None:
    call = stub.ModelInfer(infer_request())
    await asyncio.sleep(random.uniform(0, 0.003))
    call.cancel()
    await call


async def _leave_stream(stub: Any) -> None:
    """Leave before, between or after the responses, with the request side open or ended."""
    leaving = asyncio.Event()

    async def requests() -> AsyncIterator[Any]:
        yield stream_request()
        await leaving.wait()

    is_open = random.random() < 0.5
    stream = stub.ModelStreamInfer(requests() if is_open else iter([stream_request()]))
    for _ in range(random.randrange(_RESPONSES + 1)):
        await stream.read()
    stream.cancel()
    leaving.set()
    await asyncio.sleep(random.uniform(0, _PAUSE))


async def _miss_deadline_of_stream(stub: Any) -> None:
    timeout = random.uniform(0.0005, 0.01)
    await asyncio.sleep(random.uniform(0, _PAUSE))
    async for _ in stub.ModelStreamInfer(iter([stream_request()]), timeout=timeout):
        pass


WAYS = (_miss_deadline, _cancel, _leave_stream, _miss_deadline_of_stream)


class ImpatientClients:
    """Running clients, and how many calls they have given up, by the way."""

    def __init__(self, address: str) -> None:
        self.counts: Counter[str] = Counter()
        self._address = address
        self._stopping = False
        clients = [self._run(way) for way in WAYS for _ in range(_EACH)]
        self._tasks = [asyncio.create_task(client) for client in clients]

    def have_called(self, count: int) -> bool:
        """Tell whether clients of each kind have called so often."""
        return min(self.counts[way.__name__] for way in WAYS) >= count

    async def end(self) -> None:
        """Let each client finish its call."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run(self, way: Callable[[Any], Awaitable[None]]) -> None:
        """Call again and again; each connection is for some calls, and breaks with the last."""
        while not self._stopping:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(self._address, options)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(random.randrange(1, 100)):
                with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    await way(stub)
                self.counts[way.__name__] += 1
                if self._stopping:
                    break
            last = stub.ModelInfer(infer_request())
            await asyncio.sleep(random.uniform(0, 0.003))
            await channel.close()
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await last


CALLS = 150
"""Of each kind of client."""


@pytest.fixture
def own_triton() -> Iterator[TritonServer]:
    """A server that may die without harm to other tests."""
    with TritonServer(named(*MODELS)) as server:
        yield server


async def test_triton_outlives_clients_that_do_not_wait(
    own_triton: TritonServer, tmp_path: Path
) -> None:
    admin = f"{HOST}:{free_port()}"
    settings = {
        "listen": f"{HOST}:0",
        "admin": admin,
        "log": {"access": False},
        "upstreams": {
            "server": {
                "endpoints": [{"http": own_triton.http_url, "grpc": own_triton.grpc_url}],
                "concurrency": {"max_requests": 1000},
            }
        },
        "routes": [{"upstream": "server"}],
    }
    pid = own_triton.pid
    with gateway_with_settings(tmp_path, settings) as gateway:
        async with asyncio.timeout(240):
            clients = ImpatientClients(gateway.address)
            try:
                while not clients.have_called(CALLS):
                    assert own_triton.is_alive(), own_triton.log_tail()
                    await asyncio.sleep(0.5)
            finally:
                await clients.end()
        gc.collect()  # grpcio keeps a cancelled stream, and its connection, in a cycle
        await until_nothing_is_left(f"http://{admin}")
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            response = await stub.ModelInfer(infer_request(), timeout=10)
        assert response.raw_output_contents == infer_request().raw_input_contents
        assert (own_triton.is_alive(), own_triton.pid) == (True, pid)
