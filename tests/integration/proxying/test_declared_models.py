"""Declared models are compared with a real Triton, and requests must match them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.support.client import HEADER_LENGTH, Client
from tests.integration.support.gateway import TENSORGATE, gateway_with_settings
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


MODELS = {
    "identity_fp32": {
        "inputs": [_tensor("INPUT0", "FP32", -1)],
        "outputs": [_tensor("OUTPUT0", "FP32", -1)],
    },
    "batched_fp32": {
        "inputs": [_tensor("INPUT0", "FP32", 4)],
        "outputs": [_tensor("OUTPUT0", "FP32", 4)],
        "max_batch_size": 8,
    },
}
WRONG = {
    "batched_bytes": {"inputs": [_tensor("INPUT0", "BYTES", 1)], "max_batch_size": 4},
    "add": {"inputs": [_tensor("INPUT0", "FP64", -1), _tensor("INPUT2", "FP32", -1)]},
    "nowhere": {"inputs": [_tensor("INPUT0", "FP32", -1)]},
}


def _settings(url: str, models: dict[str, Any]) -> dict[str, Any]:
    upstreams = {"triton": {"endpoints": [url], "dialect": "triton"}}
    return {"listen": "127.0.0.1:0", "upstreams": upstreams, "models": models}


def _probe(folder: Path, settings: dict[str, Any]) -> tuple[int, list[str]]:
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    command = [str(TENSORGATE), "check", "--probe", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    return done.returncode, lines[lines.index("upstream triton:") + 2 :]


def test_check_compares_declared_models_with_the_server(
    triton: TritonServer, tmp_path: Path
) -> None:
    where = f"  {triton.http_url} (upstream triton): "
    good = [line for name in MODELS for line in (f"model {name}:", f"{where}as declared")]
    assert _probe(tmp_path, _settings(triton.http_url, MODELS)) == (0, good)
    status, lines = _probe(tmp_path, _settings(triton.http_url, MODELS | WRONG))
    assert status == 3
    assert lines[: len(good)] == good
    assert lines[len(good) : -1] == [
        "model batched_bytes:",
        f"{where}max_batch_size is 8, declared 4",
        "model add:",
        f"{where}input 'INPUT0' is FP32 [-1], declared FP64 [-1]; there is no input 'INPUT2'; "
        "input 'INPUT1' is not declared",
        "model nowhere:",
    ]
    assert lines[-1].startswith(f"{where}does not know it: 4")


def test_requests_must_match_the_declared_model(triton: TritonServer, tmp_path: Path) -> None:
    with (
        gateway_with_settings(tmp_path, _settings(triton.http_url, MODELS)) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        for rows, status in ((8, 200), (9, 400), (1, 200)):
            tensor = {**_tensor("INPUT0", "FP32", rows, 4), "data": [1.5] * 4 * rows}
            response = client.infer("batched_fp32", json.dumps({"inputs": [tensor]}).encode())
            assert response.status == status
        raw = client.infer("batched_fp32", bytes(16), {HEADER_LENGTH: "0"})
        assert raw.status == 200
        assert raw.fields["outputs"][0]["shape"] == [1, 4]
