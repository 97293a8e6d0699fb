"""`tensorgate check --probe` detects the dialect of real servers, and compares declared models."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.kserve.server import KServe
from tests.integration.mlserver.server import MLServer
from tests.integration.support.gateway import TENSORGATE
from tests.integration.triton.server import TritonServer

IS = {
    "triton": "dialect triton{}: it names itself 'triton', version '2.",
    "kserve": "dialect kserve{}: it names itself 'kserve', version '0.",
    "mlserver": "dialect json{}: it names itself 'mlserver', version '1.",
}


def _probe(file: Path, **settings: Any) -> tuple[int, list[str]]:
    """Return the exit status, and the lines about the servers."""
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    command = [str(TENSORGATE), "check", "--probe", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    first = next(iter(settings["upstreams"]))
    return done.returncode, lines[lines.index(f"upstream {first}:") :]


@pytest.mark.triton
@pytest.mark.kserve
@pytest.mark.mlserver
def test_check_knows_each_server(
    triton: TritonServer, kserve: KServe, mlserver: MLServer, tmp_path: Path
) -> None:
    servers = {server.name: server for server in (triton, kserve, mlserver)}
    shares = [{"name": name, "weight": 1} for name in servers]
    for is_declared in (False, True):
        upstreams = {
            name: {
                "endpoints": [server.http_url],
                "dialect": server.dialect if is_declared else "auto",
            }
            for name, server in servers.items()
        }
        status, lines = _probe(
            tmp_path / "gateway.yaml", upstreams=upstreams, routes=[{"upstream": shares}]
        )
        assert status == 0
        assert lines[::2] == [f"upstream {name}:" for name in servers]
        for line, (name, server) in zip(lines[1::2], servers.items(), strict=True):
            found = IS[name].format(", as declared" if is_declared else "")
            assert line.startswith(f"  {server.http_url}: ready; {found}")


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


@pytest.mark.triton
def test_check_compares_declared_models_with_the_server(
    triton: TritonServer, tmp_path: Path
) -> None:
    where = f"  {triton.http_url} (upstream triton): "
    good = [line for name in MODELS for line in (f"model {name}:", f"{where}as declared")]
    file = tmp_path / "gateway.yaml"
    upstreams = {"triton": {"endpoints": [triton.http_url], "dialect": "triton"}}
    status, (_, _, *lines) = _probe(file, upstreams=upstreams, models=MODELS)
    assert (status, lines) == (0, good)
    status, (_, _, *lines) = _probe(file, upstreams=upstreams, models=MODELS | WRONG)
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
