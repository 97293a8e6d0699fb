"""The gateway keeps working while servers die and come back."""

import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import running_gateway
from tests.integration.support.tap import Tap
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton

SLOW = b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [%d]}]}'
ZEROS = b'{"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [%d]}]}'


@pytest.fixture
def server() -> Iterator[TritonServer]:
    """A server that a test may stop and start again."""
    with TritonServer(named("slow", "zeros")) as running:
        yield running


def folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def test_a_server_that_dies_and_comes_back(server: TritonServer, tmp_path: Path) -> None:
    with (
        Tap(server.http_port) as tap,
        running_gateway(tmp_path, server.http_url) as gateway,
        running_gateway(folder(tmp_path, "tapped"), tap.url) as tapped,
        Client(gateway.host, gateway.port) as client,
        Client(tapped.host, tapped.port) as waiting,
        ThreadPoolExecutor(1) as thread,
    ):
        assert client.infer("zeros", ZEROS % 1).status == 200

        # One answer is on its way, and one is still awaited, when the server dies.
        connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=30)
        connection.request("POST", "/v2/models/zeros/infer", ZEROS % 32_000_000)
        begun = connection.getresponse()
        assert begun.read(1000)
        running = thread.submit(waiting.infer, "slow", SLOW % 20)
        tap.wait_for_request("POST /v2/models/slow/infer")
        server.stop(patience=0)

        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            begun.read()
        connection.close()
        response = running.result(30)
        assert response.status == 502
        assert "upstream 'server'" in response.error

        response = client.infer("zeros", ZEROS % 1)
        assert response.status == 503
        assert "upstream 'server'" in response.error
        assert client.get("/v2/health/ready").status == 503

        server.start()
        while client.get("/v2/health/ready").status != 200:  # for a second, what was found holds
            pass
        response = client.infer("zeros", ZEROS % 2)
        assert response.fields["outputs"][0]["data"] == [0.0, 0.0]
