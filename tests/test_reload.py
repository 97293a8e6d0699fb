"""Reloads of a gateway of one process or several, under load, and when one of them fails."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.addresses import HOST, free_address
from tests.support.certificates import certificate_files, server_certificate
from tests.support.checks.nothing_left_in_process import check_log
from tests.support.gateway import until
from tests.support.gateway_process import TENSORGATE, Process, gateway_process, running_process
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import binary_response, infer_json
from tests.support.operator import Operator
from tests.support.raw_client import connect
from tests.support.scale import scaled
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

RELOADS = scaled(50)
_LESS_THAN_A_STACK = 4 * 2**20
"""Bytes; a thread's stack takes 8 MiB."""
CLIENTS = 8
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a settings file, not written yet."""
    return tmp_path / "gateway.yaml"


class _Server(ScriptedServer):
    """Answers with its name; what streams goes on when it may."""

    def __init__(self, name: str) -> None:
        super().__init__(self._answer)
        self.name = name.encode()
        self.streams: list[asyncio.Event] = []

    async def _answer(self, connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target.endswith("/infer"):
                await connection.send(binary_response(bytes(4)))
            elif target == "/v2/stream":
                self.streams.append(go_on := asyncio.Event())
                await connection.send(message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}))
                await connection.send(chunk(self.name))
                await go_on.wait()
                await connection.send(chunk(self.name), chunk(b""))
            else:
                await connection.send(http_response(self.name))


class _Load:
    """Clients that ask all the time, each over one connection, until they are told to stop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = False
        self.asked = 0
        self.answers: Counter[tuple[int, bytes]] = Counter()

    async def _ask(self, number: int) -> None:
        data = request("GET", "/v2/x") if number % 2 else infer_json()
        async with connect(self._url) as client:
            while not self._stop:
                self.asked += 1
                reply = await client.ask(data)
                self.answers[reply.status, reply.body if number % 2 else b"infer"] += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self._ask(number))
            yield
            self._stop = True


def _write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    os.rename(new, file)


def _settings(workers: int, *urls: str, more: str = "", listen: str = f"{HOST}:0") -> str:
    care = "dialect: triton, outlier_detection: {base_ejection_time: 5m}"
    return (
        f"listen: {listen}\nworkers: {workers}\noffload: 0\n{more}"
        f"upstreams: {{u: {{endpoints: [{', '.join(urls)}], {care}}}}}\n"
    )


async def _reload(process: Process, says: str = "settings reloaded from") -> str:
    process.said = ""
    process.signal(signal.SIGHUP)
    await process.wait_for_output(says)
    return process.said


async def _ended(process: Process) -> str:
    """End it; give what it has said since the last reload."""
    process.said = ""
    process.signal(signal.SIGTERM)
    status, _, err = await process.end()
    assert status == 0
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("workers", [1, 2])
async def test_reloads_fail_no_request(file: Path, workers: int) -> None:
    async with _Server("one") as one, _Server("two") as two:
        servers = (one, two)
        limits = ("{max_request_bytes: 1MiB, connect_timeout: 1s}", "{max_request_bytes: 2MiB}")

        def settings(number: int) -> str:
            server = servers[number % 2]
            more = f"log: {{access: false}}\nlimits: {limits[number % 3 == 0]}\n"
            routes = "  - upstream: u\n"
            if number % 5 == 0:
                routes = f"  - {{match: {{model: m}}, upstream: u, nonfinite: 'null'}}\n{routes}"
            # The endpoint where nobody is stays, so that what is known of it must stay too.
            return _settings(workers, NOWHERE, server.url, more=more) + f"routes:\n{routes}"

        _write(file, settings(0))
        async with gateway_process(str(file)) as (process, url):
            load = _Load(url)
            said = ""
            async with load.running(), connect(url) as client:
                await until(lambda: load.asked > 100)
                for number in range(1, RELOADS + 1):
                    old, new = servers[(number - 1) % 2], servers[number % 2]
                    async with connect(url) as streaming:
                        await streaming.send(request("GET", "/v2/stream"))
                        await streaming.head()
                        assert await streaming.chunk() == old.name
                        _write(file, settings(number))
                        said += await _reload(process)
                        assert (await client.call("GET", "/v2/x")).body == new.name
                        old.streams.pop().set()
                        assert await streaming.whole_body() == old.name
                        assert (await streaming.call("GET", "/v2/x")).body == new.name
            said += await _ended(process)
        # Each request was answered, by one server, once.
        assert sum(load.answers.values()) == load.asked > 20 * RELOADS
        assert set(load.answers) == {(200, b"one"), (200, b"two"), (200, b"infer")}
        asked = load.asked + 3 * RELOADS
        assert sum(len(server.requests) for server in servers) == asked
        # Connections to servers that have been replaced are closed; one was left out once, or once
        # more by a worker that found out before it heard.
        assert said.count("settings reloaded from") == RELOADS
        assert 1 <= said.count("ejected for 300 s") <= workers
        await until(lambda: all(each.left.is_set() for each in one.connections[:-workers]))


@pytest.mark.parametrize("workers", [1, 2])
async def test_addresses_and_tls_change_and_connections_stay(
    file: Path, tmp_path: Path, workers: int
) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    tls = f"tls: {{certificate: {certificate}, key: {key}}}\n"
    unix = f"unix:{tmp_path / 's'}"
    async with _Server("one") as server:
        _write(file, _settings(workers, server.url))
        async with gateway_process(str(file)) as (process, url), connect(url) as first:
            listen = f"[{HOST}:0, '{unix}']"
            _write(file, _settings(workers, server.url, listen=listen))
            await _reload(process, f"listening on {unix}")
            _write(file, _settings(workers, server.url, listen=f"'{unix}'"))
            await _reload(process, f"no longer listening on {url}")
            with pytest.raises(ConnectionRefusedError):
                async with connect(url):
                    pass
            async with connect(unix) as second:
                _write(file, _settings(workers, server.url, more=tls))
                said = await _reload(process, f"no longer listening on {unix}")
                found = re.search(r" listening on (https://\S+)", said)
                assert found is not None
                async with connect(found[1]) as third:
                    for client in (first, second, third, first):
                        assert (await client.call("GET", "/v2/x")).body == b"one"
            await _ended(process)


async def test_sighup_to_all_processes_reloads_once(file: Path) -> None:
    async with _Server("one") as one, _Server("two") as two:
        _write(file, _settings(2, one.url))
        async with gateway_process(str(file)) as (process, url):
            _write(file, _settings(2, two.url))
            for pid in process.children:
                os.kill(pid, signal.SIGHUP)
            await _reload(process)
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/x")).body == b"two"
            assert "worker" not in await _ended(process)


@contextmanager
def _no_room_for_threads(pids: list[int]) -> Iterator[None]:
    """Let processes have no more memory than they have, so that no thread gets a stack."""
    before = {}
    try:
        for pid in pids:
            used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            limit = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (used + _LESS_THAN_A_STACK, limit[1]))
            before[pid] = limit
        yield
    finally:
        for pid, limit in before.items():
            resource.prlimit(pid, resource.RLIMIT_AS, limit)


@pytest.mark.parametrize("workers", [1, 2])
async def test_reload_at_the_limit_of_threads_changes_nothing(file: Path, workers: int) -> None:
    old, new = free_address(), free_address()
    async with _Server("one") as one, _Server("two") as two:
        log = f"log: {{access: {{path: {file.with_name('access.log')}}}}}\n"
        _write(file, _settings(workers, one.url, listen=old, more="log: {access: false}\n"))
        async with running_process(TENSORGATE, "serve", str(file)) as process:
            await process.wait_for_output("listening on")
            said = await _reload(process)  # has the threads started that are kept
            _write(file, _settings(workers, two.url, listen=new, more=log))
            with _no_room_for_threads(process.children or [process.pid]):
                for _ in range(2):
                    said = await _reload(process, "keeping the previous settings")
                    assert "the system allows no more threads" in said
                    assert "Traceback" not in said
                async with connect(f"http://{old}") as client:
                    assert (await client.call("GET", "/v2/x")).body == b"one"
                with pytest.raises(ConnectionRefusedError):
                    async with connect(f"http://{new}"):
                        pass
            await _reload(process)
            async with connect(f"http://{new}") as client:
                assert (await client.call("GET", "/v2/x")).body == b"two"
            process.signal(signal.SIGTERM)
            assert (await process.end())[0] == 0


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
class _Gateway:
    """A gateway of two workers and an admin process, its old settings, and new ones.

    The new ones have more of everything. The server of the old settings responds with ``one``, that
    of the new ones with ``two``.
    """

    file: Path
    urls: list[str]
    old: str
    new: str
    admin: str
    process: Process = field(init=False)
    workers: list[int] = field(init=False)
    """The processes of the first two workers."""
    paused: set[int] = field(default_factory=set)

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
        await until(self.log.exists)
        # It replies in the same time slice of its event loop, and serves calls in later ones.
        async with AsyncExitStack() as stack:
            url = f"http://{self.old}"
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
            addresses = [self.old] * 4 + [self.new] * 4 * is_new
            urls = [f"http://{address}" for address in addresses]
            clients = [await stack.enter_async_context(connect(url)) for url in urls]
            assert {(await client.call("GET", "/v2/x")).body for client in clients} == {body}
        if not is_new:
            with pytest.raises(ConnectionRefusedError):
                async with connect(f"http://{self.new}"):
                    pass

    async def until_status_says(self, number: int, last_failure: str | None) -> None:
        """Wait until ``/status`` says which settings are in use, and why newer ones are not."""
        names = "number", "last_failure"
        await Operator(self.admin).until_status(
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
        gateway = _Gateway(file, [one.url, two.url], *addresses)
        gateway.write(is_new=False)
        async with gateway_process(str(file), command) as (process, _):
            gateway.process = process
            found = re.search(r"2 workers: (\d+), (\d+)", process.said)
            assert found is not None
            gateway.workers = [int(pid) for pid in found.groups()]
            gateway.write(is_new=True)
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
        assert await gateway.refused() == f"{gateway.file}: {who} {sleeper}: no reply within 1 s"
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
