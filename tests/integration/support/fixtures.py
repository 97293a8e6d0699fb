"""Pytest fixtures that start each server once per run, on first use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from tests.integration.environment import MissingServerError
from tests.integration.kserve.server import KServe
from tests.integration.mlserver.server import MLServer
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.real_server import InferenceServer, RealServer
from tests.integration.triton.server import TritonServer
from tests.support.servers.openvino.server import OpenVino

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


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("triton", marks=pytest.mark.triton),
        pytest.param("kserve", marks=pytest.mark.kserve),
        pytest.param("mlserver", marks=pytest.mark.mlserver),
        "openvino",
    ],
)
def any_server(request: pytest.FixtureRequest) -> InferenceServer:
    """Each of the servers in turn."""
    server: InferenceServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session")
def any_gateway(
    any_server: InferenceServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway in front of each of the servers in turn, which finds out what that one is."""
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, any_server.http_url, dialect="auto") as running:
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
