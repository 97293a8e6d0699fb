"""Tensors go to a Triton's gRPC address and back through shared memory, whoever the client is.

As in test_shared_memory.py, each call carries a pattern of its own.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.proxying.test_shared_memory import (
    binary_request,
    json_request,
    our_regions,
    pattern,
    raw_request,
    until,
)
from tests.integration.proxying.test_shared_memory import call as call_over_http
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, gateway_with_settings
from tests.integration.triton.models import named
from tests.integration.triton.server import HOST, TritonServer
from tests.support.addresses import free_address

pytestmark = pytest.mark.triton

_SIZE = 4 * 3 * 224 * 224
_COUNT = re.compile(
    r'^tensorgate_shared_memory_calls_total{.*lane="(\w+)",reason="(\w*)",tensors="(\w+)".*} (\d+)',
    re.MULTILINE,
)
SHARED = {"inputs": ("shared_memory", ""), "outputs": ("shared_memory", "")}


class SharingGateway:
    """A gateway before a server, and what it tells of its shared memory."""

    def __init__(self, gateway: Gateway, admin: str) -> None:
        self.gateway = gateway
        self._admin = admin

    @property
    def memory(self) -> Mapping[str, Any]:
        """The memory of its endpoint."""
        host, _, port = self._admin.rpartition(":")
        with Client(host, int(port)) as client:
            upstream = client.get("/status").fields["upstreams"]["server"]
        (endpoint,) = upstream["endpoints"]
        found: Mapping[str, Any] = endpoint["shared_memory"]
        return found

    def counts(self) -> dict[tuple[str, str, str], int]:
        """Count how inputs and outputs went so far."""
        host, _, port = self._admin.rpartition(":")
        with Client(host, int(port)) as client:
            text = client.get("/metrics").body.decode()
        return {(tensors, lane, why): int(n) for lane, why, tensors, n in _COUNT.findall(text)}

    def client(self) -> Client:
        """Connect over HTTP/1.1."""
        return Client(self.gateway.host, self.gateway.port)

    def went(self, send: Callable[[], object]) -> dict[str, tuple[str, str]]:
        """Make one call; return lane and reason of its tensors."""
        before = self.counts()
        send()
        found: dict[str, tuple[str, str]] = {}

        def is_counted() -> bool:
            for (tensors, lane, why), n in self.counts().items():
                if n > before.get((tensors, lane, why), 0):
                    found[tensors] = lane, why
            return bool(found)

        until(is_counted)
        return found


@contextmanager
def gateway_over_grpc(
    folder: Path, server: TritonServer, *, both: bool = False, **upstream: Any
) -> Iterator[SharingGateway]:
    """Run a gateway that gets inference to a server over gRPC; nothing is left at its end."""
    folder.mkdir(exist_ok=True)
    grpc_url = f"grpc://{HOST}:{server.grpc_port}"
    endpoint: Any = {"http": server.http_url, "grpc": grpc_url} if both else grpc_url
    protocol = {"inference_protocol": "grpc"} if both else {}
    admin = free_address()
    settings = {
        "listen": f"{HOST}:0",
        "admin": admin,
        "upstreams": {
            "server": {
                "endpoints": [endpoint],
                "dialect": "triton",
                "shared_memory": {"size": "16MiB", "min_bytes": "128KiB"},
                **protocol,
                **upstream,
            }
        },
        "routes": [{"upstream": "server"}],
    }
    with gateway_with_settings(folder, settings) as gateway:
        until(lambda: "shared memory" in gateway.log)
        sharing = SharingGateway(gateway, admin)
        yield sharing
        until(lambda: not sharing.memory["in_use"] and not sharing.memory["quarantined"])
        assert server.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(named("image", "identity_fp32", "slow")) as running:
        yield running


@pytest.fixture(scope="module", params=["grpc", "both"])
def shared(
    request: pytest.FixtureRequest,
    server: TritonServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SharingGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_over_grpc(folder, server, both=request.param == "both") as gateway:
        with gateway.client() as client:  # the first call has the metadata fetched
            assert call_over_http(client, pattern(0)) == 200
        until(lambda: gateway.went(lambda: _call_once(gateway)) == SHARED)
        yield gateway


def _call_once(gateway: SharingGateway) -> None:
    with gateway.client() as client:
        assert call_over_http(client, pattern(0)) == 200


@pytest.mark.parametrize("form", [binary_request, json_request, raw_request])
def test_tensors_of_http_clients_come_back_as_they_were_sent(
    shared: SharingGateway, server: TritonServer, form: Any
) -> None:
    with shared.client() as client:
        for number in range(5):
            assert shared.went(lambda n=number: _check(client, n, form)) == SHARED
    assert len(our_regions(server)) == 1


def _check(client: Client, number: int, form: Any) -> None:
    assert call_over_http(client, pattern(number), form) == 200
