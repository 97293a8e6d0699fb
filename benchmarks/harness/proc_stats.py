"""What the kernel knows of a process' memory and CPU time, and of how busy cores are."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path


class PeakMemory:
    """How much a process' memory grows from now on, at its peak: proc(5), VmHWM."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")  # forget the peak so far
        self._start = self._status("VmRSS")

    def growth(self) -> int:
        """Give the bytes."""
        return self._status("VmHWM") - self._start

    def _status(self, field: str) -> int:
        text = (self._folder / "status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = slice(3, 5)  # idle and iowait
_FIELDS = 8  # what virtual machines get is in others too
_STOLEN_FIELD = 7


def cpu_time(pid: int) -> float:
    """Give the seconds of CPU time that a process has had so far: proc(5), /proc/PID/stat."""
    behind_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, behind_the_name[11:13])) / _TICKS


class StolenTime:
    """How much of the time that is wanted of all cores goes to others on the host, from now on."""

    def __init__(self) -> None:
        self._start = self._stolen_and_wanted()

    def share(self) -> float:
        """Give the share: proc(5), /proc/stat, steal."""
        now = self._stolen_and_wanted()
        stolen, wanted = (later - then for then, later in zip(self._start, now, strict=True))
        return stolen / wanted if wanted else 0.0

    def _stolen_and_wanted(self) -> tuple[int, int]:
        times = _ticks()["cpu"]
        return times[_STOLEN_FIELD], _not_idle(times)


def busy_time(cores: Collection[int]) -> float:
    """Give the seconds in which these cores were not idle, in sum: proc(5), /proc/stat.

    What others did there, and so disturbed, is in it too.
    """
    ticks = _ticks()
    return sum(_not_idle(ticks[f"cpu{core}"]) for core in cores) / _TICKS


def _ticks() -> dict[str, list[int]]:
    """Give what the time of each core went to, and, as "cpu", that of all."""
    lines = map(str.split, Path("/proc/stat").read_text().splitlines())
    return {
        name: [int(field) for field in fields[:_FIELDS]]
        for name, *fields in lines
        if name.startswith("cpu")
    }


def _not_idle(ticks: list[int]) -> int:
    return sum(ticks) - sum(ticks[_IDLE_FIELDS])
