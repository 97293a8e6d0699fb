"""A denied or protected path stays so in every spelling that servers decode.

How the gateway reads each spelling is in tests/protocol/test_operations.py.
"""

import json
from collections.abc import Iterator

import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, gateway_with_settings
from tests.integration.support.real_server import HOST, InferenceServer

BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1.5, 2]}]}
).encode()
TYPE = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer secret"}

# A server that decodes paths answers these as it does the plain path.
DECODED = [
    "/v2/models/%69dentity_fp32/infer",
    "/v2/models/identity_fp32%2finfer",
    "/v2/models/identity_fp32/%69nfer",
    "/v2%2Fmodels/identity_fp32/infer",
]
# Some of these are infer requests to one server or other, or a redirection to one.
ODD = [
    "/v2/models/identity_fp32/infer%0A",
    "/v2/models/identity_fp32%2Fversions%2F1%2Finfer",
    "/v2/models/identity_fp32/%67enerate",
    "/v2/models/identity_fp32%252Finfer",
    "/v2/models/identity_fp32/infer/",
    "//v2/models/identity_fp32/infer",
    "/v2/models/x%2F..%2Fidentity_fp32/infer",
    "/v2/models/identity_fp32/infer%3Fx",
    "/v2/models/identity_fp32%00/infer",
    "/v1/models/identity_fp32%3Apredict",
    "/v1%2Fmodels%2Fidentity_fp32%3apredict",
]
SECRET = [
    "/v2/models/add",
    "/v2/models/%61dd",
    "/v2%2Fmodels%2Fadd",
    "/v2/models/add/%72eady",
    "/v2/models/x/../add",
    "/v1/models%2Fadd",
]


@pytest.fixture(scope="module")
def gateway(
    any_server: InferenceServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway that denies one model's inference, wants a key for another, and is open else."""
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "keys").write_text("secret\n")
    settings = {
        "listen": "127.0.0.1:0",
        "upstreams": {
            "server": {"endpoints": [any_server.http_url], "dialect": any_server.dialect}
        },
        "api_keys": {"people": {"file": str(folder / "keys")}},
        "routes": [
            {
                "match": {"model": "identity_fp32"},
                "upstream": "server",
                "deny_operations": ["infer", "generate"],
            },
            {"match": {"model": "add"}, "upstream": "server", "auth": ["people"]},
            {"upstream": "server"},
        ],
    }
    with gateway_with_settings(folder, settings) as running:
        yield running


@pytest.fixture
def via_gateway(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.host, gateway.port) as client:
        yield client


@pytest.fixture
def direct(any_server: InferenceServer) -> Iterator[Client]:
    with Client(HOST, any_server.http_port) as client:
        yield client


def decodes(server: InferenceServer) -> bool:
    return server.name in ("kserve", "mlserver")


def test_a_denied_path_is_denied_in_every_spelling(
    via_gateway: Client, direct: Client, any_server: InferenceServer
) -> None:
    for path in DECODED:
        decoded = direct.send("POST", path, BODY, TYPE).status == 200
        assert decoded is decodes(any_server), path
        assert via_gateway.send("POST", path, BODY, TYPE).status in (401, 403), path
    for path in ODD:
        assert via_gateway.send("POST", path, BODY, TYPE).status >= 400, path


def test_a_path_that_needs_a_key_needs_it_in_every_spelling(
    via_gateway: Client, any_server: InferenceServer
) -> None:
    for path in SECRET:
        assert via_gateway.get(path).status == 401, path
    # More may be encoded than has to be: it counts as the server sees it.
    status = 200 if decodes(any_server) else 404
    assert via_gateway.get("/v2/models/identity%5Ffp32").status == status
    assert via_gateway.send("GET", "/v2/models/%61dd", b"", KEY).status == status
