"""The real Triton of the integration tests starts, stops and leaves nothing."""

import http.client
import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.support.client import Client
from tests.integration.support.real_server import HOST
from tests.integration.triton.models import named
from tests.integration.triton.server import SHARED_MEMORY, TritonServer

pytestmark = pytest.mark.triton


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
