"""The access log under faults: calls neither fail nor wait, and every lost line is counted."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.resilience.incident_page import is_shown
from tests.support.addresses import free_address
from tests.support.gateway import until
from tests.support.gateway_process import TIMEOUT
from tests.support.raw_client import connect
from tests.support.scale import SCALE
from tests.support.servers.scripted_server import ScriptedServer

CONNECTIONS = 8
LONG = 1800
"""Characters of a long target, so that few calls fill the memory for lines that wait."""
MANY = CONNECTIONS * 60
"""Calls with long targets: two workers cannot buffer the lines of twice as many."""
FEW = 400

_COMMAND = (
    sys.executable,
    "-c",
    "from gateway.observe import log_writer; log_writer._REPORT_INTERVAL = 0.5;"
    " log_writer.MAX_BUFFERED = 2**18;"
    " from gateway.cli import main; main()",
)
"""The command, which reports dropped lines twice a second, and buffers fewer lines."""
_LINE = re.compile(r"(call-\d+) 200 GET /v2/(x*) 127\.0\.0\.1 end")
_FORMAT = "'{request_id} {status} {method} {target} {client} end'"
_DROPPED = re.compile(r"access log \S+(?: \S+)* (\d+) lines were dropped")

each_count_of_workers = pytest.mark.parametrize("workers", [1, 2] if SCALE >= 1 else [2])


@dataclass
class _Running:
    """A gateway process, whose standard error is a file unless a test wants it otherwise."""

    process: asyncio.subprocess.Process
    url: str
    admin: str
    stderr: Path
    numbers: Iterator[int] = field(default_factory=count)
    called: list[int] = field(default_factory=list)
    """The numbers of the calls that had their response."""

    @property
    def calls(self) -> int:
        """Return how many calls had their response."""
        return len(self.called)

    async def call(self, calls: int, length: int = 0) -> None:
        """Make calls over several connections, each with a request id of its own."""

        async def client(calls: int) -> None:
            async with connect(self.url) as client:
                for _ in range(calls):
                    # Lines differ in length, so that a torn one would show.
                    number = next(self.numbers)
                    target = "/v2/" + "x" * (length or number % 300)
                    headers = {"X-Request-Id": f"call-{number}"}
                    response = await client.call("GET", target, headers=headers)
                    assert response.status == 200
                    self.called.append(number)

        await asyncio.gather(*(client(calls // CONNECTIONS) for _ in range(CONNECTIONS)))

    @property
    def said(self) -> str:
        """Return what it has logged itself."""
        return self.stderr.read_text()

    async def dropped(self) -> int:
        """Return the lines that were dropped, as the metrics say."""
        async with connect(self.admin) as client:
            text = (await client.call("GET", "/metrics")).body.decode()
        found = re.search(r"^tensorgate_access_log_dropped_lines_total (\S+)$", text, re.MULTILINE)
        assert found
        return int(float(found[1]))

    async def until_said(self, text: str) -> None:
        """Wait until it has logged a text."""
        await until(lambda: text in self.said, TIMEOUT)

    def pids(self) -> list[int]:
        """Return the ids of its processes: of the workers, if it has several."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [*map(int, children.split())] or [self.process.pid]

    async def stop(self) -> None:
        """Stop it; it ends as always."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT):
            assert await self.process.wait() == 0


@asynccontextmanager
async def _gateway(
    folder: Path,
    path: str | None,
    workers: int = 1,
    stdout: int = subprocess.DEVNULL,
    stderr: int | None = None,
) -> AsyncIterator[_Running]:
    address, admin, file = free_address(), free_address(), folder / "gateway.yaml"
    where = "" if path is None else f", path: {path}"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedServer())
        file.write_text(
            f"listen: {address}\nadmin: {admin}\nworkers: {workers}\noffload: 0\n"
            f"log: {{access: {{format: {_FORMAT}{where}}}}}\n"
            f"upstreams: {{one: {{endpoints: [{server.url}], dialect: triton}}}}\n"
        )
        said = folder / "stderr"
        written = stack.enter_context(said.open("w"))
        process = await asyncio.create_subprocess_exec(
            *(*_COMMAND, "serve", str(file)),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=written if stderr is None else stderr,
        )
        running = _Running(process, f"http://{address}", f"http://{admin}", said)
        try:
            await _until_listening(running.url)
            yield running
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _until_listening(url: str) -> None:
    async with asyncio.timeout(TIMEOUT):
        while True:
            with suppress(ConnectionRefusedError):
                async with connect(url):
                    return
            await asyncio.sleep(0.05)


def _lines(*files: Path) -> list[str]:
    return [line for file in files for line in file.read_text().splitlines()]


def _assert_whole_and_unique(lines: list[str]) -> None:
    torn = [line for line in lines if not _LINE.fullmatch(line)]
    assert not torn, torn[:3]
    ids = Counter(line.split()[0] for line in lines)
    assert len(ids) == len(lines), "a line is there twice"


# ------------------------------------------------------------------------------------ full disks


@each_count_of_workers
async def test_lines_beyond_the_largest_size_of_a_file_are_counted(
    workers: int, tmp_path: Path
) -> None:
    """As on a full disk, a write ends within a line, and all further ones fail."""
    log = tmp_path / "access.log"
    async with _gateway(tmp_path, str(log), workers) as gateway:
        await gateway.call(FEW)
        await until(lambda: len(_lines(log)) == FEW)
        most = log.stat().st_size + 200_001
        for pid in gateway.pids():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        await gateway.call(2 * MANY, LONG)
        await gateway.until_said("File too large")
        for pid in gateway.pids():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        await _assert_recovers(gateway, log, workers)


async def _assert_recovers(gateway: _Running, log: Path, workers: int) -> None:
    """Check that each line of the calls so far, and of others, is in the log or counted."""
    await until(lambda: gateway.said.count("works again") == workers, TIMEOUT)
    await gateway.call(FEW)
    counted = await gateway.dropped()
    await gateway.stop()
    assert any(is_shown(line) for line in gateway.said.splitlines() if "works again" in line)
    dropped = sum(map(int, _DROPPED.findall(gateway.said)))
    assert dropped == counted > 0
    lines = list(filter(None, _lines(log)))
    # A line that the full disk has cut was written again as a whole.
    whole = [line for line in lines if _LINE.fullmatch(line)]
    cut = [line for line in lines if not _LINE.fullmatch(line)]
    assert len(cut) <= workers
    assert all(any(line.startswith(part) for line in whole) for part in cut)
    _assert_whole_and_unique(whole)
    assert len(whole) + dropped == gateway.calls


# ------------------------------------------------------------------------------------ pipes


async def test_lines_for_a_stderr_that_nobody_reads_are_counted_and_no_call_waits(
    tmp_path: Path,
) -> None:
    reader, writer = os.pipe()
    async with _gateway(tmp_path, None, stderr=writer) as gateway:
        os.close(writer)
        await gateway.call(MANY, LONG)
        dropped = await gateway.dropped()
        assert 0 < dropped < MANY
        # The gateway's own log goes there, too, and must not wait either.
        gateway.process.send_signal(signal.SIGHUP)
        async with connect(gateway.admin) as client:
            for _ in range(5):
                assert (await client.call("GET", "/live")).status == 200
                await asyncio.sleep(0.1)
        lines: list[str] = []
        with os.fdopen(reader) as pipe:
            while len(lines) < MANY - dropped:
                line = await asyncio.to_thread(pipe.readline)
                assert line
                lines += [line.rstrip("\n")] * ("call-" in line)
            _assert_whole_and_unique(lines)
            await gateway.stop()


# ------------------------------------------------------------------------------------ rotation

ROTATIONS = 4


@asynccontextmanager
async def _loaded_gateway(log: Path) -> AsyncIterator[_Running]:
    """Run two workers under load, and stop them in the end, so that every line is written."""
    enough = asyncio.Event()
    async with _gateway(log.parent, str(log), workers=2) as gateway:

        async def load() -> None:
            while not enough.is_set():
                await gateway.call(CONNECTIONS * 20)

        calling = asyncio.create_task(load())
        try:
            yield gateway
        finally:
            enough.set()
            await calling
        await gateway.stop()


async def _until_written(file: Path) -> None:
    await until(lambda: file.exists() and file.stat().st_size, TIMEOUT)


@pytest.mark.parametrize("tells", [True, False], ids=["SIGHUP", "nothing said"])
async def test_no_line_is_lost_when_logrotate_renames_the_file(tells: bool, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    rotated = [tmp_path / f"access.log.{number}" for number in range(ROTATIONS)]
    async with _loaded_gateway(log) as gateway:
        for file in rotated:
            await _until_written(log)
            log.rename(file)
            if tells:
                gateway.process.send_signal(signal.SIGHUP)
        await _until_written(log)
    lines = _lines(*rotated, log)
    _assert_whole_and_unique(lines)
    assert len(lines) == gateway.calls
    assert "dropped" not in gateway.said


async def test_lines_stay_whole_when_logrotate_copies_and_truncates_the_file(
    tmp_path: Path,
) -> None:
    """What is written between copy and truncation is lost; nothing that is written later is."""
    log = tmp_path / "access.log"
    copies = [tmp_path / f"access.log.{number}" for number in range(ROTATIONS)]
    async with _loaded_gateway(log) as gateway:
        for copy in copies:
            await _until_written(log)
            shutil.copyfile(log, copy)
            os.truncate(log, 0)
        later = next(gateway.numbers)
        await gateway.call(FEW)
    assert "\0" not in log.read_text(), "it begins at its start again"
    _assert_whole_and_unique(_lines(*copies, log))
    logged = {line.split()[0] for line in _lines(log)}
    assert {f"call-{number}" for number in gateway.called if number > later} <= logged
    assert "dropped" not in gateway.said
