"""Memory shared with a real Triton grows with large calls, shrinks without them, and leaves room.

Triton maps all of a region from the start, so that it has to take memory that comes later.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.proxying.shared_memory_calls import (
    IMAGE,
    PREFIX,
    SHAPE,
    Load,
    call,
    calls_by_lane,
    gateway_before,
    load_on,
    memory_of,
    pattern,
    tensorgate_after,
    until,
)
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway
from tests.integration.support.real_server import Program
from tests.integration.triton.models import Model, Tensor, named
from tests.integration.triton.server import SHARED_MEMORY, TritonServer

pytestmark = pytest.mark.triton

MIB = 2**20
START = 4 * MIB
SIZE = {"size": "256MiB", "min_bytes": "128KiB"}
LARGE_BATCH = 166
"""Images of 100 MB."""
LARGE = Model(
    "large",
    "identity",
    (Tensor("INPUT0", "FP32", SHAPE[1:]),),
    (Tensor("OUTPUT0", "FP32", SHAPE[1:]),),
    max_batch_size=LARGE_BATCH,
)


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer((*named(IMAGE), LARGE)) as running:
        yield running


def shrinking_each(seconds: float, **times: float) -> tuple[str, ...]:
    """Return the command of a gateway that looks so often at memory to give back."""
    own = ", ".join(f"{name}={value}" for name, value in times.items())
    return tensorgate_after(
        "from functools import partial",
        "from gateway.app.build import upstreams",
        "from gateway.upstream.shared_memory import SharedMemoryPolicy as Policy",
        f"upstreams.SharedMemoryPolicy = partial(Policy, shrink_interval={seconds}, {own})",
    )


def shared_pages(server: TritonServer) -> int:
    """Return the bytes of the gateway's memory that a server has touched."""
    maps = Path(f"/proc/{server.pid}/smaps").read_text()
    region = rf"/{PREFIX}[\da-f]+-\d+ .*\n(?:\w+:.*\n)*?Rss:\s+(\d+) kB"
    return sum(map(int, re.findall(region, maps))) * 1024


def test_memory_comes_with_large_calls_goes_after_them_and_comes_again(
    server: TritonServer, tmp_path: Path
) -> None:
    command = shrinking_each(1)
    with (
        gateway_before(
            tmp_path, server, command=command, shared_memory=SIZE, dialect="auto"
        ) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        assert memory_of(gateway)["allocated"] == START
        for turn in range(3):
            calls = calls_by_lane(gateway)
            for number in range(6):
                assert call(client, pattern(10 * turn + number, 64)) == 200
            calls = calls_by_lane(gateway) - calls
            # The first one finds no room for its inputs, the second one none for its outputs.
            assert calls["inputs", "shared_memory"] >= 4
            assert calls["outputs", "shared_memory"] >= 3
            assert memory_of(gateway)["allocated"] > 64 * MIB
            assert shared_pages(server) > 64 * MIB
            until(lambda: memory_of(gateway)["allocated"] == START)
            assert shared_pages(server) <= START
        assert memory_of(gateway)["size"] == 256 * MIB


def test_large_call_has_its_memory_after_two_calls(server: TritonServer, tmp_path: Path) -> None:
    values = pattern(1, LARGE_BATCH)
    with (
        gateway_before(
            tmp_path,
            server,
            settings={"limits": {"max_request_bytes": "256MiB"}},
            shared_memory=SIZE,
        ) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        for _ in range(4):
            assert call(client, values, model=LARGE.name) == 200
        lanes = calls_by_lane(gateway)
        assert lanes["inputs", "shared_memory"] >= 3
        assert lanes["outputs", "shared_memory"] >= 2
        before = memory_of(gateway)["allocated"]
        for _ in range(4):
            assert call(client, values, model=LARGE.name) == 200
        assert memory_of(gateway)["allocated"] == before


def test_calls_keep_their_bytes_while_the_memory_grows_and_shrinks(
    server: TritonServer, tmp_path: Path
) -> None:
    with gateway_before(
        tmp_path, server, command=shrinking_each(0.01), shared_memory=SIZE
    ) as gateway:
        sizes: set[int] = set()
        with ExitStack() as stack:
            loads: list[Load] = [
                stack.enter_context(load_on(gateway, clients, batch))
                for clients, batch in ((2, 1), (1, 10), (1, 60))
            ]
            while not all(load.count >= 15 for load in loads):
                sizes.add(memory_of(gateway)["allocated"])
            assert [(load.statuses, load.lost) for load in loads] == [({200}, 0)] * 3
        assert len(sizes) > 3
        lanes = calls_by_lane(gateway)
        assert lanes["inputs", "shared_memory"] > lanes["inputs", "full"] > 0
        until(lambda: memory_of(gateway)["allocated"] == START)


# ------------------------------------------------------------------------ little shared memory


@contextmanager
def small_shared_memory() -> Iterator[tuple[str, ...]]:
    """Give what runs a command with a /dev/shm of its own, of 64 MiB as in a container."""
    nsenter = shutil.which("nsenter")
    if os.geteuid() or nsenter is None:
        pytest.skip("only root may mount a small /dev/shm, with nsenter of util-linux")
    mount = f"mount -t tmpfs -o size=64m tmpfs {SHARED_MEMORY} && echo && exec sleep infinity"
    command = ("unshare", "--mount", "sh", "-c", mount)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        try:
            yield (nsenter, f"--mount=/proc/{holder.pid}/ns/mnt")
        finally:
            holder.kill()


class _TritonWithin(TritonServer):
    """A Triton whose command runs after another one: with little shared memory."""

    def __init__(self, prefix: tuple[str, ...]) -> None:
        super().__init__(named(IMAGE))
        self._prefix = prefix

    def _prepare(self, folder: Path) -> Program:
        program = super()._prepare(folder)
        return replace(program, command=(*self._prefix, *program.command))


def free_bytes(prefix: tuple[str, ...]) -> int:
    """Return what is free of that /dev/shm."""
    command = (*prefix, "stat", "--file-system", "--format=%a %S", str(SHARED_MEMORY))
    blocks, size = subprocess.check_output(command, text=True).split()
    return int(blocks) * int(size)


def gateway_within(
    prefix: tuple[str, ...], folder: Path, server: TritonServer
) -> AbstractContextManager[Gateway]:
    """Run a gateway after that command, which tries again soon."""
    command = (*prefix, *shrinking_each(60, retry_interval=0.1))
    return gateway_before(folder, server, command=command, shared_memory=SIZE)


def lines_about(gateway: Gateway, text: str) -> list[str]:
    return [line for line in gateway.log.splitlines() if text in line]


def test_half_of_little_shared_memory_is_left_to_triton(tmp_path: Path) -> None:
    with (
        small_shared_memory() as within,
        _TritonWithin(within) as server,
        gateway_within(within, tmp_path, server) as gateway,
        load_on(gateway, clients=4, batch=10) as load,
    ):
        load.until_calls(40)
        assert (load.statuses, load.lost) == ({200}, 0)
        memory = memory_of(gateway)
        assert START < memory["allocated"] <= 16 * MIB
        assert free_bytes(within) >= 20 * MIB  # Triton's own processes have taken some, too
        assert len(lines_about(gateway, "has to stay free")) == 1
        lanes = calls_by_lane(gateway)
        assert lanes["inputs", "shared_memory"] > 0
        assert lanes["inputs", "full"] > 0


def test_full_shared_memory_is_told_once_and_calls_take_the_socket(tmp_path: Path) -> None:
    with (
        small_shared_memory() as within,
        _TritonWithin(within) as server,
        filled(within, 40),
        gateway_within(within, tmp_path, server) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        for number in range(20):
            assert call(client, pattern(number)) == 200
        assert memory_of(gateway)["size"] == 0
        assert not calls_by_lane(gateway)
        (line,) = lines_about(gateway, "no shared memory")
        assert line.endswith("half of /dev/shm, which has 64 MiB, has to stay free")
        subprocess.run((*within, "rm", str(SHARED_MEMORY / "filled")), check=True)
        until(lambda: memory_of(gateway)["size"])
        assert call(client, pattern(1)) == 200


def test_triton_with_shared_memory_of_its_own_is_told_once_and_calls_take_the_socket(
    server: TritonServer, tmp_path: Path
) -> None:
    with (
        small_shared_memory() as within,
        gateway_within(within, tmp_path, server) as gateway,
        load_on(gateway) as load,
    ):
        load.until_calls(100)  # in which it tries again, each 0.1 s
        assert (load.statuses, load.lost) == ({200}, 0)
        (line,) = lines_about(gateway, "no shared memory")
        assert "Unable to open shared memory region: '/…'" in line
        assert memory_of(gateway)["size"] == 0
        assert free_bytes(within) >= 60 * MIB


@contextmanager
def filled(within: tuple[str, ...], mib: int) -> Iterator[None]:
    """Take so much of it for a file."""
    file = str(SHARED_MEMORY / "filled")
    subprocess.run((*within, "fallocate", "--length", f"{mib}MiB", file), check=True)
    yield
