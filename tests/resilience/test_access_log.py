"""The access log under faults: calls neither fail nor wait, and every lost line is counted."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.resilience.incident_page import is_shown
from tests.support.gateway import until
from tests.support.gateway_process import TIMEOUT
from tests.support.operator import OperatedGateway, operated_gateway
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer

CONNECTIONS = 8
LONG = 1800
"""Characters of a long target, so that few calls fill the memory for lines that wait."""
MANY = CONNECTIONS * 120
"""Calls with long targets: two workers cannot buffer the lines of as many."""
FEW = 400
ROTATIONS = 4

_COMMAND = (
    sys.executable,
    "-c",
    "from gateway.observe import log_writer; log_writer.REPORT_INTERVAL = 0.5;"
    " log_writer.MAX_BUFFERED = 2**18;"
    " from gateway.cli import main; main()",
)
"""The command, which reports dropped lines twice a second, and buffers fewer lines."""
_LINE = re.compile(r"(call-\d+) 200 GET /v2/(x*) 127\.0\.0\.1 end")
_FORMAT = "'{request_id} {status} {method} {target} {client} end'"
_DROPPED = re.compile(r"access log \S+(?: \S+)* (\d+) lines were dropped")


@dataclass
class _Running(OperatedGateway):
    """A gateway process of two workers, and the numbers of the calls that it has answered."""

    numbers: count[int] = field(default_factory=count)
    called: list[int] = field(default_factory=list)

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

    async def dropped(self) -> int:
        """Return the lines that were dropped, as the metrics say."""
        (found,) = await self.operator.samples("tensorgate_access_log_dropped_lines_total")
        return int(found.value)

    async def stop(self) -> str:
        """Stop it; return all that it has logged."""
        self.process.signal(signal.SIGTERM)
        status, _, said = await self.process.end()
        assert status == 0
        return said


@asynccontextmanager
async def _gateway(folder: Path, log: Path | None) -> AsyncIterator[_Running]:
    where = "" if log is None else f", path: {log}"
    async with ScriptedServer() as server:
        settings = (
            f"workers: 2\noffload: 0\nlog: {{access: {{format: {_FORMAT}{where}}}}}\n"
            f"upstreams: {{demo: {{endpoints: [{server.url}], dialect: triton}}}}\n"
        )
        async with operated_gateway(folder, settings, _COMMAND) as gateway:
            yield _Running(gateway.process, gateway.url, gateway.file, gateway.operator)


def _lines(*files: Path) -> list[str]:
    return [line for file in files for line in file.read_text().splitlines()]


def _assert_whole_and_unique(lines: list[str]) -> None:
    torn = [line for line in lines if not _LINE.fullmatch(line)]
    assert not torn, torn[:3]
    ids = Counter(line.split()[0] for line in lines)
    assert len(ids) == len(lines), "a line is there twice"


async def test_lines_beyond_the_largest_size_of_a_file_are_counted(tmp_path: Path) -> None:
    """As on a full disk, a write ends within a line, and all further ones fail."""
    log = tmp_path / "access.log"
    async with _gateway(tmp_path, log) as gateway:
        await gateway.call(FEW)
        await until(lambda: len(_lines(log)) == FEW)
        most = log.stat().st_size + 200_001
        for pid in gateway.process.children:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        await gateway.call(MANY, LONG)
        await gateway.process.wait_for_output("File too large")
        for pid in gateway.process.children:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        await gateway.process.wait_for_output("(?s)(works again.*){2}")
        await gateway.call(FEW)
        counted = await gateway.dropped()
        said = await gateway.stop()
    assert any(is_shown(line) for line in said.splitlines() if "works again" in line)
    assert sum(map(int, _DROPPED.findall(said))) == counted > 0
    lines = list(filter(None, _lines(log)))
    # A line that was cut was written again as a whole.
    whole = [line for line in lines if _LINE.fullmatch(line)]
    cut = [line for line in lines if not _LINE.fullmatch(line)]
    assert len(cut) <= 2
    assert all(any(line.startswith(part) for line in whole) for part in cut)
    _assert_whole_and_unique(whole)
    assert len(whole) + counted == len(gateway.called)


async def test_lines_for_a_stderr_that_nobody_reads_are_counted_and_no_call_waits(
    tmp_path: Path,
) -> None:
    async with _gateway(tmp_path, None) as gateway:
        await gateway.call(MANY, LONG)
        dropped = await gateway.dropped()
        assert 0 < dropped < MANY
        # The gateway's own log goes there, too, and must not wait either.
        gateway.process.signal(signal.SIGHUP)
        for _ in range(5):
            await gateway.operator.text("/live")
            await asyncio.sleep(0.1)
        lines = [line for line in (await gateway.stop()).splitlines() if "call-" in line]
    _assert_whole_and_unique(lines)
    assert len(lines) >= MANY - dropped


# ------------------------------------------------------------------------------------ rotation


@asynccontextmanager
async def _loaded_gateway(log: Path) -> AsyncIterator[_Running]:
    """Run a gateway under load, and stop it in the end, so that every line is written."""
    enough = asyncio.Event()
    async with _gateway(log.parent, log) as gateway:

        async def load() -> None:
            while not enough.is_set():
                await gateway.call(CONNECTIONS * 20)

        calling = asyncio.create_task(load())
        try:
            yield gateway
        finally:
            enough.set()
            await calling
        assert "dropped" not in await gateway.stop()


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
                gateway.process.signal(signal.SIGHUP)
        await _until_written(log)
    lines = _lines(*rotated, log)
    _assert_whole_and_unique(lines)
    assert len(lines) == len(gateway.called)


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
