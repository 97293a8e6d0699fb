"""`tensorgate check --probe` detects the dialect of real servers."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.kserve.server import KServe
from tests.integration.mlserver.server import MLServer
from tests.integration.support.gateway import TENSORGATE
from tests.integration.triton.server import TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.kserve, pytest.mark.mlserver]

IS = {
    "triton": "dialect triton{}: it names itself 'triton', version '2.",
    "kserve": "dialect kserve{}: it names itself 'kserve', version '0.",
    "mlserver": "dialect json{}: it names itself 'mlserver', version '1.",
}


@pytest.fixture(scope="module")
def urls(triton: TritonServer, kserve: KServe, mlserver: MLServer) -> dict[str, str]:
    """Each server's address, by its name."""
    return {"triton": triton.http_url, "kserve": kserve.http_url, "mlserver": mlserver.http_url}


def _probe(file: Path, urls: dict[str, str], **dialects: str) -> tuple[int, list[str]]:
    upstreams = {
        name: {"endpoints": [url], "dialect": dialects.get(name, "auto")}
        for name, url in urls.items()
    }
    shares = [{"name": name, "weight": 1} for name in urls]
    file.write_text(
        yaml.safe_dump({"upstreams": upstreams, "routes": [{"upstream": shares}]}, sort_keys=False)
    )
    command = [str(TENSORGATE), "check", "--probe", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.splitlines()[2:]
    assert lines[::2] == [f"upstream {name}:" for name in urls]
    return done.returncode, lines[1::2]


def test_check_knows_each_server(urls: dict[str, str], tmp_path: Path) -> None:
    for dialects in ({}, {"triton": "triton", "kserve": "kserve", "mlserver": "json"}):
        status, lines = _probe(tmp_path / "gateway.yaml", urls, **dialects)
        assert status == 0
        for line, (name, url) in zip(lines, urls.items(), strict=True):
            found = IS[name].format(", as declared" if dialects else "")
            assert line.startswith(f"  {url}: ready; {found}")


def test_check_reports_a_wrong_dialect(urls: dict[str, str], tmp_path: Path) -> None:
    declared = {"kserve": "triton", "mlserver": "kserve"}
    status, lines = _probe(tmp_path / "gateway.yaml", urls, **declared)
    assert status == 3
    for name, line in zip(declared, lines[1:], strict=True):
        found = IS[name].format(f", but {declared[name]} is declared")
        assert line.startswith(f"  {urls[name]}: ready; {found}")
