"""A real Triton outlives clients that cancel calls and miss deadlines, if the gateway is between.

Without the gateway, or with ``grpc_cancellation: forward``, this Triton dies within seconds.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.integration.support.gateway import gateway_with_settings
from tests.integration.support.impatient_clients import MODELS, impatient_clients_of, infer_request
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer
from tests.support.addresses import HOST, free_port
from tests.support.checks.nothing_left_in_process import until_nothing_is_left

pytestmark = pytest.mark.triton

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
        async with asyncio.timeout(240), impatient_clients_of(gateway.address) as clients:
            waiting = asyncio.create_task(clients.until(CALLS))
            while not waiting.done():
                assert own_triton.is_alive(), own_triton.log_tail()
                await asyncio.wait([waiting], timeout=0.5)
        gc.collect()  # grpcio keeps a cancelled stream, and its connection, in a cycle
        await until_nothing_is_left(f"http://{admin}")
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            response = await stub.ModelInfer(infer_request(), timeout=10)
        assert response.raw_output_contents == infer_request().raw_input_contents
        assert (own_triton.is_alive(), own_triton.pid) == (True, pid)
