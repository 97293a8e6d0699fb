"""Servers fail under load: clients see few errors, and recovery follows."""

from pathlib import Path

import pytest

from tests.resilience.fleet import fleet, running_gateway
from tests.resilience.load import MIXED, load_on
from tests.resilience.server import Behaviour

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


async def test_a_hanging_server_is_named_and_then_ejected(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, "limits: {idle_timeout: 2s}\n") as (process, url),
        load_on(url) as load,
    ):
        assert not await load.wait_for_good()
        servers[1].stop()
        await process.wait_for_output(f"{servers[1].url} failed 5 times in a row: ejected")
        await load.until(lambda counts: counts.errors[504] >= 5)
        await load.wait_for_good()
        servers[1].resume()
        await load.wait_for_good()  # in which a trial ends that began before
        assert not await load.wait_for_good()
        await load.end()
        assert set(load.counts.failures) == {"504"}
        assert load.counts.errors[504] <= 5 + load.clients
        assert all("upstream 'fleet'" in message for message in load.counts.messages)


async def test_servers_that_close_idle_connections_cause_no_errors(file: Path) -> None:
    async with fleet() as servers, running_gateway(file, servers) as (_, url):
        for server in servers:
            await server.behave(Behaviour(keep_alive=0.2))
        # So that connections to the servers are idle for about that time.
        async with load_on(url, pause=0.2) as load:
            await load.wait_for_good(150)
            await load.end()
        assert not load.counts.failures


async def test_servers_that_close_reused_connections_cause_no_errors(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers) as (_, url),
        load_on(url) as load,
    ):
        assert not await load.wait_for_good()
        for server in servers:
            await server.behave(Behaviour(closes_unanswered=True))
        await load.wait_for_good(300)
        await load.end()
        assert not load.counts.failures


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


async def test_a_server_that_cuts_its_responses_is_ejected(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers) as (process, url),
        load_on(url) as load,
    ):
        assert not await load.wait_for_good()
        await servers[0].behave(Behaviour(cut=True))
        await process.wait_for_output(f"{servers[0].url} failed 5 times in a row: ejected")
        await load.wait_for_good()
        assert not await load.wait_for_good()
        assert set(load.counts.failures) <= {"502", "aborted", "unanswered"}
        assert 5 <= load.counts.failures.total() <= 5 + load.clients


async def test_errors_of_servers_pass_as_they_are(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, upstream="outlier_detection: {consecutive_failures: 0}") as (
            _,
            url,
        ),
        load_on(url) as load,
    ):
        assert not await load.wait_for_good()
        await servers[2].behave(Behaviour(unavailable=True))
        await load.until(lambda counts: counts.errors[503] > 50)
        await servers[2].behave(Behaviour())
        await load.wait_for_good()
        assert not await load.wait_for_good()
        assert set(load.counts.failures) == {"503"}
        assert list(load.counts.messages) == [f"{servers[2].name} is unavailable"]


async def test_an_unavailable_server_is_ejected_until_it_recovers(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, upstream=SHORT_EJECTION) as (process, url),
        load_on(url) as load,
    ):
        assert not await load.wait_for_good()
        await servers[2].behave(Behaviour(unavailable=True))
        await process.wait_for_output(f"{servers[2].url} failed 5 times in a row: ejected")
        before = load.counts.servers[servers[2].name]
        await load.wait_for_good()
        await servers[2].behave(Behaviour())
        await load.until(lambda counts: counts.servers[servers[2].name] > before + 50)
        assert not await load.wait_for_good()
        # Those under way when it was left out, and one for each look whether it is well again.
        assert set(load.counts.failures) == {"503"}
        assert 5 <= load.counts.errors[503] <= 5 + load.clients


async def test_a_slow_server_gets_fewer_requests(file: Path) -> None:
    async with fleet() as servers, running_gateway(file, servers) as (_, url):
        await servers[0].behave(Behaviour(delay=0.5))
        async with load_on(url) as load:
            await load.wait_for_good(500)
            await load.end()
        assert not load.counts.failures
        counts = [load.counts.servers[server.name] for server in servers]
        assert 0 < counts[0] < min(counts[1:]) / 2
