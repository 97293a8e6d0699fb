"""The model lists of servers of every kind are merged into one response."""

from collections.abc import Iterator

import pytest

from tests.integration.kserve.server import KServe
from tests.integration.mlserver.server import MLServer
from tests.integration.support.client import Client
from tests.integration.support.gateway import gateway_with_settings
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


def has_list(servers: dict[str, InferenceServer]) -> list[InferenceServer]:
    return [server for name, server in servers.items() if name != "openvino"]


def listed_by(server: InferenceServer) -> Listed:
    """Ask a server itself, as it wants to be asked; a version is None where it says none."""
    with Client("127.0.0.1", server.http_port) as client:
        if server.name == "kserve":
            models = client.get("/v1/models").fields["models"]
            return {(server.name, name, None) for name in models}
        index = client.send("POST", INDEX, b"{}").fields
        return {(server.name, entry["name"], entry.get("version")) for entry in index}


@pytest.mark.parametrize("body", [None, b'{"ready": true}'])
def test_the_index_merges_all_servers_that_list_models(
    via_gateway: Client, servers: dict[str, InferenceServer], body: bytes | None
) -> None:
    response = via_gateway.send("POST", INDEX, body)
    assert response.status == 200, response.body
    entries = response.fields
    for entry in entries:
        of_kserve = entry["upstream"] == "kserve"
        assert set(entry) == {"name", "upstream"} if of_kserve else entry["state"] == "READY"
    listed = [(entry["upstream"], entry["name"], entry.get("version")) for entry in entries]
    lists = [listed_by(server) for server in has_list(servers)]
    assert all(lists)
    assert sorted(listed, key=str) == sorted(set().union(*lists), key=str)
    assert response.headers[FAILED] == "upstream 'openvino'"


def test_the_v1_list_merges_all_servers_that_list_models(
    via_gateway: Client, servers: dict[str, InferenceServer]
) -> None:
    response = via_gateway.get("/v1/models")
    assert response.status == 200, response.body
    models = response.fields["models"]
    assert len(models) == len(set(models))
    expected = {name for server in has_list(servers) for _, name, _ in listed_by(server)}
    assert set(models) == expected
    for server in has_list(servers):
        assert {model.name for model in server.models} <= expected
    assert response.headers[FAILED] == "upstream 'openvino'"
