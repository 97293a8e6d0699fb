"""What is read of new settings, which changes are noticed, and what an operator reads of it."""

import asyncio
import logging
import os
import resource
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.app import loaded_resources, standalone
from gateway.app.build.listening import UnusableSettingsError
from gateway.app.loaded_resources import LoadedResources, load_resources
from gateway.app.reload import SettingsSource, describe_changes, failure_reason, failure_text
from gateway.app.shared_memory import SharedMemory
from gateway.app.standalone import SingleProcessReloader, StandaloneGateway
from gateway.settings.problems import SettingsError
from gateway.settings.schema import Settings
from tests.app.reloading import NOWHERE
from tests.support.certificates import ca_file, certificate_files, server_certificate
from tests.support.gateway import RunningGateway, checked_gateway, no_leaks, until
from tests.support.http_messages import http_response
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

pytestmark = pytest.mark.usefixtures("log_level")


# ---------------------------------------- what has changed


def _settings(upstreams: dict[str, Any] | None = None, **more: object) -> Settings:
    every = {"a": {"endpoints": ["http://a:1"]}, "b": {"endpoints": ["http://b:1"]}}
    return Settings.model_validate(
        {"upstreams": upstreams or every, "routes": [{"upstream": "b"}], **more}
    )


B, C = {"endpoints": ["http://b:1"]}, {"endpoints": ["http://c:1"]}
B2 = {"endpoints": ["http://b:2"]}


@pytest.mark.parametrize(
    ("now", "described"),
    [
        (_settings(), "no setting that applies now has changed"),
        (_settings({"b": B}), "upstreams -a"),
        (_settings({"c": C, "b": B2}), "upstreams +c -a ~b"),
        (_settings(log={"access": False}), "log changed"),
        (
            _settings(
                {"b": B}, routes=[{"upstream": "b", "deny_operations": ["trace"]}], watch=False
            ),
            "upstreams -a, watch, routes changed",
        ),
        (_settings(limits={"request_timeout": 7}), "limits changed"),
        (_settings(limits={"connect_timeout": 7}), "upstreams ~a ~b, limits changed"),
        (_settings(limits={"metadata_ttl": 7}), "upstreams ~a ~b, limits changed"),
        (_settings(expose_endpoints=True), "upstreams ~a ~b, expose_endpoints changed"),
        (_settings(listen="127.0.0.1:9"), "listen changed"),
    ],
)
def test_changes_are_described(now: Settings, described: str) -> None:
    before = load_resources(_settings())
    assert describe_changes(load_resources(now, before), before) == described


def test_long_list_of_upstreams_is_shortened() -> None:
    many = {f"u{i}": C for i in range(100)}
    before = load_resources(_settings())
    described = describe_changes(load_resources(_settings({"b": B, **many}), before), before)
    assert described.startswith("upstreams +u0 +u1 ")
    assert described.endswith("+u19 and 81 more")


def test_changed_certificate_file_changes_the_upstream(tmp_path: Path) -> None:
    ca = ca_file(tmp_path)
    settings = _settings({"b": {"endpoints": ["https://b:1"], "tls": {"ca": ca}}})
    before = load_resources(settings)
    assert (
        describe_changes(load_resources(settings, before), before)
        == "no setting that applies now has changed"
    )
    with open(ca, "a") as file:
        file.write("\n")
    assert describe_changes(load_resources(settings, before), before) == "upstreams ~b"


def test_worker_count_needs_a_restart() -> None:
    before, now = load_resources(_settings(workers=2)), _settings(workers="auto", watch=False)
    assert load_resources(now, before).settings == _settings(workers=2, watch=False)


def _watched_resources(tmp_path: Path) -> tuple[LoadedResources, Path]:
    """Load a certificate and a file of API keys, which is returned, too."""
    certificate, key = certificate_files(tmp_path, server_certificate())
    keys = tmp_path / "keys"
    keys.write_text("old")
    settings = _settings(
        tls={"certificate": certificate, "key": key},
        api_keys={"team": {"file": str(keys)}},
        routes=[{"upstream": "b", "auth": "team"}],
    )
    return load_resources(settings), keys


async def test_files_of_keys_and_certificate_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_resources, "POLL_INTERVAL", 0.001)
    resources, keys = _watched_resources(tmp_path)
    journal = SharedMemory().owner_journal
    assert resources.tls is not None
    before = resources.tls.context
    renewals: list[None] = []
    following = asyncio.create_task(resources.follow(lambda: renewals.append(None), journal))
    certificate_files(tmp_path, server_certificate())
    keys.write_text("new-key")
    await until(lambda: renewals and journal.read())
    assert resources.tls.context is not before
    assert [each["kind"] for each in journal.read()] == ["certificate_reloaded"]
    (tmp_path / "key.pem").write_text("no key")
    await until(lambda: len(journal.read()) == 2)
    assert journal.read()[0]["kind"] == "certificate_refused"
    assert len(renewals) == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("failing", ["tls", "api_keys"])
async def test_files_are_followed_after_an_unexpected_error(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loaded_resources, "POLL_INTERVAL", 0.001)
    resources, keys = _watched_resources(tmp_path)
    tls = resources.tls
    assert tls is not None
    before, renewals, failures = tls.context, list[None](), list[None]()

    def fail() -> None:
        failures.append(None)
        raise RuntimeError("unexpected")

    name = {"tls": "reload_if_changed", "api_keys": "refresh"}[failing]
    with monkeypatch.context() as broken:
        broken.setattr(type(getattr(resources, failing)), name, lambda _: fail())
        following = asyncio.create_task(resources.follow(lambda: renewals.append(None)))
        certificate_files(tmp_path, server_certificate())
        keys.write_text("new-key")
        await until(lambda: len(failures) > 1)
        await until(lambda: renewals if failing == "tls" else tls.context is not before)
    await until(lambda: renewals and tls.context is not before)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert {record.exc_text.splitlines()[-1] for record in caplog.records if record.exc_text} == {
        "RuntimeError: unexpected"
    }


# ---------------------------------------- why it cannot be used


def test_failure_text_has_the_first_problem(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("upstreams: {u: {endpoints: []}}\nlisten: 1\n")
    with pytest.raises(SettingsError) as caught:
        SettingsSource(file, {}).read()
    text = failure_text(caught.value, file)
    assert text.startswith(f"{file}:1: upstreams.u.endpoints: ")
    assert text.endswith(" (2 problems)")
    assert failure_text(UnusableSettingsError("no luck"), file) == f"{file}: no luck"


def test_limit_of_the_system_is_a_plain_reason(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            os.open("/", os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    reason = "the system refuses a part of the new settings: Too many open files"
    assert failure_reason(caught.value) == reason
    assert not caplog.records


# ---------------------------------------- the file


def _text(port: int = 1, more: str = "") -> str:
    return f"upstreams: {{u: {{endpoints: ['https://127.0.0.1:{port}']{more}}}}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file."""
    file = tmp_path / "gateway.yaml"
    file.write_text(_text())
    return file


def _changed(source: SettingsSource, after_failure: bool = False) -> bool:
    return [source.changed(after_failure) for _ in range(3)].count(True) > 0


def test_source_has_not_changed_after_read(file: Path) -> None:
    source = SettingsSource(file, {})
    file.write_text(_text(22))
    assert source.read().upstreams["u"].endpoints == ("https://127.0.0.1:22",)
    assert not _changed(source)
    file.write_text(_text(333))
    assert _changed(source)
    assert not _changed(source)


def test_change_before_the_first_read_is_noticed(file: Path) -> None:
    source = SettingsSource(file, {})
    file.write_text("upstreams: {}\n")
    with pytest.raises(SettingsError):
        source.read()
    file.write_text(_text())
    assert _changed(source)


def test_changed_upstream_certificate_is_noticed(file: Path, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("one")
    file.write_text(_text(more=f", tls: {{ca: {ca}}}"))
    source = SettingsSource(file, {})
    source.read()
    assert not _changed(source)
    ca.write_text("another")
    assert _changed(source)
    assert not _changed(source)
    file.write_text(_text())
    source.read()
    ca.unlink()  # which the settings do not name any more
    assert not _changed(source)


def test_changed_server_certificate_is_noticed_after_a_failure(file: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text("c")
    key.write_text("zero")
    file.write_text(f"{_text()}tls: {{certificate: {certificate}, key: {key}}}\n")
    source = SettingsSource(file, {})
    source.read()
    key.write_text("one")
    assert not _changed(source)
    key.write_text("another")
    assert _changed(source, after_failure=True)


def test_missing_named_file_is_an_error_at_the_start_only(file: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("k")
    file.write_text(f"{_text()}tls: {{certificate: {key}, key: {key}}}\n")
    source = SettingsSource(file, {})
    source.read()
    key.unlink()
    source.read()  # what was loaded stays in use
    with pytest.raises(SettingsError, match=r"gateway.yaml:2: tls.key: .* cannot be read"):
        SettingsSource(file, {}).read()


def test_pipe_is_not_read_again(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, _text().encode())
    os.close(writing)
    try:
        source = SettingsSource(Path(f"/dev/fd/{reading}"), {})
        assert list(source.read().upstreams) == ["u"]
        assert not _changed(source)
        with pytest.raises(SettingsError, match="is no file that can be read again"):
            source.read()
    finally:
        os.close(reading)


def test_new_warnings_are_logged_with_file_and_line(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*models: str) -> None:
        routes = [f"- {{match: {{model: '{model}'}}, upstream: u}}\n" for model in models]
        file.write_text(f"{_text()}routes:\n{''.join(routes)}")

    def warned() -> list[str]:
        places = [message.partition(" looks like")[0] for message in caplog.messages]
        caplog.clear()
        return places

    source = SettingsSource(file, {})
    write("a*", "^b.*$")
    before = source.read()
    source.log_warnings()
    assert warned() == [f"{file}:4: routes[1].match.model: '^b.*$'"]
    write("^c.*$", "^b.*$")
    source.read()
    source.log_warnings(before)
    assert warned() == [f"{file}:3: routes[0].match.model: '^c.*$'"]


# -------------------------------------------------------------------- a single process that reloads


def _write_text(file: Path, text: str) -> None:
    file.write_text(text)


def _write(file: Path, url: str, more: str = "") -> None:
    upstreams = f"{{u: {{endpoints: [{url}], dialect: triton}}}}"
    file.write_text(f"listen: 127.0.0.1:0\noffload: 0\nupstreams: {upstreams}\n{more}")


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
    monkeypatch.setattr(standalone, "POLL_INTERVAL", 0.01)


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
async def test_file_is_not_watched_if_the_settings_say_so(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(file, NOWHERE, "watch: false\n")
    async with _reloading(file) as reloading:
        _write(file, NOWHERE, "limits: {drain_timeout: 1}\n")
        log, looks = reloading.reloader._log, []
        is_due = log.is_due

        def look(settings: Settings) -> bool:
            looks.append(is_due(settings))
            return looks[-1]

        monkeypatch.setattr(log, "is_due", look)
        await until(lambda: len(looks) > 5)
        assert (any(looks), reloading.revision["number"]) == (False, 1)
        reloading.reloader.requested.set()
        await reloading.until_number(2)
        assert reloading.gateway.settings.limits.drain_timeout == 1
        _write(file, NOWHERE)  # it is watched from now on
        await reloading.until_number(3)
