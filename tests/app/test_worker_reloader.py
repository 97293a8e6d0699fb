"""A parent's and a worker's side of new settings, in one process."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from gateway.app.gateway import Gateway
from gateway.app.reload.resources import Resources
from gateway.app.reload.source import SettingsSource
from gateway.app.worker_reloader import SupervisorReloader, WorkerReloader
from gateway.settings.schema import Settings
from gateway.workers.letters import ReceivedUpdate
from gateway.workers.reload_broadcast import ConfigUpdate
from tests.support.certificates import authority, certificate_files
from tests.support.gateway import until
from tests.support.raw_client import RawClient, connect


class _Family:
    """A leader, and what its sockets are for nobody to use."""

    def __init__(self, file: Path, end: str = "") -> None:
        self.file = file
        self.write("http://127.0.0.1:1", end=end)
        source = SettingsSource(file, {})
        self.levels: list[str] = []
        self.leader = SupervisorReloader(source.read(), source, self.note)
        self.sockets = self.leader.sockets

    def close(self) -> None:
        for sock in self.leader.sockets:
            sock.close()

    def note(self, settings: Settings) -> None:
        self.levels.append(settings.log.level)

    def write(self, url: str, more: str = "", end: str = "") -> None:
        upstreams = f"{{u: {{endpoints: ['{url}'], dialect: triton{more}}}}}"
        self.file.write_text(f"listen: 127.0.0.1:0\nworkers: 2\nupstreams: {upstreams}\n{end}")

    @property
    def url(self) -> str:
        return self.leader.addresses[0]

    def look(self) -> ConfigUpdate:
        orders = self.leader.look(wished=True)
        assert orders is not None
        return orders


@pytest.fixture
def family(tmp_path: Path) -> Iterator[_Family]:
    """A family that has its settings of a file."""
    with closing(_Family(tmp_path / "gateway.yaml")) as family:
        yield family


async def _answer(follower: WorkerReloader, orders: ConfigUpdate) -> bytes:
    """Have a letter read, and give the answer."""
    memory = os.memfd_create("letter")
    os.write(memory, orders.letter)
    answer, reply = os.pipe()
    os.set_blocking(answer, False)
    follower.take(ReceivedUpdate(memory, reply))
    told = b""

    def is_told() -> bool:
        nonlocal told
        try:
            told = os.read(answer, 4096)
        except BlockingIOError:
            return False
        return True

    await until(is_told)
    os.close(answer)
    return told


async def test_workers_follow(family: _Family, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    levels: list[str] = []
    async with (
        family.leader.gateway(lambda: None) as gateway,
        WorkerReloader(gateway, lambda settings: levels.append(settings.log.level)) as follower,
    ):
        assert (gateway.revision.number, gateway.revision.file) == (1, str(family.file))
        family.write("http://127.0.0.1:2")
        orders = family.look()
        assert orders.sockets == family.sockets
        assert family.levels == []
        assert await _answer(follower, orders) == b"+"
        family.leader.on_applied({})
        assert caplog.messages == [f"settings reloaded from {family.file}: upstreams ~u"]
        assert gateway.settings.upstreams["u"].endpoints == ("http://127.0.0.1:2",)
        assert (gateway.revision.number, gateway.revision.reloads) == (2, 1)
        assert levels == family.levels == ["info"]
        family.leader.on_applied({})
        assert len(caplog.messages) == 1


async def test_workers_know_of_a_file_that_cannot_be_used(
    family: _Family, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        family.leader.gateway(lambda: None) as gateway,
        WorkerReloader(gateway, family.note) as follower,
    ):
        family.write("ftp://x")
        assert await _answer(follower, family.look()) == b"+"
        family.leader.on_applied({})
        (message,) = caplog.messages
        assert message.startswith(f"settings not reloaded: {family.file}:3: upstreams.u.endpoints")
        revision = gateway.revision
        assert revision.last_failure is not None
        assert revision.last_failure in message
        assert (revision.number, revision.failures) == (1, 1)
        assert family.levels == []


async def test_a_worker_that_cannot_goes_on_and_is_told_again(
    family: _Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = tmp_path / "ca.pem"
    os.symlink("/etc/ssl/certs/ca-certificates.crt", certificates)
    ca = f", tls: {{ca: {certificates}}}"
    async with (
        family.leader.gateway(lambda: None) as gateway,
        WorkerReloader(gateway, family.note) as follower,
    ):
        family.write("https://127.0.0.1:2", ca)
        orders = family.look()
        certificates.rename(tmp_path / "elsewhere")  # between the parent's look and the worker's
        told = (await _answer(follower, orders)).decode()
        assert told.startswith(f"upstreams.u.tls.ca: cannot read {certificates}: No such file")
        family.leader.on_applied({7: told, 8: told, 9: "no luck"})
        assert caplog.messages == [
            f"workers 7, 8: still on the settings from before: {told}",
            "worker 9: still on the settings from before: no luck",
        ]
        assert gateway.settings.upstreams["u"].endpoints == ("http://127.0.0.1:1",)
        assert gateway.revision.last_failure == told
        (tmp_path / "elsewhere").rename(certificates)
        assert await _answer(follower, family.look()) == b"+"
        assert gateway.settings.upstreams["u"].endpoints == ("https://127.0.0.1:2",)
        assert gateway.revision.number == 3


async def test_a_fault_of_its_own_ends_neither(
    family: _Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    async with (
        family.leader.gateway(lambda: None) as gateway,
        WorkerReloader(gateway, family.note) as follower,
    ):
        orders = family.look()
        with monkeypatch.context() as patch:
            patch.setattr(Gateway, "reload", fail)
            assert await _answer(follower, orders) == b"the gateway failed; its log says why"
        assert await _answer(follower, orders) == b"+"
        with monkeypatch.context() as patch:
            patch.setattr("gateway.app.worker_reloader.gather", fail)
            assert await _answer(follower, family.look()) == b"+"
        assert caplog.text.count("RuntimeError: no luck") == 2
        assert (
            gateway.revision.last_failure == f"{family.file}: the gateway failed; its log says why"
        )


async def test_what_it_looks_at(family: _Family) -> None:
    leader = family.leader
    assert [leader.look(wished=False) for _ in range(3)] == [None, None, None]
    family.write("http://127.0.0.1:33")
    assert leader.look(wished=False) is None
    assert leader.look(wished=False) is not None
    family.write("http://127.0.0.1:444", end="watch: false\n")
    assert [leader.look(wished=False) is None for _ in range(3)] == [True, False, True]
    family.write("http://127.0.0.1:5555")
    assert [leader.look(wished=False) for _ in range(3)] == [None, None, None]


# ------------------------------------------------------------------- what new workers begin with


@asynccontextmanager
async def _client_of_new_worker(family: _Family) -> AsyncIterator[RawClient]:
    """Start a worker, and connect to it as the parent would have it."""
    (listening,) = family.leader.sockets
    async with family.leader.gateway(lambda: None) as gateway:

        async def place() -> None:
            gateway.take((await asyncio.to_thread(listening.accept))[0])

        placing = asyncio.create_task(place())
        async with connect(family.url) as client:
            await placing
            yield client


def _renew(family: _Family, change: Callable[[], object]) -> None:
    """Change files, and have the parent look for as long as it takes."""
    change()
    assert [family.leader.look(wished=False) for _ in range(2)] == [None, None]


UNUSABLE_LATER = pytest.mark.parametrize("unusable_later", [False, True])


@UNUSABLE_LATER
async def test_a_new_worker_begins_with_the_newest_keys(
    tmp_path: Path, unusable_later: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old")
    rule = "{match: {operations: [health]}, upstream: u, auth: team}"
    settings = f"api_keys: {{team: {{file: {keys}}}}}\nroutes: [{rule}]\n"
    with closing(_Family(tmp_path / "gateway.yaml", settings)) as family:
        _renew(family, lambda: keys.write_text("newer"))
        if unusable_later:
            _renew(family, lambda: keys.write_text("\n"))
        async with _client_of_new_worker(family) as client:
            statuses = []
            for key in ("old", "newer"):
                shown = {"Authorization": f"Bearer {key}"}
                reply = await client.call("GET", "/v2/models/m", headers=shown)
                statuses.append(reply.status)
        assert statuses == [401, 404]


@UNUSABLE_LATER
async def test_a_new_worker_begins_with_the_newest_certificate(
    tmp_path: Path, unusable_later: bool
) -> None:
    certificate, key = certificate_files(tmp_path, authority().issue_cert("old"))
    settings = f"tls: {{certificate: {certificate}, key: {key}}}\n"
    with closing(_Family(tmp_path / "gateway.yaml", settings)) as family:
        _renew(family, lambda: certificate_files(tmp_path, authority().issue_cert("127.0.0.1")))
        if unusable_later:
            _renew(family, lambda: (tmp_path / "certificate.pem").write_text("none"))
        async with _client_of_new_worker(family) as client:  # who would not trust the old one
            assert (await client.call("GET", "/v2/health/live")).status == 200


def test_a_fault_of_renewal_does_not_end_the_parent(
    family: _Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Resources) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(Resources, "renew", fail)
    assert family.leader.look(wished=False) is None
    assert family.leader.look(wished=True) is not None
    assert caplog.text.count("RuntimeError: no luck") == 2
