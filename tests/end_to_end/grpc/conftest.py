"""Servers over gRPC."""

import socket
from collections.abc import Iterator

import pytest

from tests.support.servers.grpc_server import GrpcServer, grpc_server


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    """A server that returns the inputs of a request as outputs."""
    with grpc_server() as running:
        yield running


@pytest.fixture
def gone() -> Iterator[str]:
    """The URL of a server that refuses connections; nobody else gets its port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield "grpc://{}:{}".format(*bound.getsockname())
