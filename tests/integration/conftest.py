from collections.abc import Iterator

import pytest

from tests.integration.support.client import Client
from tests.integration.support.fixtures import (
    any_gateway,
    any_server,
    any_upstream,
    kserve,
    mlserver,
    openvino,
    real_server,
    triton,
)
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.python_server import Script, running_script
from tests.integration.support.tap import Tap
from tests.integration.triton.server import HOST, TritonServer

__all__ = [
    "any_gateway",
    "any_server",
    "any_upstream",
    "kserve",
    "mlserver",
    "openvino",
    "real_server",
    "triton",
]


@pytest.fixture(scope="session")
def gateway(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with default settings in front of the Triton server."""
    with running_gateway(tmp_path_factory.mktemp("gateway"), triton.http_url) as running:
        yield running


@pytest.fixture(scope="session")
def kserve_client() -> Iterator[Script]:
    """KServe's own client: what tests/integration/kserve/client.py asks of a URL."""
    with running_script("kserve", "client") as script:
        yield script


@pytest.fixture(scope="session")
def kserve_grpc_client() -> Iterator[Script]:
    """KServe's gRPC client: what tests/integration/kserve/grpc_client.py asks of an address."""
    with running_script("kserve", "grpc_client") as script:
        yield script


@pytest.fixture(scope="module")
def direct(triton: TritonServer) -> Iterator[Client]:
    """A connection to the Triton server."""
    with Client(HOST, triton.http_port) as client:
        yield client


@pytest.fixture(scope="module")
def via_gateway(gateway: Gateway) -> Iterator[Client]:
    """A connection to the gateway."""
    with Client(gateway.host, gateway.port) as client:
        yield client


@pytest.fixture(scope="module")
def tap(triton: TritonServer) -> Iterator[Tap]:
    """A relay in front of the Triton server, which notes what passes."""
    with Tap(triton.http_port) as tap:
        yield tap


@pytest.fixture(scope="module")
def tapped(tap: Tap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A connection to a gateway, of which is seen what it sends to the server."""
    with (
        running_gateway(tmp_path_factory.mktemp("gateway"), tap.url) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client
