"""A gateway of two processes serves gRPC clients, and loses no call where it drains or reloads."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.addresses import HOST, free_address
from tests.support.gateway import until
from tests.support.gateway_process import Process, gateway_process
from tests.support.operator import Operator
from tests.support.servers.grpc_server import GrpcServer, grpc_server, infer_identity

CLIENTS = 6
PATIENCE = 20.0
RELOADS = 6


@pytest.fixture
def servers() -> Iterator[list[GrpcServer]]:
    """Two servers, each of which names its number as the model's version."""

    def numbered(number: int) -> Any:
        def infer(data: bytes, context: grpc.ServicerContext) -> bytes:
            response = service_pb2.ModelInferResponse.FromString(infer_identity(data, context))
            response.model_version = str(number)
            return bytes(response.SerializeToString())

        return infer

    with ExitStack() as stack:
        yield [
            stack.enter_context(grpc_server(unary={"ModelInfer": numbered(number)}))
            for number in range(2)
        ]


def infer_request(number: int) -> Any:
    request = service_pb2.ModelInferRequest(model_name="m", id=str(number))
    request.inputs.add(name="IN", datatype="INT64", shape=[1])
    request.raw_input_contents.append(number.to_bytes(8, "little"))
    return request


def is_response_to(response: Any, request: Any) -> bool:
    same_data = list(response.raw_output_contents) == list(request.raw_input_contents)
    return bool(same_data and response.id == request.id)


@asynccontextmanager
async def stubs(address: str, count: int) -> AsyncIterator[list[Any]]:
    """Open so many connections."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        channels = [grpc.aio.insecure_channel(address, options) for _ in range(count)]
        for channel in channels:
            stack.push_async_callback(channel.close)
            await channel.channel_ready()
        yield [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]


class Load:
    """Clients that call all the time, each over a connection of its own."""

    def __init__(self, stubs: list[Any]) -> None:
        self._stubs = stubs
        self._stopping = False
        self.outcomes: Counter[str] = Counter()
        """How calls ended: with the version of the server, or how they failed."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the clients at work inside."""
        async with asyncio.TaskGroup() as group:
            for number, stub in enumerate(self._stubs):
                group.create_task(self._call(number, stub))
            yield
            self._stopping = True

    async def until_more(self, count: int = 60) -> None:
        """Wait until so many more calls have ended."""
        enough = self.outcomes.total() + count
        await until(lambda: self.outcomes.total() >= enough, PATIENCE)

    async def _call(self, number: int, stub: Any) -> None:
        while not self._stopping:
            number += CLIENTS
            request = infer_request(number)
            try:
                response = await stub.ModelInfer(request, timeout=PATIENCE)
            except grpc.aio.AioRpcError as error:
                self.outcomes[f"{error.code().name}: {error.details()}"] += 1
            else:
                is_own = is_response_to(response, request)
                self.outcomes[response.model_version if is_own else "MIXED UP"] += 1


def write(file: Path, server: GrpcServer, more: str = "") -> str:
    file.write_text(
        f"listen: {HOST}:0\nworkers: 2\nlog: {{access: false}}\n{more}"
        f"upstreams: {{servers: {{endpoints: [{server.url}], dialect: triton}}}}\n"
    )
    return str(file)


async def end(process: Process) -> None:
    process.signal(signal.SIGTERM)
    status, _, err = await process.end()
    assert status == 0, err
    for word in ("Traceback", "ERROR", "aborted"):
        assert word not in err


def address_of(url: str) -> str:
    return url.removeprefix("http://")


async def test_worker_that_gets_sigterm_loses_no_call(
    tmp_path: Path, servers: list[GrpcServer]
) -> None:
    """GOAWAY sends its clients to the other worker, and to the one that replaces it."""
    admin = free_address()
    config = write(tmp_path / "gateway.yaml", servers[0], f"admin: {admin}\n")
    async with gateway_process(config) as (process, url):
        await process.wait_for_output(r"listening on http://\S+ \(admin\)")
        operator = Operator(admin)
        async with stubs(address_of(url), CLIENTS) as clients:
            load = Load(clients)
            async with load.running():
                for _ in range(3):
                    await load.until_more()
                    leaving = await operator.worker()
                    os.kill(leaving, signal.SIGTERM)
                    await process.wait_for_output(f"worker {leaving} ended with status 0")
                    process.said = ""
                    await process.wait_for_output(r"worker \d+ is up")
                await load.until_more()
            assert set(load.outcomes) == {"0"}
        await end(process)


async def test_reloads_lose_no_call_and_end_no_stream(
    tmp_path: Path, servers: list[GrpcServer]
) -> None:
    file = tmp_path / "gateway.yaml"
    async with gateway_process(write(file, servers[0])) as (process, url):
        async with stubs(address_of(url), CLIENTS) as clients:
            load = Load(clients)
            stream = clients[0].ModelStreamInfer(timeout=PATIENCE)
            async with load.running():
                for number in range(1, RELOADS + 1):
                    await load.until_more()
                    await asyncio.to_thread(write, file, servers[number % 2])
                    process.said = ""
                    process.signal(signal.SIGHUP)
                    await process.wait_for_output("settings reloaded from")
                    await stream.write(infer_request(number))
                    response = (await stream.read()).infer_response
                    assert is_response_to(response, infer_request(number))
                await load.until_more()
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK
            assert set(load.outcomes) == {"0", "1"}
        await end(process)
