"""gRPC clients that call without a pause, in every way that a call can go, and count outcomes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.resilience.grpc_server import SLOW

_TIMEOUT = 20.0
_FEW, _MANY = 8, 80_000
"""Numbers in a small request, and in a large one of 320 KB."""
_STREAMED = 5


class GrpcLoad:
    """Running clients, one for each model and way, and the outcomes of their calls."""

    def __init__(self, url: str, models: tuple[str, ...], pause: float) -> None:
        self.counts: Counter[str] = Counter()
        """How calls ended: ``ok``, ``wrong``, how the client left, or the code of an error."""
        self._address = urlsplit(url).netloc
        self._pause = pause
        self._stopping = False
        self._number = 0
        ways = (_raw, _typed, _large, _stream, _cancel, _miss_deadline)
        self._tasks = [
            asyncio.create_task(self._run(way, model)) for model in models for way in ways
        ]

    @property
    def ok(self) -> int:
        """Return the number of calls with the response that they should have."""
        return self.counts["ok"]

    async def end(self) -> None:
        """Let each client finish its call."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def drop(self) -> None:
        """End the clients wherever they are."""
        self._stopping = True  # a client may take it for the cancel of its call
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, way: Callable[[Any, str, int], Awaitable[str]], model: str) -> None:
        """Call again and again; each connection is for some 50 calls."""
        while not self._stopping:
            options = [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", -1),
            ]
            async with grpc.aio.insecure_channel(self._address, options) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                for _ in range(random.randrange(1, 100)):
                    if self._stopping:
                        return
                    self._number += 1
                    try:
                        outcome = await way(stub, model, self._number)
                    except grpc.aio.AioRpcError as error:
                        outcome = error.code().name
                    self.counts[outcome] += 1
                    await asyncio.sleep(self._pause * 2 * random.random())


def _request(model: str, id_: str, size: int, *, typed: bool = False) -> Any:
    numbers = np.arange(size, dtype=np.int32) + random.randrange(1000)
    request = service_pb2.ModelInferRequest(model_name=model, id=id_)
    tensor = request.inputs.add(name="N", datatype="INT32", shape=[size])
    if typed:
        tensor.contents.int_contents.extend(numbers.tolist())
    else:
        request.raw_input_contents.append(numbers.tobytes())
    return request


def _outcome(response: Any, request: Any) -> str:
    """Compare a response with its request: the tensors, in their form or as raw contents."""
    if response.id != request.id:
        return "wrong"
    (asked,), (output,) = request.inputs, response.outputs
    if response.raw_output_contents:
        numbers = np.frombuffer(response.raw_output_contents[0], np.int32).tolist()
    else:
        numbers = list(output.contents.int_contents)
    if request.raw_input_contents:
        wanted = np.frombuffer(request.raw_input_contents[0], np.int32).tolist()
    else:
        wanted = list(asked.contents.int_contents)
    return "ok" if numbers == wanted else "wrong"


async def _raw(stub: Any, model: str, number: int) -> str:
    request = _request(model, str(number), _FEW)
    return _outcome(await stub.ModelInfer(request, timeout=_TIMEOUT), request)


async def _typed(stub: Any, model: str, number: int) -> str:
    request = _request(model, str(number), _FEW, typed=True)
    return _outcome(await stub.ModelInfer(request, timeout=_TIMEOUT), request)


async def _large(stub: Any, model: str, number: int) -> str:
    request = _request(model, str(number), _MANY)
    return _outcome(await stub.ModelInfer(request, timeout=_TIMEOUT), request)


async def _stream(stub: Any, model: str, number: int) -> str:
    """Send some requests, and leave in the middle of every third stream."""
    requests = [_request(model, f"{number}/{i}", _FEW) for i in range(_STREAMED)]
    stream = stub.ModelStreamInfer(timeout=_TIMEOUT)
    for position, request in enumerate(requests):
        await stream.write(request)
        response = await stream.read()
        if response is grpc.aio.EOF:
            return f"stream: {(await stream.code()).name}"
        if response.error_message:
            return "stream: error"
        if _outcome(response.infer_response, request) != "ok":
            return "wrong"
        if position == 2 and not number % 3:
            stream.cancel()
            return "stream: left"
    await stream.done_writing()
    code = await stream.code()
    return "ok" if code is grpc.StatusCode.OK else f"stream: {code.name}"


async def _cancel(stub: Any, model: str, number: int) -> str:
    """Cancel a call after a moment, in which it may have ended."""
    call = stub.ModelInfer(_request(model, f"{SLOW}{number}", _FEW), timeout=_TIMEOUT)
    await asyncio.sleep(random.random() * 0.3)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    return "cancelled"


async def _miss_deadline(stub: Any, model: str, number: int) -> str:
    request = _request(model, f"{SLOW}{number}", _FEW)
    return _outcome(await stub.ModelInfer(request, timeout=random.random() * 0.3), request)


@asynccontextmanager
async def grpc_load_on(
    url: str, models: tuple[str, ...], pause: float = 0.0
) -> AsyncIterator[GrpcLoad]:
    """Have clients call these models of a gateway, with a pause in seconds between two calls."""
    load = GrpcLoad(url, models, pause)
    try:
        yield load
    finally:
        await load.drop()
