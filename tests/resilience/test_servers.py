"""Servers that fail under load: what clients see of it, and that it ends."""

from pathlib import Path

import pytest

from tests.resilience.fleet import fleet, running_gateway
from tests.resilience.load import MIXED, load_on
from tests.resilience.server import Behaviour

BRIEFLY = "outlier_detection: {base_ejection_time: 500ms}"
"""For how long a server is left out at first."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file that is yet to be written."""
    return tmp_path / "gateway.yaml"


@pytest.mark.parametrize(
    ("more", "lost"),
    [("", len(MIXED)), ("routes: [{upstream: fleet, retry_on: [unanswered]}]\n", 0)],
    ids=["careful", "unanswered"],
)
async def test_a_server_that_is_killed_costs_what_it_had_not_answered(
    file: Path, more: str, lost: int
) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, more, BRIEFLY) as (process, url),
        load_on(url) as load,
    ):
        assert not await load.goes_on()
        assert set(load.tally.servers) == {server.name for server in servers}
        await servers[0].kill()
        failures = await load.goes_on()
        assert set(failures) <= {"502"}
        assert failures.total() <= lost
        await process.wait_for_output(f"{servers[0].url} failed 5 times in a row: ejected")
        assert not await load.goes_on()
        before = load.tally.servers[servers[0].name]
        await servers[0].start()
        await load.until(lambda tally: tally.servers[servers[0].name] > before + 50)
        assert not await load.goes_on()
        assert load.tally.failures == failures


async def test_a_server_that_is_alone_is_used_as_soon_as_it_is_there_again(file: Path) -> None:
    async with (
        fleet(1) as servers,
        running_gateway(file, servers) as (_, url),
        load_on(url) as load,
    ):
        (server,) = servers
        assert not await load.goes_on()
        await server.kill()
        await load.until(lambda tally: tally.errors[503] > 100)
        await server.start()
        await load.goes_on()
        assert not await load.goes_on()
        assert set(load.tally.failures) <= {"502", "503"}
        assert load.tally.errors[502] <= load.clients
        assert all(server.url in message for message in load.tally.messages)


async def test_a_server_that_hangs_is_named_and_then_left_out(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, "limits: {idle_timeout: 2s}\n") as (process, url),
        load_on(url) as load,
    ):
        assert not await load.goes_on()
        servers[1].stop()
        await process.wait_for_output(f"{servers[1].url} failed 5 times in a row: ejected")
        await load.until(lambda tally: tally.errors[504] >= 5)
        await load.goes_on()
        servers[1].go_on()
        await load.goes_on()  # in which a trial ends that began before
        assert not await load.goes_on()
        await load.end()
        assert set(load.tally.failures) == {"504"}
        assert load.tally.errors[504] <= 5 + load.clients
        assert all(servers[1].url in message for message in load.tally.messages)


async def test_servers_that_close_idle_connections_are_not_noticed(file: Path) -> None:
    async with fleet() as servers, running_gateway(file, servers) as (_, url):
        for server in servers:
            await server.behave(Behaviour(keep_alive=0.2))
        # So that connections to the servers are idle for about that time.
        async with load_on(url, pause=0.2) as load:
            await load.goes_on(150)
            await load.end()
        assert not load.tally.failures


async def test_servers_that_do_not_answer_on_kept_connections_are_not_noticed(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers) as (_, url),
        load_on(url) as load,
    ):
        assert not await load.goes_on()
        for server in servers:
            await server.behave(Behaviour(forgets=True))
        await load.goes_on(300)
        await load.end()
        assert not load.tally.failures


async def test_answers_that_break_off_are_never_taken_for_whole(file: Path) -> None:
    async with (
        fleet(1) as servers,
        running_gateway(file, servers) as (_, url),
        load_on(url) as load,
    ):
        assert not await load.goes_on()
        await servers[0].behave(Behaviour(cut=True))
        ok = load.tally.ok
        await load.until(lambda tally: tally.failures.total() > 100)
        assert load.tally.ok <= ok + load.clients
        assert load.tally.errors[502] > 0
        await servers[0].behave(Behaviour())
        await load.goes_on()
        assert not await load.goes_on()
        # A large answer has begun as JSON before it breaks off.
        assert set(load.tally.failures) <= {"502", "aborted", "unanswered"}
        assert all(servers[0].url in message for message in load.tally.messages)


async def test_a_server_whose_answers_break_off_is_left_out(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers) as (process, url),
        load_on(url) as load,
    ):
        assert not await load.goes_on()
        await servers[0].behave(Behaviour(cut=True))
        await process.wait_for_output(f"{servers[0].url} failed 5 times in a row: ejected")
        await load.goes_on()
        assert not await load.goes_on()
        assert set(load.tally.failures) <= {"502", "aborted", "unanswered"}
        assert 5 <= load.tally.failures.total() <= 5 + load.clients


async def test_errors_of_servers_pass_as_they_are(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, care="outlier_detection: {consecutive_failures: 0}") as (
            _,
            url,
        ),
        load_on(url) as load,
    ):
        assert not await load.goes_on()
        await servers[2].behave(Behaviour(unavailable=True))
        await load.until(lambda tally: tally.errors[503] > 50)
        await servers[2].behave(Behaviour())
        await load.goes_on()
        assert not await load.goes_on()
        assert set(load.tally.failures) == {"503"}
        assert list(load.tally.messages) == [f"{servers[2].name} is unavailable"]


async def test_a_server_that_is_unavailable_is_left_out_until_it_is_well(file: Path) -> None:
    async with (
        fleet() as servers,
        running_gateway(file, servers, care=BRIEFLY) as (process, url),
        load_on(url) as load,
    ):
        assert not await load.goes_on()
        await servers[2].behave(Behaviour(unavailable=True))
        await process.wait_for_output(f"{servers[2].url} failed 5 times in a row: ejected")
        before = load.tally.servers[servers[2].name]
        await load.goes_on()
        await servers[2].behave(Behaviour())
        await load.until(lambda tally: tally.servers[servers[2].name] > before + 50)
        assert not await load.goes_on()
        # Those under way when it was left out, and one for each look whether it is well again.
        assert set(load.tally.failures) == {"503"}
        assert 5 <= load.tally.errors[503] <= 5 + load.clients


async def test_a_slow_server_gets_less_to_do(file: Path) -> None:
    async with fleet() as servers, running_gateway(file, servers) as (_, url):
        await servers[0].behave(Behaviour(delay=0.5))
        async with load_on(url) as load:
            await load.goes_on(500)
            await load.end()
        assert not load.tally.failures
        counts = [load.tally.servers[server.name] for server in servers]
        assert 0 < counts[0] < min(counts[1:]) / 2
