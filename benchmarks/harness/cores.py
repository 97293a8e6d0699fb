"""Gives the measured process cores, or a share of one, apart from all other processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness.client import NotInstalledError
from benchmarks.servers.proxies import installed


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """One core for the measured process, the others for all else."""

    measured: frozenset[int]
    others: frozenset[int]

    @property
    def note(self) -> str:
        """The remark for the table, if there is only a single core."""
        return " (a single core for all)" if self.measured == self.others else ""


def split_cores() -> CoreSplit:
    """Split the cores that this process may use; a single one is shared."""
    first, *others = sorted(os.sched_getaffinity(0))
    return CoreSplit(frozenset([first]), frozenset(others or [first]))


@contextmanager
def pinned_to(cores: frozenset[int]) -> Iterator[None]:
    """Pin this thread, and the processes that it starts inside, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_PERIOD = 10_000_000  # nanoseconds


def limit_cpu(pid: int, share: float) -> None:
    """Limit a process to a share of a core, as a container's CPU limit does: sched(7), deadlines.

    The process must be allowed on all cores. The limit does not hold for its threads and children.
    Raises NotInstalledError without CAP_SYS_NICE.
    """
    chrt = installed("chrt", "apt install util-linux")
    runtime = str(int(share * _PERIOD))
    command = [chrt, "--deadline", "--reset-on-fork", "--sched-runtime", runtime]
    command += ["--sched-period", str(_PERIOD), "--sched-deadline", str(_PERIOD)]
    done = subprocess.run(
        [*command, "--pid", "0", str(pid)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotInstalledError(f"a process cannot be limited here: {done.stderr.strip()}")
