"""Tensors go to a Triton on the same machine and back through shared memory, whatever happens.

Each call carries a pattern of its own, so that a byte of another call's would be seen.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.demo.walkthrough.own_server import compare_ways
from tests.integration.proxying.shared_memory_calls import (
    SIZE,
    binary_request,
    call,
    files_of,
    gateway_before,
    json_request,
    our_regions,
    pattern,
    raw_request,
    until,
)
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway
from tests.integration.triton.models import named
from tests.integration.triton.server import HOST, TritonServer
from tests.support.addresses import free_address

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(named("image", "identity_fp32", "slow")) as running:
        yield running


@pytest.fixture(scope="module")
def shared(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_before(tmp_path_factory.mktemp("gateway"), server) as gateway:
        yield gateway


@pytest.mark.parametrize("form", [binary_request, json_request, raw_request])
def test_tensors_come_back_as_they_were_sent(
    shared: Gateway, server: TritonServer, form: Any
) -> None:
    with Client(shared.host, shared.port) as client:
        for number in range(5):
            assert call(client, pattern(number), form) == 200
    (region,) = our_regions(server)
    # It has no name any more; its owner has a mark.
    assert files_of(region) == {".owner"}


def test_more_calls_than_slices_take_the_socket(shared: Gateway) -> None:
    def calls(worker: int) -> list[int]:
        with Client(shared.host, shared.port) as client:
            return [call(client, pattern(100 * worker + i)) for i in range(10)]

    with ThreadPoolExecutor(24) as pool:
        statuses = list(itertools.chain(*pool.map(calls, range(24))))
    assert set(statuses) == {200}


@pytest.mark.parametrize("sent", [100, 400_000, SIZE])
def test_client_that_leaves_harms_no_other(
    shared: Gateway, server: TritonServer, sent: int
) -> None:
    body, headers = binary_request(pattern(1))
    lines = [
        "POST /v2/models/image/infer HTTP/1.1",
        "Host: h",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    head = "\r\n".join([*lines, "", ""]).encode()
    with Client(shared.host, shared.port) as client:
        for number in range(40):
            with socket.create_connection((shared.host, shared.port)) as leaving:
                leaving.sendall((head + body)[: len(head) + sent])
            assert call(client, pattern(number)) == 200
    assert server.is_alive()


def test_region_that_somebody_unregisters_is_replaced(
    shared: Gateway, server: TritonServer
) -> None:
    before = our_regions(server)
    with Client(HOST, server.http_port) as other, Client(shared.host, shared.port) as client:
        assert other.send("POST", "/v2/systemsharedmemory/unregister", b"").status == 200
        assert call(client, pattern(1)) == 200
        until(lambda: our_regions(server))
        assert call(client, pattern(2)) == 200
    assert our_regions(server) != before


def test_two_gateways_keep_to_their_own_regions(
    shared: Gateway, server: TritonServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        gateways = [shared, stack.enter_context(gateway_before(tmp_path, server))]
        until(lambda: len(our_regions(server)) == 2)

        def calls(worker: int) -> set[int]:
            gateway = gateways[worker % 2]
            with Client(gateway.host, gateway.port) as client:
                return {call(client, pattern(100 * worker + i)) for i in range(10)}

        with ThreadPoolExecutor(8) as pool:
            assert set().union(*pool.map(calls, range(8))) == {200}
    until(lambda: len(our_regions(server)) == 1)  # the one that has stopped left none


def test_gateway_that_is_killed_leaves_nothing_after_the_next_start(
    server: TritonServer, tmp_path: Path
) -> None:
    before = our_regions(server)
    with ExitStack() as stack:
        gateway = stack.enter_context(gateway_before(tmp_path / "1", server))
        with Client(gateway.host, gateway.port) as client:
            assert call(client, pattern(1)) == 200
        (left,) = our_regions(server) - before
        os.kill(gateway.pid, signal.SIGKILL)
        until(lambda: not gateway.is_alive())
        with pytest.raises(AssertionError):  # it did not end as it should
            stack.close()
    assert left in our_regions(server)
    with gateway_before(tmp_path / "2", server) as gateway:
        with Client(gateway.host, gateway.port) as client:
            assert call(client, pattern(2)) == 200
        until(lambda: left not in our_regions(server))
        until(lambda: not files_of(left))
    assert our_regions(server) == before
    assert server.is_alive()


def test_server_that_is_restarted_gets_another_region(tmp_path: Path) -> None:
    with (
        TritonServer(named("image")) as server,
        gateway_before(tmp_path, server) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        assert call(client, pattern(1)) == 200
        server.stop(0)
        server.start()
        assert call(client, pattern(2)) == 200
        until(lambda: our_regions(server))
        assert call(client, pattern(3)) == 200


def test_demo_compares_the_ways_to_a_triton(server: TritonServer) -> None:
    out = io.StringIO()
    compare_ways(server.http_url, "image", (free_address(), free_address()), out, color=False)
    assert "shared memory     yes" in out.getvalue()
    assert out.getvalue().count("with shared memory") == 2
