"""Less than a core for a process, as a container's limit gives it."""

from __future__ import annotations

import subprocess

from benchmarks.harness.client import NotInstalledError
from benchmarks.servers.proxies import installed

_PERIOD = 10_000_000  # nanoseconds


def limit(pid: int, share: float) -> None:
    """Let a process have this share of a core at most, whenever it wants it: sched(7), deadlines.

    Its cores must be all that there are. What it starts, threads too, is not limited. Raises
    NotInstalledError where that is not allowed: it takes CAP_SYS_NICE.
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
