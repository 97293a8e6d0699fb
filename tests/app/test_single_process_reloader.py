"""Reloads of a single process: when they happen, and what comes of invalid settings."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.app import standalone as reload
from gateway.app.reload import SettingsSource
from gateway.app.standalone import SingleProcessReloader, StandaloneGateway
from gateway.settings.schema import Settings
from tests.support.certificates import ca_file
from tests.support.gateway import RunningGateway, checked_gateway, no_leaks, until
from tests.support.http_messages import http_response
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

NOWHERE = "http://127.0.0.1:1"

pytestmark = pytest.mark.usefixtures("log_level")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a settings file, not written yet."""
    return tmp_path / "gateway.yaml"


def _write_text(file: Path, text: str) -> None:
    file.write_text(text)


def _write(file: Path, url: str, more: str = "") -> None:
    upstreams = f"{{u: {{endpoints: [{url}], dialect: triton}}}}"
    _write_text(file, f"listen: 127.0.0.1:0\noffload: 0\nupstreams: {upstreams}\n{more}")


@dataclass
class _Reloading:
    """A gateway that reloads its settings."""

    running: RunningGateway
    reloader: SingleProcessReloader

    @property
    def gateway(self) -> StandaloneGateway:
        return self.running.gateway

    @property
    def revision(self) -> dict[str, Any]:
        return self.gateway.shared.revision()

    async def until_number(self, number: int) -> None:
        """Wait until so many settings were in use."""
        await until(lambda: self.revision["number"] == number)

    async def until_failed(self, times: int) -> None:
        """Wait until so many reloads have failed."""
        await until(lambda: self.revision["reload_failures"] == times)


@asynccontextmanager
async def _reloading(file: Path) -> AsyncIterator[_Reloading]:
    source = SettingsSource(file, {})
    async with (
        no_leaks(),
        checked_gateway(source.read()) as running,
        SingleProcessReloader(running.gateway, source) as reloader,
    ):
        yield _Reloading(running, reloader)


@pytest.fixture
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll files often."""
    monkeypatch.setattr(reload, "POLL_INTERVAL", 0.01)


@pytest.mark.usefixtures("frequent_polls")
async def test_changed_file_is_applied(
    file: Path, caplog: pytest.LogCaptureFixture, log_level: logging.Logger
) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    _write(file, NOWHERE)
    async with (
        ScriptedServer(always_respond(http_response(b"new"))) as server,
        _reloading(file) as reloading,
    ):
        async with connect(reloading.gateway.addresses[0]) as client:
            routes = "routes: [{match: {model: '^a.*$'}, upstream: u}, {upstream: u}]"
            _write(file, server.url, f"log: {{level: error}}\nworkers: 3\n{routes}\n")
            await reloading.until_number(2)
            assert (await client.call("GET", "/v2/x")).body == b"new"
        assert (reloading.revision["file"], reloading.revision["reloads"]) == (str(file), 1)
        assert log_level.level == logging.ERROR
        said, restart, warned = caplog.messages
        assert said == f"settings reloaded from {file}: upstreams ~u, routes, log changed"
        assert restart == "workers: 3 takes effect after a restart; until then it is 1"
        assert reloading.gateway.settings.workers == 1
        regular = f"{file}:6: routes[0].match.model: '^a.*$' looks like a regular expression"
        assert warned.startswith(regular)


@pytest.mark.usefixtures("frequent_polls")
async def test_invalid_file_is_logged_once_and_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer(always_respond(http_response(b"x"))) as server:
        _write(file, server.url)
        async with _reloading(file) as reloading:
            broken = "upstreams: {u: {endpoints: []}}\nlisten: 1\n"
            _write_text(file, broken)
            await reloading.until_failed(1)
            _write_text(file, f"{broken}# the same error, in another file\n")
            await reloading.until_failed(2)
            why = f"{file}:1: upstreams.u.endpoints: expected at least one, got none (2 problems)"
            message = f"settings not reloaded: {why}; keeping the previous settings"
            assert caplog.messages == [message]
            assert (reloading.revision["last_failure"], reloading.revision["number"]) == (why, 1)
            async with connect(reloading.gateway.addresses[0]) as client:
                assert (await client.call("GET", "/v2/x")).body == b"x"
            reloading.reloader.requested.set()  # a request is always answered in the log
            await until(lambda: len(caplog.messages) == 2)
            _write(file, server.url)
            await reloading.until_number(2)
            assert reloading.revision["last_failure"] is None
            assert reloading.revision["reload_failures"] == 3


@pytest.mark.usefixtures("frequent_polls")
async def test_settings_apply_once_a_named_file_exists(file: Path, tmp_path: Path) -> None:
    ca = tmp_path / "late.pem"
    _write(file, NOWHERE)
    async with _reloading(file) as reloading:
        tls = f"endpoints: ['https://127.0.0.1:1'], tls: {{ca: {ca}}}"
        _write_text(file, f"upstreams: {{u: {{{tls}}}}}\nlisten: 127.0.0.1:0\n")
        await reloading.until_failed(1)
        assert f"upstreams.u.tls.ca: cannot read {ca}" in reloading.revision["last_failure"]
        shutil.copyfile(ca_file(tmp_path), ca)
        await reloading.until_number(2)


async def test_requests_during_a_reload_lead_to_one_more(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(file, NOWHERE)
    async with _reloading(file) as reloading:
        begun, go_on = asyncio.Event(), asyncio.Event()
        calls = []
        reload_ = reloading.gateway.reload

        async def slow(settings: Settings) -> str:
            calls.append(settings)
            begun.set()
            await go_on.wait()
            return await reload_(settings)

        monkeypatch.setattr(reloading.gateway, "reload", slow)
        reloading.reloader.requested.set()
        await begun.wait()
        for _ in range(3):
            reloading.reloader.requested.set()
        await asyncio.sleep(0)
        assert len(calls) == 1
        go_on.set()
        await reloading.until_number(3)
        assert not reloading.reloader.requested.is_set()
        assert len(calls) == 2


@pytest.mark.usefixtures("frequent_polls")
async def test_unexpected_error_does_not_end_reloads(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Settings) -> str:
        raise RuntimeError("no luck")

    _write(file, NOWHERE)
    async with _reloading(file) as reloading:
        with monkeypatch.context() as patch:
            patch.setattr(reloading.gateway, "reload", fail)
            reloading.reloader.requested.set()
            await reloading.until_failed(1)
            assert "no luck" in caplog.text
        reloading.running.remains.forget_faults()
        reloading.reloader.requested.set()
        await reloading.until_number(2)


@pytest.mark.usefixtures("frequent_polls")
async def test_file_is_not_watched_if_the_settings_say_so(file: Path) -> None:
    _write(file, NOWHERE, "watch: false\n")
    async with _reloading(file) as reloading:
        _write(file, NOWHERE, "limits: {drain_timeout: 1}\n")
        await asyncio.sleep(0.1)
        assert reloading.revision["number"] == 1
        reloading.reloader.requested.set()
        await reloading.until_number(2)
        assert reloading.gateway.settings.limits.drain_timeout == 1
        _write(file, NOWHERE)  # it is watched from now on
        await reloading.until_number(3)
