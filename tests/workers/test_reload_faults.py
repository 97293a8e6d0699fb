"""A reload of several processes is whole or not at all, whatever happens to one of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.addresses import free_address
from tests.support.checks.nothing_left_in_process import check_log
from tests.support.gateway import until
from tests.support.gateway_process import TENSORGATE, Process, gateway_process
from tests.support.http_messages import http_response
from tests.support.operator import Operator
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond


def _command(prepare: float, commit: float = 5.0) -> tuple[str, ...]:
    """Return the command of a gateway that waits so many seconds for its processes."""
    return (
        sys.executable,
        "-c",
        "from gateway.workers import reload_broadcast as broadcast;"
        f" broadcast.PREPARE_TIMEOUT, broadcast.COMMIT_TIMEOUT = {prepare}, {commit};"
        " from gateway.cli import main; main()",
    )


@dataclass
class _Settings:
    """The old settings of a gateway, and new ones with more of everything.

    The server of the old settings responds with ``one``, that of the new ones with ``two``.
    """

    file: Path
    urls: list[str]
    old: str
    new: str
    admin: str

    @property
    def log(self) -> Path:
        """Return the access log of the new settings, which each worker creates as it prepares."""
        return self.file.with_name("access.log")

    def write(self, is_new: bool) -> None:
        """Write the new settings, or the old ones."""
        listen = [self.old, self.new] if is_new else [self.old]
        access = f"{{path: {self.log}}}" if is_new else "false"
        self.file.write_text(
            f"listen: [{', '.join(listen)}]\nadmin: {self.admin}\nworkers: 2\noffload: 0\n"
            f"watch: false\nlog: {{access: {access}}}\n"
            f"upstreams: {{u: {{endpoints: ['{self.urls[is_new]}'], dialect: triton}}}}\n"
        )


@dataclass
class _Gateway:
    """A gateway of two workers and an admin process."""

    process: Process
    workers: list[int]
    """The processes of the first two workers."""
    settings: _Settings
    paused: set[int] = field(default_factory=set)

    @property
    def admin_pid(self) -> int:
        return next(pid for pid in self.process.children if pid not in self.workers)

    def pause(self, pid: int) -> None:
        """Stop a process until ``resume``, or until the end of the test."""
        self.paused.add(pid)
        os.kill(pid, signal.SIGSTOP)

    def resume(self, pid: int) -> None:
        self.paused.remove(pid)
        os.kill(pid, signal.SIGCONT)

    def reload(self) -> None:
        self.process.signal(signal.SIGHUP)

    async def reload_while_paused(self, pid: int) -> None:
        """Pause a worker and reload; return once the other one has prepared the new settings."""
        self.pause(pid)
        self.reload()
        await until(self.settings.log.exists)
        # It replies in the same time slice of its event loop, and serves calls in later ones.
        async with AsyncExitStack() as stack:
            url = f"http://{self.settings.old}"
            clients = [await stack.enter_async_context(connect(url)) for _ in range(4)]
            calls = [asyncio.create_task(client.call("GET", "/v2/x")) for client in clients]
            done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for call in waiting:
                call.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert {call.result().body for call in done} == {b"one"}

    async def check(self, is_new: bool) -> None:
        """Check that all workers have the same settings, and that the supervisor has them."""
        body = b"two" if is_new else b"one"
        async with AsyncExitStack() as stack:
            addresses = [self.settings.old] * 4 + [self.settings.new] * 4 * is_new
            urls = [f"http://{address}" for address in addresses]
            clients = [await stack.enter_async_context(connect(url)) for url in urls]
            assert {(await client.call("GET", "/v2/x")).body for client in clients} == {body}
        if not is_new:
            with pytest.raises(ConnectionRefusedError):
                async with connect(f"http://{self.settings.new}"):
                    pass

    async def until_status_says(self, number: int, last_failure: str | None) -> None:
        """Wait until ``/status`` says which settings are in use, and why newer ones are not."""
        names = "number", "last_failure"
        await Operator(self.settings.admin).until_status(
            lambda said: [said["settings"][name] for name in names] == [number, last_failure]
        )

    async def refused(self) -> str:
        """Wait until a reload has been refused; return why."""
        found = await self.process.wait_for_output(
            r"settings not reloaded: (.*); keeping the previous settings"
        )
        return found[1]

    async def reload_at_last(self) -> None:
        """Check that the new settings apply now that nothing is in their way."""
        check_log(self.process.said)
        self.process.said = ""
        self.reload()
        await self.process.wait_for_output("settings reloaded from")
        await self.check(is_new=True)


@asynccontextmanager
async def _running(
    tmp_path: Path, command: tuple[str, ...] = (TENSORGATE,)
) -> AsyncIterator[_Gateway]:
    """Run a gateway with the old settings; the new ones are in its file."""
    async with (
        ScriptedServer(always_respond(http_response(b"one"))) as one,
        ScriptedServer(always_respond(http_response(b"two"))) as two,
    ):
        file = tmp_path / "gateway.yaml"
        addresses = free_address(), free_address(), free_address()
        settings = _Settings(file, [one.url, two.url], *addresses)
        settings.write(is_new=False)
        async with gateway_process(str(file), command) as (process, _):
            found = re.search(r"2 workers: (\d+), (\d+)", process.said)
            assert found is not None
            settings.write(is_new=True)
            gateway = _Gateway(process, [int(pid) for pid in found.groups()], settings)
            try:
                await gateway.until_status_says(1, None)  # the admin process is ready, too
                yield gateway
            finally:
                for pid in gateway.paused:
                    with suppress(ProcessLookupError):  # it was killed
                        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("who", ["worker", "admin process"])
async def test_reload_is_aborted_if_a_process_does_not_reply_in_time(
    tmp_path: Path, who: str
) -> None:
    async with _running(tmp_path, _command(prepare=1.0)) as gateway:
        sleeper = gateway.workers[0] if who == "worker" else gateway.admin_pid
        gateway.pause(sleeper)
        gateway.reload()
        assert (
            await gateway.refused()
            == f"{gateway.settings.file}: {who} {sleeper}: no reply within 1 s"
        )
        gateway.resume(sleeper)
        await gateway.check(is_new=False)
        await gateway.reload_at_last()


@pytest.mark.parametrize("is_ready", [True, False], ids=["prepared", "not prepared"])
async def test_worker_that_replaces_one_killed_during_a_reload_uses_the_new_settings(
    tmp_path: Path, is_ready: bool
) -> None:
    async with _running(tmp_path) as gateway:
        ready, sleeper = gateway.workers
        await gateway.reload_while_paused(sleeper)
        victim = ready if is_ready else sleeper
        os.kill(victim, signal.SIGKILL)
        await gateway.process.wait_for_output(f"worker {victim} was killed by SIGKILL")
        if is_ready:
            await gateway.process.wait_for_output(r"worker \d+ is up")
            assert "settings reloaded" not in gateway.process.said
            gateway.resume(sleeper)
        await gateway.process.wait_for_output("settings reloaded from")
        if not is_ready:
            await gateway.process.wait_for_output(r"worker \d+ is up")
        await gateway.check(is_new=True)
        await gateway.until_status_says(2, None)


async def test_worker_that_replaces_one_killed_in_a_reload_that_is_aborted_has_the_old_settings(
    tmp_path: Path,
) -> None:
    async with _running(tmp_path, _command(prepare=4.0)) as gateway:
        victim, sleeper = gateway.workers
        await gateway.reload_while_paused(sleeper)
        os.kill(victim, signal.SIGKILL)
        await gateway.process.wait_for_output(r"worker \d+ is up")
        assert f"worker {sleeper}: no reply within 4 s" in await gateway.refused()
        gateway.resume(sleeper)
        await gateway.check(is_new=False)
        await gateway.reload_at_last()


async def test_worker_that_is_stopped_before_the_commit_uses_the_new_settings_as_it_goes_on(
    tmp_path: Path,
) -> None:
    async with _running(tmp_path, _command(prepare=30.0, commit=0.5)) as gateway:
        first, second = gateway.workers
        await gateway.reload_while_paused(second)
        gateway.pause(first)
        gateway.resume(second)
        await gateway.process.wait_for_output(f"worker {first} does not respond")
        gateway.resume(first)
        await gateway.check(is_new=True)
        await gateway.until_status_says(2, None)


async def test_sigterm_during_a_reload_stops_the_gateway(tmp_path: Path) -> None:
    async with _running(tmp_path) as gateway:
        sleeper = gateway.workers[1]
        await gateway.reload_while_paused(sleeper)
        gateway.process.signal(signal.SIGTERM)
        await gateway.process.wait_for_output("stopping")
        gateway.resume(sleeper)
        status, _, err = await gateway.process.end()
        assert status == 0
        assert err.splitlines()[-1].endswith(": stopped")
        assert "settings reloaded" not in err
        assert "killed" not in err
