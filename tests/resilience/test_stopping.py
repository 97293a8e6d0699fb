"""A gateway that stops under load responds to each request."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.resilience.fleet import FleetServer, fleet, running_gateway
from tests.resilience.load import MIXED, Kind, load_on
from tests.support.certificates import certificate_files, server_certificate
from tests.support.gateway_process import Process
from tests.support.scale import SCALE, scaled

FRESH = (Kind.FRESH,) * 8
OVER_TLS = [(1, MIXED), (2, FRESH)]
if SCALE >= 1:
    OVER_TLS += [(1, FRESH), (2, MIXED)]
"""Workers and connections; without TLS, each run tries all of them."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file that is yet to be written."""
    return tmp_path / "gateway.yaml"


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
