"""Pytest fixtures that start each server once per run, on first use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from tests.integration.environment import MissingServerError
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.python_server import KServe, MLServer, Script, running_script
from tests.integration.support.real_server import HOST, InferenceServer, Reached, RealServer
from tests.integration.triton.server import TritonServer
from tests.support.servers.openvino import OpenVino

Server = TypeVar("Server", bound=RealServer)


@pytest.fixture(scope="session")
def triton() -> Iterator[TritonServer]:
    """A Triton server with all models."""
    with _running(TritonServer()) as server:
        yield server


@pytest.fixture(scope="session")
def kserve() -> Iterator[KServe]:
    """A KServe model server with all models."""
    with _running(KServe()) as server:
        yield server


@pytest.fixture(scope="session")
def mlserver() -> Iterator[MLServer]:
    """An MLServer with all models."""
    with _running(MLServer()) as server:
        yield server


@pytest.fixture(scope="session")
def openvino() -> Iterator[OpenVino]:
    """A server that stands in for OpenVINO Model Server, with all models."""
    with OpenVino() as server:
        yield server


_NAMES = ("triton", "kserve", "mlserver")
_REAL = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in _NAMES]
_REAL_OVER_GRPC = [
    pytest.param(f"{name} over gRPC", marks=getattr(pytest.mark, name)) for name in _NAMES
]


@pytest.fixture(scope="session", params=[*_REAL, "openvino"])
def any_server(request: pytest.FixtureRequest) -> InferenceServer:
    """Each of the servers in turn."""
    server: InferenceServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session", params=_REAL)
def real_server(request: pytest.FixtureRequest) -> RealServer:
    """Each of the servers that speak gRPC, too."""
    server: RealServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session", params=[*_REAL, "openvino", *_REAL_OVER_GRPC])
def any_upstream(request: pytest.FixtureRequest) -> Reached:
    """Each of the servers in turn, over HTTP and over gRPC."""
    name, _, transport = request.param.partition(" over ")
    server = request.getfixturevalue(name)
    return Reached(name, server.dialect, server.grpc_url if transport else server.http_url)


@pytest.fixture(scope="session")
def any_gateway(
    any_upstream: Reached, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway in front of each of the servers in turn, which finds out what that one is."""
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, any_upstream.url, dialect="auto") as running:
        yield running


@contextmanager
def _running(server: Server) -> Iterator[Server]:
    """Run a server.

    A missing one is a failure, not a skip: a test that cannot run must be seen.
    """
    try:
        server.start()
    except MissingServerError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield server
    finally:
        server.stop()


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
