"""Runs the command line in processes of its own."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import gateway
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
_FORK_SERVER = Path(__file__).with_name("servers") / "fork_server.py"
_COMMAND = "from gateway.__main__ import main; main()"
FAST_FILE_WATCH = (
    sys.executable,
    "-c",
    "from gateway.system import file_watcher; file_watcher.POLL_INTERVAL = 0.1;"
    " from gateway.cli import main; main()",
)
"""The same command, which polls its files ten times a second."""


class Process:
    """A running command, and its standard error so far."""

    def __init__(self, process: asyncio.subprocess.Process | Forked) -> None:
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
    def children(self) -> list[int]:
        """Return the ids of the processes that it has started."""
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [*map(int, text.split())]

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


class Forked:
    """A process of the fork server, with what the tests use of asyncio's own."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        self.stderr = stderr
        self._ended = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, program: str, arguments: Sequence[str], environ: dict[str, str]
    ) -> AsyncIterator[Forked]:
        """Start a program of Python with these arguments; it must have ended in the end."""
        command = {
            "program": program,
            "arguments": arguments,
            "environ": environ,
            "folder": os.getcwd(),
            "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        out, err = os.pipe(), os.pipe()
        asker, asked = socket.socketpair()
        with asked:
            fds = [out[1], err[1], asked.fileno()]
            socket.send_fds(_fork_server(), [json.dumps(command).encode()], fds)
        os.close(out[1])
        os.close(err[1])
        reader, writer = await asyncio.open_connection(sock=asker)
        async with _reader(out[0]) as stdout, _reader(err[0]) as stderr:
            process = cls(int(await reader.readline()), stdout, stderr)
            ended = asyncio.create_task(process._note_end(reader))
            try:
                yield process
            finally:
                await ended
                writer.close()
                await writer.wait_closed()

    async def _note_end(self, asked: asyncio.StreamReader) -> None:
        self.returncode = int(await asked.readline())
        self._ended.set()

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end; return its exit status."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        """Wait for its end; return the rest of what it has printed."""
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err


@asynccontextmanager
async def _reader(fd: int) -> AsyncIterator[asyncio.StreamReader]:
    """Read from a pipe."""
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb"))
    try:
        yield reader
    finally:
        transport.close()
        await asyncio.sleep(0)  # in which it closes


@cache
def _fork_server() -> socket.socket:
    """Start the fork server of this process; it ends with it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, str(_FORK_SERVER), str(its.fileno())]
        server = subprocess.Popen(command, pass_fds=[its.fileno()], env=_server_environ())
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def sockets_of_fork_server() -> int:
    """Return how many sockets of this process are for the fork server, which outlives tests."""
    return _fork_server.cache_info().currsize


def _server_environ() -> dict[str, str]:
    """Return an environment in which the fork server imports the gateway that is tested."""
    path = Path(gateway.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}


@asynccontextmanager
async def running_process(*command: str, **environ: str) -> AsyncIterator[Process]:
    """Run a command, and kill it if it is still running in the end.

    What serves is forked from a process that has imported the gateway.
    """
    async with _started(command, {**os.environ, **environ}) as process:
        running = Process(process)
        try:
            yield running
        finally:
            if running.running:
                process.kill()
            _, err = await process.communicate()
            running.said += err.decode()


@asynccontextmanager
async def _started(
    command: tuple[str, ...], environ: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process | Forked]:
    program = {(TENSORGATE,): _COMMAND, FAST_FILE_WATCH: FAST_FILE_WATCH[-1]}.get(command[:-2])
    if program is not None and command[-2] == "serve":
        async with Forked.running(program, [TENSORGATE, *command[-2:]], environ) as process:
            yield process
        return
    yield await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )


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
