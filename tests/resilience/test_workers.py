"""A worker that dies under load."""

import os
import signal
from pathlib import Path

from tests.resilience.fleet import fleet, running_gateway
from tests.resilience.load import Kind, load_on

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
