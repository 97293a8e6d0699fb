"""Clients of a Triton keep their own regions, and get nothing of the gateway's."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.integration.support.client import Client, check_same
from tests.integration.support.gateway import Gateway, gateway_with_settings
from tests.integration.triton.models import named
from tests.integration.triton.server import HOST, SHARED_MEMORY, TritonServer

pytestmark = pytest.mark.triton

_ALL = "/v2/systemsharedmemory"
_VALUES = np.array([1.5, -2], np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(named("identity_fp32")) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose server has one of its regions, and both protocols."""
    endpoint = {"http": server.http_url, "grpc": server.grpc_url}
    upstream = {"endpoints": [endpoint], "shared_memory": {"size": "1MiB"}, "dialect": "triton"}
    settings = {
        "listen": f"{HOST}:0",
        "upstreams": {"server": upstream},
        "routes": [{"upstream": "server"}],
    }
    with gateway_with_settings(tmp_path_factory.mktemp("gateway"), settings) as running:
        for _ in range(400):
            if "1 MiB of shared memory" in running.log:
                break
            Event().wait(0.05)
        yield running


@pytest.fixture
def own(direct: Client, gateway: Gateway) -> str:
    """The name of the gateway's region."""
    (name,) = [each for each in _names(direct) if each.startswith("tensorgate-")]
    return name


@pytest.fixture
def direct(server: TritonServer) -> Iterator[Client]:
    with Client(HOST, server.http_port) as client:
        yield client


@pytest.fixture
def via_gateway(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.host, gateway.port) as client:
        yield client


@pytest.fixture
def grpc_client(gateway: Gateway) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(gateway.address) as client:
        yield client


@pytest.fixture
def mine() -> Iterator[str]:
    """The name of a file of shared memory with the values, as its key has it."""
    path = SHARED_MEMORY / f"client-{secrets.token_hex(4)}"
    path.write_bytes(_VALUES.tobytes() + bytes(_VALUES.nbytes))
    yield f"/{path.name}"
    path.unlink()


def _names(client: Client) -> list[str]:
    return [each["name"] for each in json.loads(client.get(f"{_ALL}/status").body)]


def _request(region: str, offset: int = 0) -> bytes:
    place = {"shared_memory_region": region, "shared_memory_byte_size": _VALUES.nbytes}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "parameters": place}
    output = {"name": "OUTPUT0", "parameters": {**place, "shared_memory_offset": offset}}
    return json.dumps({"inputs": [tensor], "outputs": [output] if offset else []}).encode()


def test_clients_over_http_get_nothing_of_the_region(
    via_gateway: Client, direct: Client, own: str
) -> None:
    refused = via_gateway.infer("identity_fp32", _request(own))
    assert refused.status == 400
    assert own in refused.fields["error"]
    for path in (f"/region/{own}/unregister", f"/region/{own}/register"):
        assert via_gateway.send("POST", _ALL + path, b"{}").status == 403
    assert _names(via_gateway) == []
    assert _names(direct) == [own]
    unknown = direct.get(f"{_ALL}/region/tensorgate-x/status")
    check_same(via_gateway.get(f"{_ALL}/region/tensorgate-x/status"), unknown)
    own_status = via_gateway.get(f"{_ALL}/region/{own}/status")
    assert (own_status.status, own_status.body) == (
        unknown.status,
        unknown.body.replace(b"tensorgate-x", own.encode()),
    )


def test_clients_over_http_keep_their_own_regions(
    via_gateway: Client, direct: Client, own: str, mine: str
) -> None:
    size = 2 * _VALUES.nbytes
    region = {"key": mine, "offset": 0, "byte_size": size}
    path = f"{_ALL}/region/mine"
    assert via_gateway.send("POST", f"{path}/register", json.dumps(region).encode()).status == 200
    try:
        assert _names(via_gateway) == ["mine"]
        check_same(via_gateway.get(f"{path}/status"), direct.get(f"{path}/status"))
        served = via_gateway.infer("identity_fp32", _request("mine", _VALUES.nbytes))
        assert served.status == 200
        assert (SHARED_MEMORY / mine[1:]).read_bytes() == _VALUES.tobytes() * 2
    finally:
        assert via_gateway.send("POST", f"{path}/unregister", b"").status == 200
    assert _names(direct) == [own]


def test_client_that_unregisters_all_regions_takes_none_of_the_gateway(
    via_gateway: Client, direct: Client, own: str, mine: str, grpc_client: Any
) -> None:
    """With the server alone, they would all go; its response is the same."""
    region = json.dumps({"key": mine, "offset": 0, "byte_size": _VALUES.nbytes}).encode()
    for over_grpc in (False, True):
        for name in ("mine", "my%20own"):
            assert direct.send("POST", f"{_ALL}/region/{name}/register", region).status == 200
            assert own in _names(direct)
            assert name in _names(via_gateway)
            if over_grpc:
                grpc_client.unregister_system_shared_memory()
            else:
                check_same(
                    via_gateway.send("POST", f"{_ALL}/unregister", b""),
                    direct.send("POST", f"{_ALL}/region/none/unregister", b""),
                )
            assert _names(direct) == [own]
    large = {"name": "INPUT0", "datatype": "FP32", "shape": [50_000], "data": [1.5] * 50_000}
    assert (
        via_gateway.infer("identity_fp32", json.dumps({"inputs": [large]}).encode()).status == 200
    )
    assert _names(direct) == [own]  # one that the server did not know would be another by now


def test_clients_over_grpc_get_nothing_of_the_region_and_keep_their_own(
    grpc_client: Any, direct: Client, own: str, mine: str
) -> None:
    refusals: list[Callable[[], Any]] = [
        lambda: grpc_client.infer("identity_fp32", [_input(own)]),
        lambda: grpc_client.unregister_system_shared_memory(own),
        lambda: grpc_client.register_system_shared_memory(own, mine, 8),
        lambda: grpc_client.get_system_shared_memory_status(own),
    ]
    for refused in refusals:
        with pytest.raises(InferenceServerException, match=r"gateway's own|Unable to find"):
            refused()
    with pytest.raises(InferenceServerException) as unknown:
        grpc_client.get_system_shared_memory_status("none")
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    assert unknown.value.message() == "Unable to find system shared memory region: 'none'"
    name = "my own / region"
    grpc_client.register_system_shared_memory(name, mine, _VALUES.nbytes)
    try:
        assert sorted(_names(direct)) == sorted([name, own])
        listed = grpc_client.get_system_shared_memory_status(as_json=True)["regions"]
        assert list(listed) == [name]
        assert listed == grpc_client.get_system_shared_memory_status(name, as_json=True)["regions"]
        result = grpc_client.infer("identity_fp32", [_input(name)])
        assert result.as_numpy("OUTPUT0").tolist() == _VALUES.tolist()
    finally:
        grpc_client.unregister_system_shared_memory(name)
    assert _names(direct) == [own]


def _input(region: str) -> Any:
    tensor = triton_grpc.InferInput("INPUT0", [2], "FP32")
    tensor.set_shared_memory(region, _VALUES.nbytes)
    return tensor
