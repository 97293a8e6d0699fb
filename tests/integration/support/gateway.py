"""Runs the gateway as `tensorgate serve` starts it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.support.addresses import free_address
from tests.support.checks.nothing_left_in_process import admin_url, until_nothing_is_left

ROOT = Path(__file__).parents[3]
TENSORGATE = Path(sysconfig.get_path("scripts")) / "tensorgate"

# The same guard as the servers have: it ends with the tests, however they end.
_BOUND_CHILD = Path(__file__).with_name("bound_child.py")
_LISTENING = re.compile(r"listening on http://([\d.]+):(\d+)$", re.MULTILINE)
_MEMORY = re.compile(r"^(VmHWM|VmRSS):\s+(\d+) kB$", re.MULTILINE)
_POLL_SECONDS = 0.02


class GatewayError(Exception):
    """The gateway could not be started."""


class Gateway:
    """A process of `tensorgate serve CONFIG`; a context manager.

    ``environment`` is added to that of the tests. Its log goes to a file beside the settings.
    """

    def __init__(self, config: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._config = config
        self._log = log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self.host = ""
        self.port = 0

    def __enter__(self) -> Self:
        guard = [sys.executable, "-I", "-S", str(_BOUND_CHILD), str(os.getpid())]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*guard, str(TENSORGATE), "serve", str(self._config)],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_listening(20)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.address}"

    @property
    def log(self) -> str:
        """All that it has written to stdout and stderr."""
        return self._log.read_text()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._running().send_signal(signal.SIGTERM)

    def wait(self, seconds: float = 15) -> int:
        """Wait until it ends; answer its exit status."""
        return self._running().wait(seconds)

    def stop(self, seconds: float = 15) -> int:
        """Send SIGTERM, wait at most so long, and answer the exit status."""
        self.terminate()
        return self.wait(seconds)

    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return self._running().poll() is None

    def memory(self) -> int:
        """Return the memory that it has, in bytes (Linux only)."""
        return self._status()["VmRSS"]

    def peak_memory(self) -> int:
        """Return the most memory that it ever had, in bytes (Linux only)."""
        return self._status()["VmHWM"]

    def _status(self) -> dict[str, int]:
        text = Path(f"/proc/{self._running().pid}/status").read_text()
        return {name: int(size) * 1024 for name, size in _MEMORY.findall(text)}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise GatewayError("this gateway was not started")
        return self._process

    def _wait_until_listening(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (found := _LISTENING.search(self.log)) is None:
            status = self._running().poll()
            if status is not None:
                raise GatewayError(f"the gateway ended with status {status}:\n{self.log}")
            if time.monotonic() > deadline:
                raise GatewayError(f"the gateway was not ready in {seconds} s:\n{self.log}")
            time.sleep(_POLL_SECONDS)
        self.host, self.port = found[1], int(found[2])

    def _kill(self) -> None:
        process = self._running()
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def running_gateway(
    folder: Path,
    upstream: str,
    *,
    dialect: str = "triton",
    limits: Mapping[str, Any] | None = None,
    route: Mapping[str, Any] | None = None,
) -> Iterator[Gateway]:
    """Run a gateway with settings of its own in front of one server; then stop it as it should be.

    ``upstream`` is the server's URL, ``dialect`` how it speaks. Fails as ``serving_by`` does.
    """
    settings = {
        "listen": "127.0.0.1:0",
        "upstreams": {"server": {"endpoints": [upstream], "dialect": dialect}},
        "routes": [{"upstream": "server", **(route or {})}],
        "limits": dict(limits or {}),
    }
    with gateway_with_settings(folder, settings) as gateway:
        yield gateway


@contextmanager
def gateway_with_settings(folder: Path, settings: Mapping[str, Any]) -> Iterator[Gateway]:
    """Run a gateway by these settings; then stop it as it should be.

    Fails unless it holds nothing of its peers, ends well and has logged no fault of its own.
    """
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump({"admin": free_address(), **settings}))
    with Gateway(config, folder / "log", {}) as gateway:
        yield gateway
        admin = admin_url(str(config))
        if admin is not None and gateway.is_alive():
            assert_nothing_left(admin)
        assert gateway.stop() == 0, gateway.log
        assert_no_errors_logged(gateway.log)


def assert_nothing_left(admin: str) -> None:
    """Fail where a gateway with this admin address holds something of peers that are gone.

    Tests with an event loop ask for themselves: their connections close as the loop goes on.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return
    asyncio.run(until_nothing_is_left(admin))


def assert_no_errors_logged(log: str) -> None:
    """Fail where a log tells of an error that nothing in the gateway was made to handle."""
    assert "Traceback" not in log, log[log.index("Traceback") - 1000 :][:4000]
    assert " ERROR " not in log
