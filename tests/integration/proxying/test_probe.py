"""`tensorgate check --probe` detects the dialect of real servers."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.support.gateway import TENSORGATE
from tests.integration.support.python_server import KServe, MLServer
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
