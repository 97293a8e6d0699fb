"""The real Triton of the integration tests starts, stops and leaves nothing."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.environment import MissingServerError
from tests.integration.support.client import Client
from tests.integration.support.real_server import HOST, ServerError
from tests.integration.triton import installation
from tests.integration.triton.models import named
from tests.integration.triton.server import SHARED_MEMORY, TritonServer

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[3]


def regions(server: TritonServer) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{server.region_prefix}*"))


def gone(pid: int, within: float = 20.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("patience", [15.0, 0.0], ids=["on its own", "by force"])
def test_stop_leaves_nothing(patience: float) -> None:
    server = TritonServer(named("add"))
    server.start()
    pid, log = server.pid, server.log_path
    assert regions(server)
    server.stop(patience)
    assert gone(pid)
    assert not log.exists()
    assert not regions(server)
    assert not server.is_alive()


def test_a_crash_is_seen() -> None:
    """Triton 2.51 parses nested JSON by recursion, and ends with it."""
    data = "[" * 100_000 + "1" + "]" * 100_000
    tensor = '{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": ' + data + "}"
    body = b'{"inputs": [' + tensor.encode() + b"]}"
    with TritonServer(named("identity_fp32")) as server:
        with (
            Client(HOST, server.http_port) as client,
            pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)),
        ):
            client.infer("identity_fp32", body)
        assert server.wait() == -signal.SIGSEGV
        assert not server.is_alive()
    assert not regions(server)


def test_a_port_in_use_is_told(triton: TritonServer) -> None:
    taken = triton.grpc_port
    with pytest.raises(ServerError, match=f"{taken}: Address already in use"):
        TritonServer(named("add"), grpc_port=taken)


def test_a_failed_start_shows_the_log_and_leaves_nothing() -> None:
    """As when another program takes the port in the last moment."""
    server = TritonServer(named("add"))
    with socket.socket() as taken:
        taken.bind((HOST, server.http_port))
        taken.listen()
        with pytest.raises(ServerError, match="already in use"):
            server.start()
    assert not regions(server)
    assert not server.is_alive()


def test_server_ends_when_its_starter_is_killed() -> None:
    script = (
        "from tests.integration.triton.models import named\n"
        "from tests.integration.triton.server import TritonServer\n"
        "import time\n"
        "server = TritonServer(named('add'))\n"
        "server.start()\n"
        "print(server.pid, server.log_path.parent, flush=True)\n"
        "time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    with starter:
        assert starter.stdout is not None
        pid, folder = starter.stdout.readline().decode().split()
        starter.send_signal(signal.SIGKILL)
    assert gone(int(pid))
    subprocess.run(["rm", "-r", folder], check=True)


def test_missing_installation_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingServerError, match="make test"):
        installation.find(tmp_path)
