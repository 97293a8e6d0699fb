"""gRPC clients of a real Triton that wait for almost nothing: each way to kill an older one.

Deadlines of 0.5 to 3 ms, cancelled unary calls, decoupled streams that are left while they respond,
and connections that break. Triton 2.51 alone dies of them within seconds.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

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

    async def until(self, count: int) -> None:
        """Wait until clients of each kind have called so often."""
        while min(self.counts[way.__name__] for way in WAYS) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

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


@asynccontextmanager
async def impatient_clients_of(address: str) -> AsyncIterator[ImpatientClients]:
    """Have clients call at an address, until the context ends."""
    clients = ImpatientClients(address)
    try:
        yield clients
    finally:
        await clients.end()
