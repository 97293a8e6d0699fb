"""Reloads with workers: the supervisor's side and a worker's, in one process."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from gateway.app.gateway import Gateway
from gateway.app.loaded_resources import LoadedResources
from gateway.app.multi_worker_reloader import SupervisorReloader, WorkerReloader
from gateway.app.reload.source import SettingsSource
from gateway.errors import INTERNAL_ERROR_TEXT
from gateway.settings.schema import Settings
from gateway.workers.reload_broadcast import ConfigUpdate
from tests.support.certificates import authority, certificate_files
from tests.support.gateway import until
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

    def write(self, url: str, more: str = "", end: str = "") -> None:
        upstreams = f"{{u: {{endpoints: ['{url}'], dialect: triton{more}}}}}"
        self.file.write_text(f"listen: 127.0.0.1:0\nworkers: 2\nupstreams: {upstreams}\n{end}")

    @property
    def url(self) -> str:
        return self.supervisor.addresses[0]

    def poll(self) -> ConfigUpdate | None:
        return self.supervisor.poll(requested=False)

    def request(self) -> bytes:
        """Have the supervisor read its settings; return what it sends to the workers."""
        update = self.supervisor.poll(requested=True)
        assert update is not None
        assert update.sockets == self.sockets
        return update.settings


class _Worker:
    """A worker's gateway, and its reloader."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.levels: list[str] = []
        self.replies: list[str] = []
        self.reloader = WorkerReloader(
            gateway, lambda settings: self.levels.append(settings.log.level), self.replies.append
        )

    async def reload(self, settings: bytes) -> str:
        """Have it apply settings; return its reply."""
        self.reloader.enqueue(settings)
        await until(lambda: self.replies)
        return self.replies.pop()


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


async def test_workers_apply_new_settings(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    async with _worker(reloads) as worker:
        gateway = worker.gateway
        assert (gateway.revision.number, gateway.revision.file) == (1, str(reloads.file))
        reloads.write("http://127.0.0.1:2")
        settings = reloads.request()
        assert reloads.levels == []
        assert await worker.reload(settings) == ""
        reloads.supervisor.on_applied({})
        assert caplog.messages == [f"settings reloaded from {reloads.file}: upstreams ~u"]
        assert gateway.settings.upstreams["u"].endpoints == ("http://127.0.0.1:2",)
        assert (gateway.revision.number, gateway.revision.reloads) == (2, 1)
        assert worker.levels == reloads.levels == ["info"]
        reloads.supervisor.on_applied({})
        assert len(caplog.messages) == 1


async def test_workers_show_why_a_settings_file_cannot_be_used(
    reloads: _Reloads, caplog: pytest.LogCaptureFixture
) -> None:
    async with _worker(reloads) as worker:
        reloads.write("ftp://x")
        assert await worker.reload(reloads.request()) == ""
        reloads.supervisor.on_applied({})
        (message,) = caplog.messages
        assert message.startswith(f"settings not reloaded: {reloads.file}:3: upstreams.u.endpoints")
        revision = worker.gateway.revision
        assert revision.last_failure is not None
        assert revision.last_failure in message
        assert (revision.number, revision.reload_failures) == (1, 1)
        assert worker.levels == reloads.levels == []


async def test_worker_that_cannot_apply_settings_keeps_its_own_until_the_next_reload(
    reloads: _Reloads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = tmp_path / "ca.pem"
    os.symlink("/etc/ssl/certs/ca-certificates.crt", certificates)
    ca = f", tls: {{ca: {certificates}}}"
    async with _worker(reloads) as worker:
        reloads.write("https://127.0.0.1:2", ca)
        settings = reloads.request()
        certificates.rename(tmp_path / "elsewhere")  # before the worker reads it
        error = await worker.reload(settings)
        assert error.startswith(f"upstreams.u.tls.ca: cannot read {certificates}: No such file")
        reloads.supervisor.on_applied({7: error, 8: error, 9: "no luck"})
        assert caplog.messages == [
            f"workers 7, 8: keeping the previous settings: {error}",
            "worker 9: keeping the previous settings: no luck",
        ]
        assert worker.gateway.settings.upstreams["u"].endpoints == ("http://127.0.0.1:1",)
        assert worker.gateway.revision.last_failure == error
        (tmp_path / "elsewhere").rename(certificates)
        assert await worker.reload(reloads.request()) == ""
        assert worker.gateway.settings.upstreams["u"].endpoints == ("https://127.0.0.1:2",)
        assert worker.gateway.revision.number == 3


async def test_unexpected_error_ends_neither_supervisor_nor_worker(
    reloads: _Reloads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    async with _worker(reloads) as worker:
        settings = reloads.request()
        with monkeypatch.context() as patch:
            patch.setattr(Gateway, "reload", fail)
            assert await worker.reload(settings) == "the gateway failed; its log says why"
        assert await worker.reload(settings) == ""
        with monkeypatch.context() as patch:
            patch.setattr("gateway.app.multi_worker_reloader.load_resources", fail)
            assert await worker.reload(reloads.request()) == ""
        assert caplog.text.count("RuntimeError: no luck") == 2
        assert (
            worker.gateway.revision.last_failure
            == f"{reloads.file}: the gateway failed; its log says why"
        )


async def test_supervisor_reads_settings_when_their_file_has_changed(reloads: _Reloads) -> None:
    assert [reloads.poll() for _ in range(3)] == [None, None, None]
    reloads.write("http://127.0.0.1:33")
    assert reloads.poll() is None
    assert reloads.poll() is not None
    reloads.write("http://127.0.0.1:444", end="watch: false\n")
    assert [reloads.poll() is None for _ in range(3)] == [True, False, True]
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
    def fail(_: LoadedResources) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(LoadedResources, "refresh", fail)
    assert reloads.poll() is None
    assert reloads.request()
    assert caplog.text.count("RuntimeError: no luck") == 2


async def test_worker_goes_on_after_a_reload_that_it_cannot_even_read(reloads: _Reloads) -> None:
    async with _worker(reloads) as worker:
        assert await worker.reload(b"no pickle") == INTERNAL_ERROR_TEXT
        assert worker.gateway.revision.last_failure == INTERNAL_ERROR_TEXT
        assert await worker.reload(reloads.request()) == ""
        assert worker.gateway.revision.last_failure is None
