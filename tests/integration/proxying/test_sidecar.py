"""The gateway runs as a sidecar, with the settings that come with it."""

import http.client
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.support.client import Client, Response
from tests.integration.support.gateway import (
    ROOT,
    TENSORGATE,
    Gateway,
    assert_no_errors_logged,
    assert_nothing_left,
)
from tests.integration.support.tap import Tap
from tests.integration.triton.server import HOST, TritonServer
from tests.support.addresses import free_address

pytestmark = pytest.mark.triton

SIDECAR = ROOT / "config" / "sidecar.yaml"
SLOW = "POST /v2/models/slow/infer"
# It is 25 s; nothing may wait for it to pass once all calls are over.
WELL_BEFORE_DRAIN_TIME = 15

STREAM = "POST /v2/models/stream/generate_stream"


@contextmanager
def sidecar(folder: Path, upstream: str, **environment: str) -> Iterator[Gateway]:
    addresses = {"LISTEN": f"{HOST}:0", "ADMIN": free_address()}
    settings = {"TRITON_URL": upstream, **addresses, **environment}
    with Gateway(SIDECAR, folder / "log", settings) as gateway:
        yield gateway
        if gateway.is_alive():
            assert_nothing_left(f"http://{addresses['ADMIN']}")


@pytest.fixture
def tap(triton: TritonServer) -> Iterator[Tap]:
    """A relay that tells when a request has reached the server."""
    with Tap(triton.http_port) as tap:
        yield tap


class Background:
    """Makes a call in a thread of its own; ``answer`` waits for what it gives."""

    def __init__(self, call: Callable[[], Response]) -> None:
        self._call = call
        self._answer: Response | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._answer = self._call()

    def response(self) -> Response:
        self._thread.join(60)
        assert self._answer is not None
        return self._answer


def slow_body(seconds: float) -> bytes:
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [seconds]}
    return json.dumps({"inputs": [entry]}).encode()


def test_the_example_of_the_readme(triton: TritonServer, tmp_path: Path) -> None:
    body = b"""{"inputs": [
  {"name": "INPUT0", "datatype": "FP16", "shape": [3], "data": [1, 2.5, -3]}]}"""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl sends it
    with (
        sidecar(tmp_path, triton.http_url) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        response = client.infer("identity_fp16", body, headers)
        assert response.status == 200
        assert response.fields["outputs"][0]["data"] == [1, 2.5, -3]
        assert gateway.stop() == 0
        assert '"POST /v2/models/identity_fp16/infer" 200' in gateway.log
        assert_no_errors_logged(gateway.log)


def test_a_call_that_runs_at_sigterm_may_finish(tap: Tap, tmp_path: Path) -> None:
    with (
        sidecar(tmp_path, tap.url) as gateway,
        Client(gateway.host, gateway.port) as client,
        Client(gateway.host, gateway.port) as idle,
    ):
        assert idle.get("/v2/health/ready").status == 200
        running = Background(lambda: client.infer("slow", slow_body(1.5)))
        tap.wait_for_request(SLOW)
        gateway.terminate()
        # The idle connection takes one more request, and no new one is taken.
        while _answers(idle):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((gateway.host, gateway.port), 5)
        assert gateway.is_alive()
        response = running.response()
        assert response.status == 200
        assert response.fields["outputs"][0]["data"] == [1.5]
        assert gateway.wait(WELL_BEFORE_DRAIN_TIME) == 0
        assert "stopped" in gateway.log
        assert "were aborted" not in gateway.log
        assert_no_errors_logged(gateway.log)


def _answers(client: Client) -> bool:
    try:
        return client.get("/v2/health/ready").status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_a_stream_that_runs_at_sigterm_may_finish(tap: Tap, tmp_path: Path) -> None:
    with sidecar(tmp_path, tap.url) as gateway, Client(gateway.host, gateway.port) as client:
        path = STREAM.removeprefix("POST ")
        running = Background(lambda: client.send("POST", path, b'{"text_input": "hi"}'))
        tap.wait_for_request(STREAM)
        gateway.terminate()
        assert running.response().body.count(b"data:") == 5
        assert gateway.wait(WELL_BEFORE_DRAIN_TIME) == 0
        assert_no_errors_logged(gateway.log)


def test_a_call_longer_than_the_drain_timeout_is_dropped(tap: Tap, tmp_path: Path) -> None:
    with (
        sidecar(tmp_path, tap.url, DRAIN_TIMEOUT="200ms") as gateway,
        socket.create_connection((gateway.host, gateway.port), 30) as sock,
    ):
        body = slow_body(2)
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        tap.wait_for_request(SLOW)
        assert gateway.stop() == 0
        assert b"200 OK" not in _rest(sock)
        assert "1 calls did not finish in time and were aborted" in gateway.log
        assert_no_errors_logged(gateway.log)


def _rest(sock: socket.socket) -> bytes:
    seen = b""
    try:
        while piece := sock.recv(65536):
            seen += piece
    except ConnectionResetError:
        pass
    return seen


def test_an_idle_connection_does_not_delay_the_stop(tap: Tap, tmp_path: Path) -> None:
    with (
        sidecar(tmp_path, tap.url, DRAIN_TIMEOUT="24h") as gateway,
        socket.create_connection((gateway.host, gateway.port), 30) as silent,
        socket.create_connection((gateway.host, gateway.port), 30) as begun,
    ):
        begun.sendall(b"GET /v2/health/live HTTP/1.1\r\nHo")
        with Client(gateway.host, gateway.port) as client:
            assert client.get("/v2/health/live").status == 200
            assert gateway.stop() == 0
        assert _rest(silent) == b""
        assert _rest(begun) == b""


def test_limits_from_the_environment(triton: TritonServer, tmp_path: Path) -> None:
    with (
        sidecar(tmp_path, triton.http_url, REQUEST_BYTES="1KiB") as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        assert client.infer("identity_fp32", b" " * 2000).status == 413


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TENSORGATE), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_settings_are_checked(triton: TritonServer) -> None:
    done = run("check", "config/sidecar.yaml", TRITON_URL=triton.http_url)
    assert done.returncode == 0, done.stderr
    assert triton.http_url in done.stdout
    assert "127.0.0.1:8080" in done.stdout


def test_wrong_settings_are_told() -> None:
    done = run("serve", "config/sidecar.yaml", TRITON_URL="ftp://x", LISTEN="nowhere")
    assert done.returncode == 2
    assert "config/sidecar.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_told() -> None:
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        done = run("serve", "config/sidecar.yaml", LISTEN=address, ADMIN=free_address())
    assert done.returncode == 1
    assert address in done.stderr
    assert "Traceback" not in done.stderr
