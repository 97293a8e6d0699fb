"""Reads memory and CPU time of processes, and the load of cores, from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path


class PeakMemory:
    """The peak growth of a process' memory from now on: proc(5), VmHWM."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")  # forget the peak so far
        self._start = self._status("VmRSS")

    def growth(self) -> int:
        """Return the growth in bytes."""
        return self._status("VmHWM") - self._start

    def _status(self, field: str) -> int:
        text = (self._folder / "status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = slice(3, 5)  # idle and iowait
_FIELDS = 8  # the later fields are contained in these
_STOLEN_FIELD = 7


def cpu_time(pid: int) -> float:
    """Return the CPU seconds of a process so far: proc(5), /proc/PID/stat."""
    behind_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, behind_the_name[11:13])) / _TICKS


class CpuSteal:
    """The CPU steal of all cores from now on: proc(5), /proc/stat."""

    def __init__(self) -> None:
        self._start = self._stolen_and_wanted()

    def share(self) -> float:
        """Return the stolen share of the CPU time that this machine wanted."""
        now = self._stolen_and_wanted()
        stolen, wanted = (later - then for then, later in zip(self._start, now, strict=True))
        return stolen / wanted if wanted else 0.0

    def _stolen_and_wanted(self) -> tuple[int, int]:
        times = _ticks()["cpu"]
        return times[_STOLEN_FIELD], _not_idle(times)


def busy_time(cores: Collection[int]) -> float:
    """Return the busy seconds of these cores, in sum: proc(5), /proc/stat.

    The work of unrelated processes counts too.
    """
    ticks = _ticks()
    return sum(_not_idle(ticks[f"cpu{core}"]) for core in cores) / _TICKS


def _ticks() -> dict[str, list[int]]:
    """Return the times of each core, and those of all as "cpu"."""
    lines = map(str.split, Path("/proc/stat").read_text().splitlines())
    return {
        name: [int(field) for field in fields[:_FIELDS]]
        for name, *fields in lines
        if name.startswith("cpu")
    }


def _not_idle(ticks: list[int]) -> int:
    return sum(ticks) - sum(ticks[_IDLE_FIELDS])
