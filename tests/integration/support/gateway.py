"""Runs the gateway as `tensorgate serve` starts it."""

import asyncio
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tests.support.addresses import free_address
from tests.support.checks.nothing_left_in_process import admin_url, until_nothing_is_left

ROOT = Path(__file__).parents[3]
TENSORGATE = Path(sysconfig.get_path("scripts")) / "tensorgate"

# The same guard as the servers have: it ends with the tests, however they end.
_BOUND_CHILD = Path(__file__).with_name("bound_child.py")
_LISTENING = re.compile(r"listening on http://([\d.]+):(\d+)$", re.MULTILINE)
_POLL_SECONDS = 0.02


class GatewayError(Exception):
    """The gateway could not be started."""


class Gateway:
    """A process of `tensorgate serve CONFIG`, whose log goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, admin: str | None) -> None:
        self._process = process
        self._log = log
        self.admin = admin
        """The URL of its admin address, where it has one that is known."""
        self.expected_error = ""
        """A text in each error that the test causes; without it none may be logged."""
        found = self._wait_until_listening(20)
        self.host, self.port = found[1], int(found[2])

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

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def stop(self, seconds: float = 15) -> int:
        """Send SIGTERM, wait at most so long, and answer the exit status."""
        self._process.terminate()
        return self._process.wait(seconds)

    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def _wait_until_listening(self, seconds: float) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while (found := _LISTENING.search(self.log)) is None:
            status = self._process.poll()
            if status is not None:
                raise GatewayError(f"the gateway ended with status {status}:\n{self.log}")
            if time.monotonic() > deadline:
                raise GatewayError(f"the gateway was not ready in {seconds} s:\n{self.log}")
            time.sleep(_POLL_SECONDS)
        return found


@contextmanager
def running_gateway(
    folder: Path,
    upstream: str,
    *,
    dialect: str = "triton",
    route: Mapping[str, Any] | None = None,
) -> Iterator[Gateway]:
    """Run a gateway with settings of its own in front of one server; then stop it as it should be.

    ``upstream`` is the server's URL, ``dialect`` how it speaks. Fails as ``serving_by`` does.
    """
    settings = {
        "listen": "127.0.0.1:0",
        "upstreams": {"server": {"endpoints": [upstream], "dialect": dialect}},
        "routes": [{"upstream": "server", **(route or {})}],
    }
    with gateway_with_settings(folder, settings) as gateway:
        yield gateway


@contextmanager
def gateway_with_settings(
    folder: Path, settings: Mapping[str, Any], command: Sequence[str] = (str(TENSORGATE),)
) -> Iterator[Gateway]:
    """Run a gateway by these settings; then stop it as it should be.

    ``command`` is what takes the arguments of `tensorgate`. Fails unless it holds nothing of its
    peers, ends well and has logged no fault of its own.
    """
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump({"admin": free_address(), **settings}))
    log = folder / "log"
    guard = [sys.executable, "-I", "-S", str(_BOUND_CHILD), str(os.getpid())]
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [*guard, *command, "serve", str(config)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            gateway = Gateway(process, log, admin_url(str(config)))
            yield gateway
            if gateway.admin is not None and gateway.is_alive():
                assert_nothing_left(gateway.admin)
            assert gateway.stop() == 0, gateway.log
            assert_no_errors_logged(gateway.log, gateway.expected_error)
        finally:
            process.kill()


def assert_nothing_left(admin: str) -> None:
    """Fail where a gateway with this admin address holds something of peers that are gone.

    Tests with an event loop ask for themselves: their connections close as the loop goes on.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return
    asyncio.run(until_nothing_is_left(admin))


def assert_no_errors_logged(log: str, expected: str = "") -> None:
    """Fail where a log tells of an error that nothing in the gateway was made to handle.

    Lines with the ``expected`` text are not such errors.
    """
    assert "Traceback" not in log, log[log.index("Traceback") - 1000 :][:4000]
    errors = [line for line in log.splitlines() if " ERROR " in line]
    assert [line for line in errors if not expected or expected not in line] == []
