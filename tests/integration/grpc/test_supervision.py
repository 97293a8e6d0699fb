"""The gateway supervises servers over gRPC: dialect, health, models, and who is gone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, gateway_with_settings
from tests.integration.support.real_server import RealServer

REASONS = {
    "triton": "dialect triton: {url} names itself 'triton', version '",
    "kserve": "dialect kserve: {url} names itself 'kserve', version '",
    "mlserver": "dialect json: {url} names itself 'mlserver', version '",
}


@pytest.fixture
def gateway(real_server: RealServer, tmp_path: Path) -> Iterator[Gateway]:
    upstream: dict[str, Any] = {
        "endpoints": [real_server.grpc_url],
        "health_check": {"interval": "100ms"},
        "model_discovery": real_server.name != "kserve",
    }
    settings = {
        "listen": "127.0.0.1:0",
        "upstreams": {"server": upstream},
        "routes": [{"upstream": "server"}],
    }
    with gateway_with_settings(tmp_path, settings) as running:
        yield running


def test_health_models_and_dialect(gateway: Gateway, real_server: RealServer) -> None:
    with Client(gateway.host, gateway.port) as client:
        assert client.get("/v2/health/ready").status == 200
        assert client.get("/v2/models/add/ready").status == 200
        assert client.get("/v2/models/nope/ready").status in (400, 404, 500, 503)
        assert client.get("/v2/models/add").fields["outputs"] == [
            {"name": name, "datatype": "FP32", "shape": [-1]} for name in ("SUM", "DIFFERENCE")
        ]
        index = client.send("POST", "/v2/repository/index", b"{}")
        if real_server.name == "kserve":
            assert index.status in (200, 501)
        else:
            names = {entry["name"] for entry in index.fields}
            assert names == {model.name for model in real_server.models}
            assert {entry["state"] for entry in index.fields} == {"READY"}
    assert REASONS[real_server.name].format(url=real_server.grpc_url) in gateway.log
