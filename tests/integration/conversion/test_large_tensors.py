"""Large tensors arrive complete, are streamed, and use a bounded amount of memory."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from tests.integration.support.client import HEADER_LENGTH, Client
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.infer_messages import read_outputs
from tests.integration.support.tap import Tap
from tests.integration.triton.models import named
from tests.integration.triton.server import HOST, TritonServer
from tests.support.checks.nothing_left_in_process import admin_url

pytestmark = pytest.mark.triton

MIB = 2**20
PIECE = MIB
MAX_GROWTH = 16 * MIB
LIMITS = {"max_request_bytes": "1GiB"}
INFER = "/v2/models/{}/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    """A server of its own: Triton keeps the shared memory that large tensors took."""
    with TritonServer(
        named("zeros", "identity_fp32", "identity_bytes", "with_parameters")
    ) as running:
        yield running


@pytest.fixture
def roomy(server: TritonServer) -> Iterator[TritonServer]:
    """The server, which afterwards gives back the shared memory that its models took."""
    yield server
    with Client(HOST, server.http_port) as client:
        for model in ("zeros", "with_parameters", "identity_fp32"):
            for call in ("unload", "load"):
                response = client.send("POST", f"/v2/repository/models/{model}/{call}", b"{}")
                assert response.status == 200


@contextmanager
def fresh(folder: Path, upstream: str) -> Iterator[tuple[Gateway, Client]]:
    """Run a gateway that has done no more than load what it needs: its peak is still to come."""
    with (
        running_gateway(folder, upstream, limits=LIMITS) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        for binary in (True, False):
            assert client.infer("zeros", zeros(1, binary=binary)).status == 200
        # What operators need is loaded behind the first calls.
        with urlopen(f"{admin_url(str(folder / 'gateway.yaml'))}/live") as response:
            assert response.status == 200
        yield gateway, client


def zeros(count: int, *, binary: bool) -> bytes:
    """Ask for so many zeros."""
    entry = {"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [count]}
    return json.dumps({"inputs": [entry], "parameters": {"binary_data_output": binary}}).encode()


@contextmanager
def open_response(gateway: Gateway, model: str, body: bytes) -> Iterator[http.client.HTTPResponse]:
    """Send a request, and leave it to the test how much of the response it reads, and when."""
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=60)
    try:
        connection.request("POST", INFER.format(model), body)
        yield connection.getresponse()
    finally:
        connection.close()


def pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := response.read(PIECE):
        yield piece


def check_zeros(response: Iterator[bytes], count: int) -> None:
    """Check a JSON response that is too large to be held here."""
    seen = b""
    while b'"data":[' not in seen:
        seen += next(response)
    head, mark, text = seen.partition(b'"data":[')
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": [count], "data": []}
    assert json.loads(head + mark + b"]}]}")["outputs"] == [output]
    expected = b"0.0," * (2 * PIECE)
    position, end = 0, count * len("0.0,") - 1
    tail = b""
    for piece in chain([text], response):
        data = piece[: end - position]
        offset = position % len("0.0,")
        assert data == expected[offset : offset + len(data)]
        position += len(data)
        tail += piece[len(data) :]
    assert (position, tail) == (end, b"]}]}")


def test_json_response_is_streamed(server: TritonServer, tmp_path: Path) -> None:
    """64 MB: while the client does not read on, the gateway does not take in the rest."""
    count = 16_000_000
    with Tap(server.http_port) as tap, fresh(tmp_path, tap.url) as (gateway, _):
        idle = gateway.memory()
        tap.forget()
        with open_response(gateway, "zeros", zeros(count, binary=False)) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "application/json"
            assert HEADER_LENGTH not in response.headers
            first = response.read(1000)
            assert len(first) == 1000
            assert tap.wait_until_still() < 32 * MIB
            check_zeros(chain([first], pieces(response)), count)
        assert tap.answered > count * 4
        assert gateway.memory("VmHWM") - idle < MAX_GROWTH


def test_memory_for_a_large_json_request(roomy: TritonServer, tmp_path: Path) -> None:
    """55 MB of text: its binary form is held, and no more than a piece of the text."""
    some = np.random.default_rng(2).random(10_000, dtype=np.float32)
    times = 300
    data = ",".join(map(str, some.tolist())).encode()
    count = some.size * times
    head = f'{{"inputs": [{{"name": "INPUT0", "datatype": "FP32", "shape": [{count}], "data": ['
    tail = b']}], "parameters": {"binary_data_output": true}}'
    chunks = [head.encode(), data, *[b"," + data] * (times - 1), tail]
    size = sum(map(len, chunks))
    assert size > 50_000_000
    with fresh(tmp_path, roomy.http_url) as (gateway, client):
        idle = gateway.memory()
        response = client.infer("identity_fp32", iter(chunks), {"Content-Length": str(size)})
        grown = gateway.memory("VmHWM") - idle
    (output,) = read_outputs(response)
    assert output.data == some.tobytes() * times
    assert grown < 1.3 * 4 * count + MAX_GROWTH
