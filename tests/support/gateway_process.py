"""Runs the command line in processes of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.addresses import HOST
from tests.support.checks.nothing_left_in_process import (
    admin_url,
    check_alive,
    check_log,
    until_nothing_is_left,
)

TIMEOUT = 30
"""Seconds after which a test fails that waits for a process."""
TENSORGATE = str(Path(sys.executable).with_name("tensorgate"))
FAST_FILE_WATCH = (
    sys.executable,
    "-c",
    "from gateway.system import file_watcher; file_watcher.POLL_INTERVAL = 0.1;"
    " from gateway.cli import main; main()",
)
"""The same command, which polls its files ten times a second."""


class Process:
    """A running command, and its standard error so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""
        self.is_stopping = False
        """It was sent a signal other than SIGHUP."""

    async def wait_for_output(self, pattern: str) -> re.Match[str]:
        """Read standard error up to a line that matches."""
        assert self.process.stderr is not None
        async with asyncio.timeout(TIMEOUT):
            while (found := re.search(pattern, self.said)) is None:
                line = await self.process.stderr.readline()
                assert line, self.said
                self.said += line.decode()
        return found

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.is_stopping |= number != signal.SIGHUP
        self.process.send_signal(number)

    @property
    def pid(self) -> int:
        """Return its id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Return whether it has not ended yet."""
        return self.process.returncode is None

    async def end(self) -> tuple[int, str, str]:
        """Wait for its end; return its status, and all that it printed."""
        async with asyncio.timeout(TIMEOUT):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), self.said + err.decode()


@asynccontextmanager
async def running_process(*command: str, **environ: str) -> AsyncIterator[Process]:
    """Run a command, and kill it if it is still running in the end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environ},
    )
    running = Process(process)
    try:
        yield running
    finally:
        if running.running:
            process.kill()
        _, err = await process.communicate()
        running.said += err.decode()


async def run(*command: str, **environ: str) -> tuple[int, str, str]:
    """Run a command to its end; return its status, and all that it printed."""
    async with running_process(*command, **environ) as process:
        return await process.end()


def write_settings(file: Path, url: str, listen: str = f"{HOST}:0", more: str = "") -> str:
    """Write a settings file, and return its name."""
    file.write_text(
        f"listen: {listen}\nupstreams: {{demo: {{endpoints: [{url}], dialect: triton}}}}\n{more}"
    )
    return str(file)


@asynccontextmanager
async def gateway_process(
    config: str, command: Sequence[str] = (TENSORGATE,), unchecked: str = "", **environ: str
) -> AsyncIterator[tuple[Process, str]]:
    """Run a gateway; return it, and where it listens.

    At the end it must hold nothing of its peers and serve the next client, and have logged no
    traceback: see ``nothing_left_in_process``. ``unchecked`` says why it may hold something.
    """
    admin = admin_url(config)
    async with running_process(*command, "serve", config, **environ) as process:
        found = await process.wait_for_output(r"listening on (\S+)")
        yield process, found[1]
        if process.running and not process.is_stopping and not unchecked:
            if admin is not None:
                await until_nothing_is_left(admin)
            await check_alive(found[1])
    check_log(process.said)
