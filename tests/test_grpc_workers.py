"""A gateway of two processes serves gRPC clients, and loses no call where it drains or reloads."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.resilience.fleet import fleet
from tests.resilience.grpc_load import GrpcLoad, grpc_load_on
from tests.support.addresses import free_address
from tests.support.gateway import until
from tests.support.gateway_process import Process, gateway_process, write_settings
from tests.support.operator import Operator

MODEL = "echo"
PATIENCE = 20.0
RELOADS = 4
MORE = "workers: 2\nlog: {access: false}\n"
GOOD = {"ok", "cancelled", "stream: left", "DEADLINE_EXCEEDED", "broken"}
"""How calls may end: what clients do on purpose is counted, too."""


async def _until_more(load: GrpcLoad, count: int = 60) -> None:
    """Wait until so many more calls have ended well."""
    enough = load.ok + count
    await until(lambda: load.ok >= enough, PATIENCE)


async def _end(process: Process, load: GrpcLoad) -> None:
    await load.end()
    assert set(load.counts) <= GOOD, load.counts
    process.signal(signal.SIGTERM)
    status, _, err = await process.end()
    assert status == 0, err
    assert "ERROR" not in err


async def test_worker_that_gets_sigterm_loses_no_call(tmp_path: Path) -> None:
    """GOAWAY sends its clients to the other worker, and to the one that replaces it."""
    admin = free_address()
    async with fleet(1, over_grpc=True) as (server,):
        more = f"admin: {admin}\n{MORE}"
        config = write_settings(tmp_path / "gateway.yaml", server.url, more=more)
        async with gateway_process(config) as (process, url), grpc_load_on(url, (MODEL,)) as load:
            await process.wait_for_output(r"listening on http://\S+ \(admin\)")
            for _ in range(3):
                await _until_more(load)
                leaving = await Operator(admin).worker()
                os.kill(leaving, signal.SIGTERM)
                await process.wait_for_output(f"worker {leaving} ended with status 0")
                process.said = ""
                await process.wait_for_output(r"worker \d+ is up")
            await _until_more(load)
            await _end(process, load)


async def test_reloads_lose_no_call_and_end_no_stream(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    async with fleet(2, over_grpc=True) as servers:
        config = write_settings(file, servers[0].url, more=MORE)
        async with (
            gateway_process(config) as (process, url),
            grpc_load_on(url, (MODEL,)) as load,
            grpc.aio.insecure_channel(url.removeprefix("http://")) as channel,
        ):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stream = stub.ModelStreamInfer(timeout=3 * PATIENCE)
            for number in range(1, RELOADS + 1):
                await _until_more(load)
                url = servers[number % 2].url
                await asyncio.to_thread(write_settings, file, url, more=MORE)
                process.said = ""
                process.signal(signal.SIGHUP)
                await process.wait_for_output("settings reloaded from")
                request = service_pb2.ModelInferRequest(model_name=MODEL, id=str(number))
                await stream.write(request)
                assert (await stream.read()).infer_response.id == str(number)
            await _until_more(load)
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK
            await _end(process, load)
