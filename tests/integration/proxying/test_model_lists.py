"""The model lists of servers of every kind are merged into one response."""

from collections.abc import Iterator

import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import gateway_with_settings
from tests.integration.support.python_server import KServe, MLServer
from tests.integration.support.real_server import InferenceServer
from tests.integration.triton.server import TritonServer
from tests.support.servers.openvino import OpenVino

pytestmark = [pytest.mark.triton, pytest.mark.kserve, pytest.mark.mlserver]

FAILED = "Tensorgate-Failed-Endpoints"
INDEX = "/v2/repository/index"

Listed = set[tuple[str, str, str | None]]


@pytest.fixture(scope="module")
def servers(
    triton: TritonServer, kserve: KServe, mlserver: MLServer, openvino: OpenVino
) -> dict[str, InferenceServer]:
    """All servers, by name."""
    return {server.name: server for server in (triton, kserve, mlserver, openvino)}


@pytest.fixture(scope="module")
def via_gateway(
    servers: dict[str, InferenceServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A connection to a gateway in front of all of them, which finds out what each is."""
    settings = {
        "listen": "127.0.0.1:0",
        "upstreams": {name: {"endpoints": [server.http_url]} for name, server in servers.items()},
        "routes": [{"upstream": [{"name": name, "weight": 1} for name in servers]}],
    }
    with (
        gateway_with_settings(tmp_path_factory.mktemp("gateway"), settings) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


def listed_by(server: InferenceServer) -> Listed:
    """Ask a server itself, as it wants to be asked; a version is None where it says none."""
    with Client("127.0.0.1", server.http_port) as client:
        if server.name == "kserve":
            models = client.get("/v1/models").fields["models"]
            return {(server.name, name, None) for name in models}
        index = client.send("POST", INDEX, b"{}").fields
        return {(server.name, entry["name"], entry.get("version")) for entry in index}


def test_lists_merge_those_of_all_servers_that_list_models(
    via_gateway: Client, servers: dict[str, InferenceServer]
) -> None:
    listing = [server for name, server in servers.items() if name != "openvino"]
    lists = [listed_by(server) for server in listing]
    assert all(lists)
    expected = set().union(*lists)
    for body in (None, b'{"ready": true}'):
        response = via_gateway.send("POST", INDEX, body)
        assert (response.status, response.headers[FAILED]) == (200, "upstream 'openvino'")
        for entry in response.fields:
            of_kserve = entry["upstream"] == "kserve"
            assert set(entry) == {"name", "upstream"} if of_kserve else entry["state"] == "READY"
        listed = [(each["upstream"], each["name"], each.get("version")) for each in response.fields]
        assert sorted(listed, key=str) == sorted(expected, key=str)
    response = via_gateway.get("/v1/models")
    assert (response.status, response.headers[FAILED]) == (200, "upstream 'openvino'")
    models = response.fields["models"]
    assert len(models) == len(set(models))
    assert set(models) == {name for _, name, _ in expected}
    assert {model.name for server in listing for model in server.models} <= set(models)
