"""Reloads with workers: the supervisor's side and a worker's, in one process."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.app import with_workers
from gateway.app.gateway import Gateway
from gateway.app.loaded_resources import LoadedResources
from gateway.app.reload import CloseReplaced, PreparedReload, SettingsSource
from gateway.app.with_workers import GatewayWithWorkers, WorkerReloader
from gateway.errors import INTERNAL_ERROR_TEXT
from gateway.settings.schema import Settings
from gateway.workers.ipc import ListeningSockets, ToWorker
from tests.support.certificates import authority, certificate_files
from tests.support.gateway import no_leaks, until
from tests.support.raw_client import RawClient, connect

pytestmark = pytest.mark.usefixtures("log_level")


class _Reloads:
    """What the supervisor does with a settings file."""

    def __init__(self, file: Path, end: str = "") -> None:
        self.file = file
        self.write("http://127.0.0.1:1", end=end)
        source = SettingsSource(file, {})
        self.supervisor = GatewayWithWorkers(source.read(), source, 2)
        self.sockets = self.supervisor.sockets

    def close(self) -> None:
        for sock in self.supervisor.sockets:
            sock.close()

    def write(self, url: str, more: str = "", end: str = "", listen: str = "127.0.0.1:0") -> None:
        upstreams = f"{{u: {{endpoints: ['{url}'], dialect: triton{more}}}}}"
        self.file.write_text(f"listen: {listen}\nworkers: 2\nupstreams: {upstreams}\n{end}")

    @property
    def revision(self) -> dict[str, Any]:
        return self.supervisor.shared.revision()

    def poll(self) -> ListeningSockets | None:
        return self.supervisor.poll(requested=False)

    def request(self) -> ListeningSockets:
        """Have the supervisor read its settings, for the workers to prepare."""
        update = self.supervisor.poll(requested=True)
        assert update is not None
        return update


class _Worker:
    """A worker's gateway, and its reloader."""

    def __init__(self, reloads: _Reloads, gateway: Gateway) -> None:
        self.gateway = gateway
        self.replies: list[str] = []
        shared = reloads.supervisor.shared
        self.reloader = WorkerReloader(gateway, shared, self.replies.append)

    @property
    def endpoints(self) -> tuple[object, ...]:
        """Return the endpoints that it uses."""
        return self.gateway.settings.upstreams["u"].endpoints

    async def do(self, step: ToWorker) -> str:
        """Have it do a step of a reload; return its reply."""
        self.reloader.steps.put_nowait(step)
        await until(lambda: self.replies)
        return self.replies.pop()


async def _reload(reloads: _Reloads, worker: _Worker) -> None:
    """Do all of a reload with one worker."""
    reloads.request()
    assert await worker.do(ToWorker.PREPARE) == ""
    reloads.supervisor.commit()
    assert await worker.do(ToWorker.COMMIT) == ""
    reloads.supervisor.on_applied([])


@asynccontextmanager
async def _worker(reloads: _Reloads) -> AsyncIterator[_Worker]:
    async with reloads.supervisor.worker(lambda: None) as gateway:
        worker = _Worker(reloads, gateway)
        async with worker.reloader:
            yield worker


@pytest.fixture
def reloads(tmp_path: Path) -> Iterator[_Reloads]:
    with closing(_Reloads(tmp_path / "gateway.yaml")) as reloads:
        yield reloads


async def test_workers_use_new_settings_from_the_commit_on(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture, log_level: logging.Logger
) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    async with _worker(reloads) as worker:
        assert (reloads.revision["number"], reloads.revision["file"]) == (1, str(reloads.file))
        reloads.write("http://127.0.0.1:2", end="log: {level: debug}\n")
        assert reloads.request() == reloads.sockets
        assert await worker.do(ToWorker.PREPARE) == ""
        for used in (worker.gateway.settings, reloads.supervisor.settings):
            assert used.upstreams["u"].endpoints == ("http://127.0.0.1:1",)
        reloads.supervisor.commit()
        assert await worker.do(ToWorker.COMMIT) == ""
        await until(lambda: log_level.level == logging.DEBUG)
        assert (reloads.revision["number"], reloads.revision["reloads"]) == (2, 1)
        caplog.clear()
        reloads.supervisor.on_applied(["worker 7"])
        assert caplog.messages == [
            f"settings reloaded from {reloads.file}: upstreams ~u, log changed",
            "worker 7 does not respond: it uses the new settings once it does",
        ]
        for used in (worker.gateway.settings, reloads.supervisor.settings):
            assert used.upstreams["u"].endpoints == ("http://127.0.0.1:2",)


async def test_status_shows_why_a_settings_file_cannot_be_used(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    async with _worker(reloads) as worker:
        reloads.write("ftp://x")
        assert reloads.supervisor.poll(requested=True) is None
        assert await worker.do(ToWorker.ABORT) == ""
        (message,) = caplog.messages
        assert message.startswith(f"settings not reloaded: {reloads.file}:3: upstreams.u.endpoints")
        shown = worker.gateway.status()["settings"]
        assert shown["last_failure"] in message
        assert (shown["number"], shown["reload_failures"]) == (1, 1)


async def test_settings_that_a_worker_refuses_are_used_by_no_process_until_the_next_reload(
    reloads: _Reloads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = tmp_path / "ca.pem"
    os.symlink("/etc/ssl/certs/ca-certificates.crt", certificates)
    ca = f", tls: {{ca: {certificates}}}"
    async with _worker(reloads) as worker, _worker(reloads) as ready:
        reloads.write("https://127.0.0.1:2", ca, listen="[127.0.0.1:0, 127.0.0.2:0]")
        update = reloads.request()
        assert await ready.do(ToWorker.PREPARE) == ""
        certificates.rename(tmp_path / "elsewhere")  # before the worker reads it
        error = await worker.do(ToWorker.PREPARE)
        assert error.startswith(f"upstreams.u.tls.ca: cannot read {certificates}: No such file")
        reloads.supervisor.abort(
            {"worker 7": error, "worker 8": error, "admin process 9": "no luck"}
        )
        why = f"{reloads.file}: worker 7, worker 8: {error}; admin process 9: no luck"
        assert caplog.messages == [f"settings not reloaded: {why}; keeping the previous settings"]
        assert reloads.supervisor.sockets == reloads.sockets
        assert all(sock.fileno() < 0 for sock in update if sock not in reloads.sockets)
        assert reloads.revision["last_failure"] == why
        for each in (worker, ready):
            assert await each.do(ToWorker.ABORT) == ""
            assert each.endpoints == ("http://127.0.0.1:1",)
        (tmp_path / "elsewhere").rename(certificates)
        reloads.write("https://127.0.0.1:2", ca)
        await _reload(reloads, worker)
        assert worker.endpoints == ("https://127.0.0.1:2",)
        assert (reloads.revision["number"], reloads.revision["last_failure"]) == (2, None)


async def test_unexpected_error_ends_neither_supervisor_nor_worker(
    reloads: _Reloads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    async with _worker(reloads) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(Gateway, "prepare", fail)
            reloads.request()
            assert await worker.do(ToWorker.PREPARE) == INTERNAL_ERROR_TEXT
        reloads.supervisor.abort({})
        with monkeypatch.context() as patch:
            patch.setattr("gateway.app.with_workers.load_resources", fail)
            assert reloads.supervisor.poll(requested=True) is None
        assert caplog.text.count("RuntimeError: no luck") == 2
        assert reloads.revision["last_failure"] == f"{reloads.file}: {INTERNAL_ERROR_TEXT}"
        with monkeypatch.context() as patch:
            patch.setattr(LoadedResources, "_refresh_certificate", fail)
            assert reloads.poll() is None
        assert caplog.text.count("RuntimeError: no luck") == 3
        await _reload(reloads, worker)


async def test_settings_that_are_too_large_are_refused(
    reloads: _Reloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloads.supervisor.shared.new_settings, "publish", lambda *_: False)
    reloads.write("http://127.0.0.1:2")
    assert reloads.supervisor.poll(requested=True) is None
    assert reloads.revision["last_failure"].endswith("they are too large")


class _Faulty:
    """Settings that fail in one of the steps; the next ones do not."""

    async def prepare(self, settings: Settings) -> PreparedReload:
        if settings.log.level == "debug":
            await asyncio.Event().wait()
        return PreparedReload(self._swap, AsyncExitStack().aclose)

    def _swap(self) -> CloseReplaced:
        raise ValueError("a bug")

    def reopen_logs(self) -> None:
        pass


async def test_error_of_a_commit_is_replied_and_ends_no_worker(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    worker = _Worker(reloads, cast("Gateway", _Faulty()))
    async with worker.reloader:
        for _ in range(2):
            reloads.request()
            assert await worker.do(ToWorker.PREPARE) == ""
            assert await worker.do(ToWorker.COMMIT) == INTERNAL_ERROR_TEXT
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


async def test_settings_that_are_not_prepared_in_time_are_refused(
    reloads: _Reloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_workers, "PREPARE_TIMEOUT", 0.1)
    worker = _Worker(reloads, cast("Gateway", _Faulty()))
    async with worker.reloader:
        for level, reply in (("debug", "not prepared within 0.1 s"), ("info", "")):
            reloads.write("http://127.0.0.1:2", end=f"log: {{level: {level}}}")
            reloads.request()
            assert await worker.do(ToWorker.PREPARE) == reply


def _log_threads() -> int:
    return [each.name for each in threading.enumerate()].count("access log")


@pytest.mark.parametrize("is_told", [True, False], ids=["abort", "stop"])
async def test_worker_gives_back_what_it_has_prepared(
    reloads: _Reloads, tmp_path: Path, is_told: bool
) -> None:
    log = f"log: {{access: {{path: {tmp_path / 'access.log'}}}}}\n"
    reloads.write("http://127.0.0.1:2", end=log)
    async with no_leaks(), reloads.supervisor.worker(lambda: None) as gateway:
        before = _log_threads()
        worker = _Worker(reloads, gateway)
        async with no_leaks(), worker.reloader:
            reloads.request()
            assert await worker.do(ToWorker.PREPARE) == ""
            assert _log_threads() == before + 1
            reloads.supervisor.abort({"worker 7": "no luck"})
            if is_told:
                assert await worker.do(ToWorker.ABORT) == ""
                assert _log_threads() == before
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
    reloads.write("http://127.0.0.1:5555")
    assert [reloads.poll() for _ in range(3)] == [None, None, None]


# --------------------------------------------------------------------------- replaced workers


@asynccontextmanager
async def _new_worker_client(reloads: _Reloads) -> AsyncIterator[RawClient]:
    """Start a worker, and connect to it as if the supervisor had accepted."""
    (listening,) = reloads.sockets
    async with reloads.supervisor.worker(lambda: None) as gateway:

        async def accept() -> None:
            gateway.take((await asyncio.to_thread(listening.accept))[0])

        accepting = asyncio.create_task(accept())
        async with connect(reloads.supervisor.addresses[0]) as client:
            await accepting
            yield client


def _change(reloads: _Reloads, change: Callable[[], object]) -> None:
    """Change files, and have the supervisor notice: what is new counts when seen twice."""
    change()
    assert [reloads.poll() for _ in range(2)] == [None, None]


@pytest.mark.parametrize("unusable_later", [False, True])
async def test_new_worker_starts_with_the_newest_keys_and_certificate(
    tmp_path: Path, unusable_later: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old")
    certificate, key = certificate_files(tmp_path, authority().issue_cert("old"))
    rule = "{match: {operations: [health]}, upstream: u, auth: team}"
    settings = (
        f"tls: {{certificate: {certificate}, key: {key}}}\n"
        f"api_keys: {{team: {{file: {keys}}}}}\nroutes: [{rule}]\n"
    )

    def renew() -> None:
        keys.write_text("newer")
        certificate_files(tmp_path, authority().issue_cert("127.0.0.1"))

    def spoil() -> None:
        keys.write_text("\n")
        (tmp_path / "certificate.pem").write_text("none")

    with closing(_Reloads(tmp_path / "gateway.yaml", settings)) as reloads:
        _change(reloads, renew)
        if unusable_later:
            _change(reloads, spoil)
        async with _new_worker_client(reloads) as client:  # which does not trust the old one
            shown = [{"Authorization": f"Bearer {key}"} for key in ("old", "newer")]
            replies = [await client.call("GET", "/v2/models/m", headers=each) for each in shown]
        assert [reply.status for reply in replies] == [401, 404]
