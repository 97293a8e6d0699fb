"""A Triton that lives through many starts and stops of what shares memory with it keeps nothing."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import orjson
import pytest
from multidict import CIMultiDict

from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.shared_memory import SharedMemoryLane, SharedMemoryLanes, SharedMemoryPolicy
from gateway.upstream.transport import UpstreamRequest
from tests.integration.proxying.shared_memory_calls import (
    IMAGE,
    PREFIX,
    SHAPE,
    SIZE,
    call,
    cleaning_soon,
    files_of,
    gateway_before,
    our_regions,
    pattern,
    until,
)
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway
from tests.integration.triton.models import named
from tests.integration.triton.server import SHARED_MEMORY, TritonServer
from tests.support.gateway import no_leaks
from tests.support.gateway import until as until_in_loop
from tests.support.scale import scaled

pytestmark = pytest.mark.triton

_REGION = 4 * 2**20
_GROWTH = 16 * 2**20
"""Bytes by which Triton may grow: those of four regions, of the hundreds that it has mapped."""


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(named(IMAGE)) as running:
        yield running


def memory_of_process(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process: all, and those of shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.findall(r"^(VmRSS|RssShmem):\s+(\d+) kB", status, re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


def test_gateways_that_end_or_are_killed_leave_nothing_once_another_has_started(
    server: TritonServer, tmp_path: Path
) -> None:
    regions: set[str] = set()
    restarts = scaled(100)
    before = memory_of_process(server.pid)
    for number in range(restarts):
        with ExitStack() as stack:
            gateway = stack.enter_context(_gateway(tmp_path, server))
            regions |= our_regions(server)
            with Client(gateway.host, gateway.port) as client:
                for other in range(3):
                    assert call(client, pattern(10 * number + other)) == 200
            if number % 2:
                os.kill(gateway.pid, signal.SIGKILL)
                until(partial(_has_ended, gateway))
                with pytest.raises(AssertionError):  # it did not end as it should
                    stack.close()
    assert len(regions) == restarts
    with _gateway(tmp_path, server):
        until(lambda: len(our_regions(server)) == 1)
        until(lambda: not any(map(files_of, regions)))
    _check_nothing_left(server, before)


def _gateway(folder: Path, server: TritonServer) -> AbstractContextManager[Gateway]:
    """Run a gateway that ends soon after SIGTERM."""
    memory = {"size": _REGION, "min_bytes": 1}
    settings = {"limits": {"drain_grace": "0s"}}
    return gateway_before(
        folder, server, command=cleaning_soon(), settings=settings, shared_memory=memory
    )


def _has_ended(gateway: Gateway) -> bool:
    return not gateway.is_alive()


def _check_nothing_left(server: TritonServer, before: Mapping[str, int]) -> None:
    assert server.is_alive()
    assert our_regions(server) == set()
    assert Path(f"/proc/{server.pid}/maps").read_text().count(f"{SHARED_MEMORY}/{PREFIX}") == 0
    after = memory_of_process(server.pid)
    growth = {name: size - before[name] for name, size in after.items()}
    assert max(growth.values()) < _GROWTH, growth


async def test_memory_that_is_shared_and_given_back_many_times_stays_the_same(
    server: TritonServer,
) -> None:
    endpoint = HttpEndpoint(parse_server_url(server.http_url), EndpointOptions(5))
    try:
        async with no_leaks():
            for number in range(10):  # after which Triton has all that it keeps
                await _share_and_stop(endpoint, number)
            before = memory_of_process(server.pid)
            for number in range(scaled(1000)):
                await _share_and_stop(endpoint, number)
    finally:
        await endpoint.close()
    _check_nothing_left(server, before)


async def _share_and_stop(endpoint: HttpEndpoint, number: int) -> None:
    """Share memory, send one image through it to the server and back, and share it no more."""
    lane = SharedMemoryLane(endpoint, SharedMemoryLanes(SharedMemoryPolicy(_REGION, 1)))
    lane.start()
    await until_in_loop(lambda: lane.size)
    inputs, outputs = lane.take(SIZE), lane.take(SIZE)
    assert inputs is not None
    assert outputs is not None
    assert files_of(inputs.region) == {".owner"}
    inputs.view[:] = pattern(number).tobytes()
    places = [
        {
            "shared_memory_region": each.region,
            "shared_memory_offset": each.offset,
            "shared_memory_byte_size": SIZE,
        }
        for each in (inputs, outputs)
    ]
    tensor = {"name": "INPUT0", "shape": SHAPE, "datatype": "FP32", "parameters": places[0]}
    body = orjson.dumps(
        {"inputs": [tensor], "outputs": [{"name": "OUTPUT0", "parameters": places[1]}]}
    )
    headers = CIMultiDict({"Content-Length": str(len(body))})
    request = UpstreamRequest("POST", f"/v2/models/{IMAGE}/infer", headers, [body])
    response = await lane.send(request, [inputs, outputs])
    assert response.status == 200
    while await response.read():
        pass
    response.close()
    assert outputs.view == inputs.view
    for each in (inputs, outputs):
        each.end_call()
    assert lane.used == 0
    await lane.close()
    assert not files_of(inputs.region)
