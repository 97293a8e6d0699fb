"""Reloads of a single process: when they happen, and what comes of invalid settings."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.app import standalone as reload
from gateway.app.reload.revision import Revision
from gateway.app.reload.source import SettingsSource
from gateway.app.standalone import SingleProcessReloader, StandaloneGateway
from gateway.settings.schema import Settings
from tests.support.certificates import ca_file
from tests.support.gateway import RunningGateway, checked_gateway, no_leaks, until
from tests.support.http_messages import http_response
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a settings file, not written yet."""
    return tmp_path / "gateway.yaml"


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def _write_settings(file: Path, url: str, more: str = "") -> None:
    upstreams = f"{{u: {{endpoints: [{url}], dialect: triton}}}}"
    _write(file, f"listen: 127.0.0.1:0\noffload: 0\nupstreams: {upstreams}\n{more}")


@asynccontextmanager
async def _checked_reloading(
    file: Path,
) -> AsyncIterator[tuple[RunningGateway, SingleProcessReloader, list[str]]]:
    source = SettingsSource(file, {})
    levels: list[str] = []
    revision = Revision(0.0, str(file))
    async with (
        no_leaks(),
        checked_gateway(source.read(), revision=revision) as running,
        SingleProcessReloader(
            running.gateway, source, lambda s: levels.append(s.log.level)
        ) as reloader,
    ):
        yield running, reloader, levels


@asynccontextmanager
async def _reloading(
    file: Path,
) -> AsyncIterator[tuple[StandaloneGateway, SingleProcessReloader, list[str]]]:
    async with _checked_reloading(file) as (running, reloader, levels):
        yield running.gateway, reloader, levels


@pytest.fixture
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll files often."""
    monkeypatch.setattr(reload, "POLL_INTERVAL", 0.01)


@pytest.mark.usefixtures("frequent_polls")
async def test_changed_file_is_applied(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    _write_settings(file, NOWHERE)
    async with (
        ScriptedServer(always_respond(http_response(b"new"))) as server,
        _reloading(file) as (gateway, _, levels),
    ):
        async with connect(gateway.addresses[0]) as client:
            route = "routes: [{match: {model: '^a.*$'}, upstream: u}, {upstream: u}]"
            _write_settings(file, server.url, f"log: {{level: error}}\n{route}\n")
            await until(lambda: gateway.revision.number == 2)
            assert (await client.call("GET", "/v2/x")).body == b"new"
        assert gateway.revision.reloads == 1
        assert gateway.revision.loaded_at > 0
        assert levels == ["error"]
        changes = "upstreams ~u, routes, log changed"
        assert f"settings reloaded from {file}: {changes}" in caplog.messages
        warning = f"{file}:5: routes[0].match.model: '^a.*$' looks like a regular expression"
        assert any(message.startswith(warning) for message in caplog.messages)


@pytest.mark.usefixtures("frequent_polls")
async def test_invalid_file_is_logged_once_and_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer(always_respond(http_response(b"x"))) as server:
        _write_settings(file, server.url)
        async with _reloading(file) as (gateway, reloader, levels):
            broken = "upstreams: {u: {endpoints: []}}\nlisten: 1\n"
            _write(file, broken)
            await until(lambda: gateway.revision.reload_failures == 1)
            _write(file, f"{broken}# the same error, in another file\n")
            await until(lambda: gateway.revision.reload_failures == 2)
            why = f"{file}:1: upstreams.u.endpoints: expected at least one, got none (2 problems)"
            message = f"settings not reloaded: {why}; keeping the previous settings"
            assert caplog.messages == [message]
            assert gateway.revision.last_failure == why
            assert gateway.revision.number == 1
            async with connect(gateway.addresses[0]) as client:
                assert (await client.call("GET", "/v2/x")).body == b"x"
            reloader.request_reload()  # a request is always answered in the log
            await until(lambda: len(caplog.messages) == 2)
            assert levels == []
            _write_settings(file, server.url)
            await until(lambda: gateway.revision.number == 2)
            assert gateway.revision.last_failure is None
            assert gateway.revision.reload_failures == 3


@pytest.mark.usefixtures("frequent_polls")
async def test_settings_apply_once_a_named_file_exists(file: Path, tmp_path: Path) -> None:
    ca = tmp_path / "late.pem"
    _write_settings(file, NOWHERE)
    async with _reloading(file) as (gateway, _, _):
        tls = f"endpoints: ['https://127.0.0.1:1'], tls: {{ca: {ca}}}"
        _write(file, f"upstreams: {{u: {{{tls}}}}}\nlisten: 127.0.0.1:0\n")
        await until(lambda: gateway.revision.reload_failures == 1)
        assert f"upstreams.u.tls.ca: cannot read {ca}" in (gateway.revision.last_failure or "")
        shutil.copyfile(ca_file(tmp_path), ca)
        await until(lambda: gateway.revision.number == 2)


async def test_requests_during_a_reload_lead_to_one_more(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_settings(file, NOWHERE)
    async with _reloading(file) as (gateway, reloader, _):
        begun, go_on = asyncio.Event(), asyncio.Event()
        calls = []
        reload_ = gateway.reload

        async def slow(settings: Settings) -> str:
            calls.append(settings)
            begun.set()
            await go_on.wait()
            return await reload_(settings)

        monkeypatch.setattr(gateway, "reload", slow)
        reloader.request_reload()
        await begun.wait()
        for _ in range(3):
            reloader.request_reload()
        await asyncio.sleep(0)
        assert len(calls) == 1
        go_on.set()
        await until(lambda: gateway.revision.number == 3)
        await asyncio.sleep(0.02)
        assert len(calls) == 2


@pytest.mark.usefixtures("frequent_polls")
async def test_unexpected_error_does_not_end_reloads(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _write_settings(file, NOWHERE)
    async with _checked_reloading(file) as (running, reloader, _):
        gateway = running.gateway
        with monkeypatch.context() as patch:

            async def fail(_: Settings) -> str:
                raise RuntimeError("no luck")

            patch.setattr(gateway, "reload", fail)
            reloader.request_reload()
            await until(lambda: gateway.revision.reload_failures == 1)
            assert "no luck" in caplog.text
        running.remains.forget_faults()
        reloader.request_reload()
        await until(lambda: gateway.revision.number == 2)


@pytest.mark.usefixtures("frequent_polls")
async def test_file_is_not_watched_if_the_settings_say_so(file: Path) -> None:
    _write_settings(file, NOWHERE, "watch: false\n")
    async with _reloading(file) as (gateway, reloader, _):
        _write_settings(file, NOWHERE, "limits: {drain_timeout: 1}\n")
        await asyncio.sleep(0.1)
        assert gateway.revision.number == 1
        reloader.request_reload()
        await until(lambda: gateway.revision.number == 2)
        assert gateway.settings.limits.drain_timeout == 1
        _write_settings(file, NOWHERE)  # it is watched from now on
        await until(lambda: gateway.revision.number == 3)


async def test_worker_count_changes_at_the_next_start(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_settings(file, NOWHERE)
    async with _reloading(file) as (gateway, reloader, _):
        _write_settings(file, NOWHERE, "workers: 3\nlimits: {drain_timeout: 1}\n")
        reloader.request_reload()
        await until(lambda: gateway.revision.number == 2)
        assert caplog.messages == ["workers: 3 takes effect after a restart; until then it is 1"]
        assert gateway.settings.limits.drain_timeout == 1
        assert gateway.settings.workers == 1
