"""Reloads with workers: the supervisor's side and a worker's, in one process."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import cast

import pytest

from gateway.app import multi_worker_reloader
from gateway.app.gateway import Gateway
from gateway.app.loaded_resources import LoadedResources
from gateway.app.multi_worker_reloader import SupervisorReloader, WorkerReloader
from gateway.app.reload.prepared import CloseReplaced, OnApplied, PreparedReload
from gateway.app.reload.revision import Revision
from gateway.app.reload.source import SettingsSource
from gateway.errors import INTERNAL_ERROR_TEXT
from gateway.settings.schema import Settings
from gateway.workers.ipc import ReloadMessage, ToWorker
from gateway.workers.reload_broadcast import ConfigUpdate, RefusedUpdate
from tests.support.certificates import authority, certificate_files
from tests.support.gateway import no_leaks, until
from tests.support.raw_client import RawClient, connect


class _Reloads:
    """A supervisor's reloader of a settings file."""

    def __init__(self, file: Path, end: str = "") -> None:
        self.file = file
        self.write("http://127.0.0.1:1", end=end)
        source = SettingsSource(file, {})
        self.levels: list[str] = []
        self.supervisor = SupervisorReloader(source.read(), source, self.note)
        self.sockets = self.supervisor.sockets

    def close(self) -> None:
        for sock in self.supervisor.sockets:
            sock.close()

    def note(self, settings: Settings) -> None:
        self.levels.append(settings.log.level)

    def write(self, url: str, more: str = "", end: str = "", listen: str = "127.0.0.1:0") -> None:
        upstreams = f"{{u: {{endpoints: ['{url}'], dialect: triton{more}}}}}"
        self.file.write_text(f"listen: {listen}\nworkers: 2\nupstreams: {upstreams}\n{end}")

    @property
    def url(self) -> str:
        return self.supervisor.addresses[0]

    def poll(self) -> ConfigUpdate | RefusedUpdate | None:
        return self.supervisor.poll(requested=False)

    def request(self) -> ConfigUpdate:
        """Have the supervisor read its settings; return what it sends to the workers."""
        update = self.supervisor.poll(requested=True)
        assert isinstance(update, ConfigUpdate)
        return update

    def request_refused(self) -> RefusedUpdate:
        """Have it read settings that cannot be used."""
        update = self.supervisor.poll(requested=True)
        assert isinstance(update, RefusedUpdate)
        return update


class _Worker:
    """A worker's gateway, and its reloader."""

    def __init__(self, gateway: Gateway, on_applied: OnApplied | None = None) -> None:
        self.gateway = gateway
        self.levels: list[str] = []
        self.replies: list[str] = []
        self.reloader = WorkerReloader(gateway, on_applied or self.note, self.replies.append)

    def note(self, settings: Settings) -> None:
        self.levels.append(settings.log.level)

    async def prepare(self, update: ConfigUpdate) -> str:
        """Have it prepare settings; return its reply."""
        return await self._ask(ReloadMessage(ToWorker.PREPARE, update.settings))

    async def commit(self) -> str:
        """Have it use what it has prepared; return its reply."""
        return await self._ask(ReloadMessage(ToWorker.COMMIT))

    async def abort(self, refused: RefusedUpdate) -> str:
        """Have it give back what it has prepared; return its reply."""
        return await self._ask(ReloadMessage(ToWorker.ABORT, refused.reason))

    async def _ask(self, message: ReloadMessage) -> str:
        self.reloader.enqueue(message)
        await until(lambda: self.replies)
        return self.replies.pop()


async def _reload(reloads: _Reloads, worker: _Worker) -> None:
    """Do all of a reload with one worker."""
    assert await worker.prepare(reloads.request()) == ""
    reloads.supervisor.commit()
    assert await worker.commit() == ""
    reloads.supervisor.on_applied([])


@asynccontextmanager
async def _worker(reloads: _Reloads) -> AsyncIterator[_Worker]:
    async with reloads.supervisor.gateway(lambda: None) as gateway:
        worker = _Worker(gateway)
        async with worker.reloader:
            yield worker


@pytest.fixture
def reloads(tmp_path: Path) -> Iterator[_Reloads]:
    with closing(_Reloads(tmp_path / "gateway.yaml")) as reloads:
        yield reloads


async def test_workers_use_new_settings_from_the_commit_on(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    async with _worker(reloads) as worker:
        gateway = worker.gateway
        assert (gateway.revision.number, gateway.revision.file) == (1, str(reloads.file))
        reloads.write("http://127.0.0.1:2")
        update = reloads.request()
        assert update.sockets == reloads.sockets
        assert await worker.prepare(update) == ""
        for used in (gateway.settings, reloads.supervisor.settings):
            assert used.upstreams["u"].endpoints == ("http://127.0.0.1:1",)
        assert (gateway.revision.number, worker.levels, reloads.levels) == (1, [], [])
        reloads.supervisor.commit()
        assert await worker.commit() == ""
        reloads.supervisor.on_applied([])
        assert caplog.messages == [f"settings reloaded from {reloads.file}: upstreams ~u"]
        for used in (gateway.settings, reloads.supervisor.settings):
            assert used.upstreams["u"].endpoints == ("http://127.0.0.1:2",)
        assert (gateway.revision.number, gateway.revision.reloads) == (2, 1)
        assert reloads.supervisor.gateway(lambda: None).revision == gateway.revision
        await until(lambda: worker.levels)
        assert worker.levels == reloads.levels == ["info"]


async def test_worker_that_is_late_is_named(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    reloads.request()
    reloads.supervisor.commit()
    reloads.supervisor.on_applied(["worker 7"])
    assert caplog.messages == ["worker 7 does not respond: it uses the new settings once it does"]


async def test_workers_show_why_a_settings_file_cannot_be_used(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    async with _worker(reloads) as worker:
        reloads.write("ftp://x")
        assert await worker.abort(reloads.request_refused()) == ""
        (message,) = caplog.messages
        assert message.startswith(f"settings not reloaded: {reloads.file}:3: upstreams.u.endpoints")
        revision = worker.gateway.revision
        assert revision.last_failure is not None
        assert revision.last_failure in message
        assert (revision.number, revision.reload_failures) == (1, 1)
        assert worker.levels == reloads.levels == []


async def test_settings_that_a_worker_refuses_are_used_by_no_process_until_the_next_reload(
    reloads: _Reloads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = tmp_path / "ca.pem"
    os.symlink("/etc/ssl/certs/ca-certificates.crt", certificates)
    ca = f", tls: {{ca: {certificates}}}"
    async with _worker(reloads) as worker, _worker(reloads) as ready:
        reloads.write("https://127.0.0.1:2", ca, listen="[127.0.0.1:0, 127.0.0.2:0]")
        update = reloads.request()
        assert await ready.prepare(update) == ""
        certificates.rename(tmp_path / "elsewhere")  # before the worker reads it
        error = await worker.prepare(update)
        assert error.startswith(f"upstreams.u.tls.ca: cannot read {certificates}: No such file")
        refused = reloads.supervisor.abort(
            {"worker 7": error, "worker 8": error, "admin process 9": "no luck"}
        )
        why = f"{reloads.file}: worker 7, worker 8: {error}; admin process 9: no luck"
        assert caplog.messages == [f"settings not reloaded: {why}; keeping the previous settings"]
        assert reloads.supervisor.sockets == reloads.sockets
        assert all(sock.fileno() < 0 for sock in update.sockets if sock not in reloads.sockets)
        for each in (worker, ready):
            assert await each.abort(refused) == ""
            assert each.gateway.settings.upstreams["u"].endpoints == ("http://127.0.0.1:1",)
            assert each.gateway.revision.last_failure == why
        (tmp_path / "elsewhere").rename(certificates)
        reloads.write("https://127.0.0.1:2", ca)
        await _reload(reloads, worker)
        assert worker.gateway.settings.upstreams["u"].endpoints == ("https://127.0.0.1:2",)
        assert (worker.gateway.revision.number, worker.gateway.revision.last_failure) == (2, None)


async def test_unexpected_error_ends_neither_supervisor_nor_worker(
    reloads: _Reloads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    async with _worker(reloads) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(Gateway, "prepare", fail)
            assert await worker.prepare(reloads.request()) == INTERNAL_ERROR_TEXT
        reloads.supervisor.abort({})
        with monkeypatch.context() as patch:
            patch.setattr("gateway.app.multi_worker_reloader.load_resources", fail)
            assert await worker.abort(reloads.request_refused()) == ""
        assert caplog.text.count("RuntimeError: no luck") == 2
        assert worker.gateway.revision.last_failure == f"{reloads.file}: {INTERNAL_ERROR_TEXT}"
        await _reload(reloads, worker)


class _Faulty:
    """Settings that fail in one of the steps; the next ones do not."""

    def __init__(self) -> None:
        self.revision = Revision(0.0, "")

    async def prepare(self, settings: Settings) -> PreparedReload:
        if settings.log.level == "debug":
            await asyncio.Event().wait()
        return PreparedReload("", self._swap, AsyncExitStack())

    def _swap(self) -> CloseReplaced:
        raise ValueError("a bug")

    def reopen_logs(self) -> None:
        pass


async def test_error_of_a_commit_is_replied_and_ends_no_worker(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    worker = _Worker(cast("Gateway", _Faulty()))
    async with worker.reloader:
        for _ in range(2):
            assert await worker.prepare(reloads.request()) == ""
            assert await worker.commit() == INTERNAL_ERROR_TEXT
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


async def test_settings_that_are_not_prepared_in_time_are_refused(
    reloads: _Reloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_worker_reloader, "PREPARE_TIMEOUT", 0.1)
    worker = _Worker(cast("Gateway", _Faulty()))
    async with worker.reloader:
        reloads.write("http://127.0.0.1:2", end="log: {level: debug}")
        assert await worker.prepare(reloads.request()) == "not prepared within 0.1 s"
        reloads.write("http://127.0.0.1:2")
        assert await worker.prepare(reloads.request()) == ""


async def test_worker_reloads_on_after_an_error_of_whoever_takes_note_of_the_settings(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    levels: list[str] = []

    def fail_once(settings: Settings) -> None:
        levels.append(settings.log.level)
        if len(levels) == 1:
            raise ValueError("no such level")

    async with reloads.supervisor.gateway(lambda: None) as gateway:
        worker = _Worker(gateway, fail_once)
        async with worker.reloader:
            for number in (2, 3):
                await _reload(reloads, worker)
                assert gateway.revision.number == number
            await until(lambda: len(levels) == 2)
    assert caplog.text.count("ValueError: no such level") == 1


async def test_settings_that_were_not_received_whole_are_refused(reloads: _Reloads) -> None:
    async with _worker(reloads) as worker:
        for error in ("too many open files", ""):
            worker.reloader.enqueue(ReloadMessage(ToWorker.PREPARE, b"no pickle", error))
            await until(lambda: worker.replies)
            assert worker.replies.pop() == (error or INTERNAL_ERROR_TEXT)
        await _reload(reloads, worker)
        assert worker.gateway.revision.last_failure is None


def _log_threads() -> int:
    return [each.name for each in threading.enumerate()].count("access log")


@pytest.mark.parametrize("is_told", [True, False], ids=["abort", "stop"])
async def test_worker_gives_back_what_it_has_prepared(
    reloads: _Reloads, tmp_path: Path, is_told: bool
) -> None:
    reloads.write(
        "http://127.0.0.1:2", end=f"log: {{access: {{path: {tmp_path / 'access.log'}}}}}\n"
    )
    async with no_leaks(), reloads.supervisor.gateway(lambda: None) as gateway:
        before = _log_threads()
        worker = _Worker(gateway)
        async with no_leaks(), worker.reloader:
            assert await worker.prepare(reloads.request()) == ""
            assert _log_threads() == before + 1
            refused = reloads.supervisor.abort({"worker 7": "no luck"})
            if is_told:
                assert await worker.abort(refused) == ""
        assert _log_threads() == before


async def test_supervisor_reads_settings_when_their_file_has_changed(reloads: _Reloads) -> None:
    assert [reloads.poll() for _ in range(3)] == [None, None, None]
    reloads.write("http://127.0.0.1:33")
    assert reloads.poll() is None
    assert reloads.poll() is not None
    reloads.supervisor.commit()
    reloads.write("http://127.0.0.1:444", end="watch: false\n")
    assert [reloads.poll() is None for _ in range(2)] == [True, False]
    reloads.supervisor.commit()
    assert reloads.poll() is None
    reloads.write("http://127.0.0.1:5555")
    assert [reloads.poll() for _ in range(3)] == [None, None, None]


# --------------------------------------------------------------------------- replaced workers


@asynccontextmanager
async def _new_worker_client(reloads: _Reloads) -> AsyncIterator[RawClient]:
    """Start a worker, and connect to it as if the supervisor had accepted."""
    (listening,) = reloads.sockets
    async with reloads.supervisor.gateway(lambda: None) as gateway:

        async def accept() -> None:
            gateway.take((await asyncio.to_thread(listening.accept))[0])

        accepting = asyncio.create_task(accept())
        async with connect(reloads.url) as client:
            await accepting
            yield client


def _change(reloads: _Reloads, change: Callable[[], object]) -> None:
    """Change files, and have the supervisor notice: what is new counts when seen twice."""
    change()
    assert [reloads.poll() for _ in range(2)] == [None, None]


UNUSABLE_LATER = pytest.mark.parametrize("unusable_later", [False, True])


@UNUSABLE_LATER
async def test_new_worker_starts_with_the_newest_api_keys(
    tmp_path: Path, unusable_later: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old")
    rule = "{match: {operations: [health]}, upstream: u, auth: team}"
    settings = f"api_keys: {{team: {{file: {keys}}}}}\nroutes: [{rule}]\n"
    with closing(_Reloads(tmp_path / "gateway.yaml", settings)) as reloads:
        _change(reloads, lambda: keys.write_text("newer"))
        if unusable_later:
            _change(reloads, lambda: keys.write_text("\n"))
        async with _new_worker_client(reloads) as client:
            statuses = []
            for key in ("old", "newer"):
                shown = {"Authorization": f"Bearer {key}"}
                reply = await client.call("GET", "/v2/models/m", headers=shown)
                statuses.append(reply.status)
        assert statuses == [401, 404]


@UNUSABLE_LATER
async def test_new_worker_starts_with_the_newest_certificate(
    tmp_path: Path, unusable_later: bool
) -> None:
    certificate, key = certificate_files(tmp_path, authority().issue_cert("old"))
    settings = f"tls: {{certificate: {certificate}, key: {key}}}\n"
    with closing(_Reloads(tmp_path / "gateway.yaml", settings)) as reloads:
        _change(reloads, lambda: certificate_files(tmp_path, authority().issue_cert("127.0.0.1")))
        if unusable_later:
            _change(reloads, lambda: (tmp_path / "certificate.pem").write_text("none"))
        async with _new_worker_client(reloads) as client:  # which does not trust the old one
            assert (await client.call("GET", "/v2/health/live")).status == 200


def test_error_while_refreshing_files_does_not_end_the_supervisor(
    reloads: _Reloads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(LoadedResources, "refresh", fail)
    assert reloads.poll() is None
    assert reloads.request()
    assert caplog.text.count("RuntimeError: no luck") == 2
