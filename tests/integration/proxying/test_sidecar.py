"""The gateway runs as a sidecar, with the settings that come with it."""

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import ROOT, Gateway, assert_no_errors_logged
from tests.integration.support.tap import Tap
from tests.integration.triton.server import HOST
from tests.support.addresses import free_address

pytestmark = pytest.mark.triton

SIDECAR = ROOT / "config" / "sidecar.yaml"
# The drain time is 25 s; nothing may wait for it to pass once all calls are over.
WELL_BEFORE_DRAIN_TIME = 15


def test_sidecar_serves_the_example_of_the_readme_and_drains(tap: Tap, tmp_path: Path) -> None:
    body = b"""{"inputs": [
  {"name": "INPUT0", "datatype": "FP16", "shape": [3], "data": [1, 2.5, -3]}]}"""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl sends it
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.5]}
    slow = json.dumps({"inputs": [entry]}).encode()
    settings = {"TRITON_URL": tap.url, "LISTEN": f"{HOST}:0", "ADMIN": free_address()}
    with (
        Gateway(SIDECAR, tmp_path / "log", settings) as gateway,
        Client(gateway.host, gateway.port) as client,
        Client(gateway.host, gateway.port) as idle,
        ThreadPoolExecutor(1) as thread,
    ):
        response = idle.infer("identity_fp16", body, headers)
        assert response.status == 200
        assert response.fields["outputs"][0]["data"] == [1, 2.5, -3]

        running = thread.submit(client.infer, "slow", slow)
        tap.wait_for_request("POST /v2/models/slow/infer")
        gateway.terminate()
        # The idle connection takes one more request, and no new one is taken.
        while _answers(idle):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((gateway.host, gateway.port), 5)
        assert gateway.is_alive()
        response = running.result(60)
        assert response.status == 200
        assert response.fields["outputs"][0]["data"] == [1.5]
        assert gateway.wait(WELL_BEFORE_DRAIN_TIME) == 0
        assert '"POST /v2/models/identity_fp16/infer" 200' in gateway.log
        assert "stopped" in gateway.log
        assert "were aborted" not in gateway.log
        assert_no_errors_logged(gateway.log)


def _answers(client: Client) -> bool:
    try:
        return client.get("/v2/health/ready").status == 200
    except (OSError, http.client.HTTPException):
        return False
