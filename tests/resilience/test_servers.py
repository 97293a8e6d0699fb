"""Servers and workers fail under load: clients see few errors; a gateway that stops loses none."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.resilience.fleet import FleetServer, fleet, running_gateway
from tests.resilience.load import MIXED, Kind, load_on
from tests.resilience.server import Behaviour
from tests.support.certificates import certificate_files, server_certificate
from tests.support.gateway_process import Process
from tests.support.scale import SCALE, scaled

SHORT_EJECTION = "outlier_detection: {base_ejection_time: 500ms}"
"""A short time of the first ejection."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file that is yet to be written."""
    return tmp_path / "gateway.yaml"


@pytest.mark.parametrize(
    ("more", "lost"),
    [("", len(MIXED)), ("routes: [{upstream: fleet, retry_on: [no_response]}]\n", 0)],
    ids=["careful", "no_response"],
)
async def test_a_killed_server_costs_only_its_unanswered_requests(
    file: Path, more: str, lost: int
) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, more, SHORT_EJECTION) as (process, url),
        load_on(url) as load,
    ):
        assert not await load.wait_for_good()
        assert set(load.counts.servers) == {server.name for server in servers}
        await servers[0].kill()
        failures = await load.wait_for_good()
        assert set(failures) <= {"502"}
        assert failures.total() <= lost
        await process.wait_for_output(f"{servers[0].url} failed 5 times in a row: ejected")
        assert not await load.wait_for_good()
        before = load.counts.servers[servers[0].name]
        await servers[0].start()
        await load.until(lambda counts: counts.servers[servers[0].name] > before + 50)
        assert not await load.wait_for_good()
        assert load.counts.failures == failures


async def test_a_single_server_is_used_as_soon_as_it_is_back(file: Path) -> None:
    async with (
        fleet(1) as servers,
        running_gateway(file, servers) as (_, url),
        load_on(url) as load,
    ):
        (server,) = servers
        assert not await load.wait_for_good()
        await server.kill()
        await load.until(lambda counts: counts.errors[503] > 100)
        await server.start()
        await load.wait_for_good()
        assert not await load.wait_for_good()
        assert set(load.counts.failures) <= {"502", "503"}
        assert load.counts.errors[502] <= load.clients
        assert all("upstream 'fleet'" in message for message in load.counts.messages)


async def test_cut_responses_are_never_taken_for_complete(file: Path) -> None:
    async with (
        fleet(1) as servers,
        running_gateway(file, servers) as (_, url),
        load_on(url) as load,
    ):
        assert not await load.wait_for_good()
        await servers[0].behave(Behaviour(cut=True))
        ok = load.counts.ok
        await load.until(lambda counts: counts.failures.total() > 100)
        assert load.counts.ok <= ok + load.clients
        assert load.counts.errors[502] > 0
        await servers[0].behave(Behaviour())
        await load.wait_for_good()
        assert not await load.wait_for_good()
        # A large response has begun as JSON before it breaks off.
        assert set(load.counts.failures) <= {"502", "aborted", "unanswered"}
        assert all("upstream 'fleet'" in message for message in load.counts.messages)


async def test_a_slow_server_gets_fewer_requests(file: Path) -> None:
    async with fleet() as servers, running_gateway(file, servers) as (_, url):
        await servers[0].behave(Behaviour(delay=0.5))
        async with load_on(url) as load:
            await load.wait_for_good(500)
            await load.end()
        assert not load.counts.failures
        counts = [load.counts.servers[server.name] for server in servers]
        assert 0 < counts[0] < min(counts[1:]) / 2


KEEP_ALIVE = (*[Kind.SMALL] * 8, Kind.LARGE, Kind.CHUNKED)
"""Five connections for each of two workers."""


async def test_a_killed_worker_costs_only_its_running_calls(tmp_path: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(tmp_path / "gateway.yaml", servers, "workers: 2\n") as (process, url),
        load_on(url, KEEP_ALIVE) as load,
    ):
        assert not await load.wait_for_good()
        victim = int((await process.wait_for_output(r"2 workers: (\d+), "))[1])
        os.kill(victim, signal.SIGKILL)
        await process.wait_for_output(f"worker {victim} was killed by SIGKILL; another one starts")
        await process.wait_for_output(r"worker (\d+) is up")
        await load.wait_for_good()
        assert set(load.counts.failures) <= {"unanswered", "aborted"}
        assert load.counts.failures.total() <= 5
        assert not await load.wait_for_good()


FRESH = (Kind.FRESH,) * 8
OVER_TLS = [(1, MIXED), (2, FRESH)]
if SCALE >= 1:
    OVER_TLS += [(1, FRESH), (2, MIXED)]
"""Workers and connections; without TLS, each run tries all of them."""


def _to_the_gateway(process: Process) -> None:
    process.signal(signal.SIGTERM)


def _to_all_processes(process: Process) -> None:
    """As systemd does if nobody says otherwise, and a terminal for Ctrl-C."""
    found = re.search(r"workers: (.*)", process.said)
    assert found is not None
    for pid in (process.pid, *map(int, found[1].split(", "))):
        os.kill(pid, signal.SIGTERM)


async def _stop_under_load(
    file: Path,
    servers: Sequence[FleetServer],
    more: str,
    kinds: tuple[Kind, ...] = MIXED,
    stop: Callable[[Process], None] = _to_the_gateway,
) -> None:
    async with (
        running_gateway(file, servers, more) as (process, url),
        load_on(url, kinds) as load,
    ):
        assert not await load.wait_for_good(100)
        stop(process)
        counts = await load.until_refused()
        assert counts.failures == {"refused": load.clients}
        status, _, err = await process.end()
    assert status == 0
    assert err.splitlines()[-1].endswith(": stopped")
    for word in ("dropped", "ERROR", "Traceback"):
        assert word not in err


@pytest.mark.parametrize(
    ("workers", "stop"), [(1, _to_the_gateway), (2, _to_the_gateway), (2, _to_all_processes)]
)
async def test_no_request_is_lost_when_the_gateway_stops(
    file: Path, workers: int, stop: Callable[[Process], None]
) -> None:
    async with fleet(2) as servers:
        for kinds in (MIXED, FRESH) * scaled(2):
            await _stop_under_load(file, servers, f"workers: {workers}\n", kinds, stop)


@pytest.mark.parametrize(("workers", "kinds"), OVER_TLS)
async def test_no_request_is_lost_over_tls_when_the_gateway_stops(
    file: Path, tmp_path: Path, workers: int, kinds: tuple[Kind, ...]
) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    more = f"workers: {workers}\ntls: {{certificate: {certificate}, key: {key}}}\n"
    async with fleet(2) as servers:
        await _stop_under_load(file, servers, more, kinds)
