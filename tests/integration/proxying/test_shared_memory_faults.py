"""Memory shared with a real Triton outlives each fault of a process, of a user or of time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.integration.proxying.shared_memory_calls import (
    IMAGE,
    PREFIX,
    SIZE,
    SLOW_IMAGE,
    call,
    calls_by_lane,
    cleaning_soon,
    files_of,
    gateway_before,
    load_on,
    memory_of,
    our_regions,
    pattern,
    slow_pattern,
    tensorgate_after,
    until,
)
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway
from tests.integration.support.other_user import NOBODY, as_nobody, folder_for_all
from tests.integration.support.real_server import Program
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer
from tests.support.scale import scaled

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(named(IMAGE)) as running:
        yield running


def regions_by_worker(gateway: Gateway) -> dict[str, int]:
    """Return the regions that processes of a gateway have mapped, and their ids."""
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text()
    found = {}
    for pid in map(int, children.split()):
        maps = Path(f"/proc/{pid}/maps").read_text()
        found.update(dict.fromkeys(re.findall(rf"/({PREFIX}[\da-f]+-\d+) ", maps), pid))
    return found


def test_worker_that_is_killed_under_load_harms_no_other_call(
    server: TritonServer, tmp_path: Path
) -> None:
    workers, clients = 2, 8
    with (
        gateway_before(
            tmp_path, server, command=cleaning_soon(), settings={"workers": workers}
        ) as gateway,
        load_on(gateway, clients) as load,
    ):
        until(lambda: len(regions_by_worker(gateway)) == workers)
        (killed, pid), (kept, _) = regions_by_worker(gateway).items()
        assert our_regions(server) == {killed, kept}
        load.until_calls(100)
        assert load.lost == 0
        gateway.expected_error = f"worker {pid} was killed by SIGKILL"
        os.kill(pid, signal.SIGKILL)
        # The new worker gets a region, and frees that of the dead one.
        until(lambda: len(our_regions(server) - {killed, kept}) == 1)
        until(lambda: killed not in our_regions(server))
        until(lambda: not files_of(killed))
        load.until_calls(100)
        assert our_regions(server) == set(regions_by_worker(gateway))
        assert kept in our_regions(server)
        # Each client had one call at most in the dead worker.
        assert load.lost <= clients
        assert load.statuses == {200}
    assert our_regions(server) == set()


# ----------------------------------------------------------------------------- permissions


@contextmanager
def gateway_that_may_not_write(server: TritonServer) -> Iterator[Gateway]:
    """Run a gateway whose user may not write to the folder of shared memory."""
    prefix = () if os.geteuid() else as_nobody(Path(sys.executable))
    with folder_for_all() as folder:
        forbidden = folder / "shm"
        forbidden.mkdir(0o555)
        command = tensorgate_after(
            "from functools import partial",
            "from pathlib import Path",
            "from gateway.app.build import upstreams",
            "from gateway.system import shared_memory as system",
            "from gateway.upstream.shared_memory import SharedMemoryPolicy as Policy",
            f"system.FOLDER = Path({str(forbidden)!r})",
            "upstreams.SharedMemoryPolicy = partial(Policy, retry_interval=0.1)",
        )
        with gateway_before(folder, server, command=(*prefix, *command)) as gateway:
            yield gateway


def reasons(gateway: Gateway) -> list[str]:
    """Return the lines of its log that say why there is no shared memory."""
    return re.findall(r"no shared memory: (.*)", gateway.log)


def test_calls_take_the_socket_if_the_gateway_may_not_write_to_the_folder(
    server: TritonServer,
) -> None:
    with gateway_that_may_not_write(server) as gateway, load_on(gateway) as load:
        load.until_calls(100)
        assert load.statuses == {200}
        assert memory_of(gateway)["size"] == 0
        assert reasons(gateway)[0].endswith("/shm: Permission denied")
    assert our_regions(server) == set()


def test_folder_that_the_gateway_may_not_write_is_told_once(server: TritonServer) -> None:
    with gateway_that_may_not_write(server) as gateway, load_on(gateway) as load:
        until(lambda: load.count >= 100)  # in which it tries again, each 0.1 s
        assert len(reasons(gateway)) == 1


class _TritonOfNobody(TritonServer):
    """A Triton that runs as another user than the tests and their gateways."""

    def _prepare(self, folder: Path) -> Program:
        program = super()._prepare(folder)
        shutil.chown(folder, NOBODY, NOBODY)
        return replace(program, command=(*as_nobody(program.python), *program.command))


def test_server_of_another_user_maps_the_memory_whatever_the_umask(tmp_path: Path) -> None:
    command = tensorgate_after("import os", "os.umask(0o077)")
    with (
        _TritonOfNobody(named(IMAGE)) as server,
        gateway_before(tmp_path, server, command=command) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        assert f"Uid:\t{NOBODY}\t" in Path(f"/proc/{server.pid}/status").read_text()
        assert os.getuid() != NOBODY
        assert memory_of(gateway)["why_not"] == ""
        for number in range(10):
            assert call(client, pattern(number)) == 200
        lanes = calls_by_lane(gateway)
        assert lanes["inputs", "shared_memory"] == 10
        assert lanes["outputs", "shared_memory"] >= 8  # the first calls await metadata


# ----------------------------------------------------------------------------- late responses


def slow_call(gateway: Gateway, number: int) -> int:
    with Client(gateway.host, gateway.port) as client:
        return call(client, slow_pattern(number, 0.2), model=SLOW_IMAGE.name)


def test_late_responses_of_calls_that_timed_out_write_to_no_other_call(tmp_path: Path) -> None:
    slow = {"model": SLOW_IMAGE.name}
    settings = {
        "routes": [
            {"match": slow, "upstream": "server", "limits": {"request_timeout": "100ms"}},
            {"upstream": "server"},
        ]
    }
    calls = 8
    with (
        TritonServer((*named(IMAGE), SLOW_IMAGE)) as server,
        gateway_before(tmp_path, server, settings=settings) as gateway,
        load_on(gateway) as load,
        ThreadPoolExecutor(calls) as pool,
    ):
        for turn in range(scaled(30)):
            numbers = range(turn * calls, (turn + 1) * calls)
            assert {*pool.map(partial(slow_call, gateway), numbers)} == {504}
            # Triton still has most of them, with inputs and outputs: it runs one in 0.2 s.
            assert memory_of(gateway)["quarantined"] > SIZE
            load.until_calls(20)
            until(lambda: not memory_of(gateway)["quarantined"])
        assert (load.statuses, load.lost) == ({200}, 0)
        lanes = calls_by_lane(gateway)
        assert lanes["inputs", "shared_memory"] > lanes["inputs", "full"]
