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


def stolen_share(before: tuple[int, int], now: tuple[int, int]) -> float:
    """Give the share of the time that was wanted of all cores, but went to others on the host."""
    stolen, wanted = (later - earlier for earlier, later in zip(before, now, strict=True))
    return stolen / wanted if wanted else 0.0


def stolen_and_wanted() -> tuple[int, int]:
    """Give the ticks of all cores that others had, and those plus the ticks had: proc(5)."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    times = [int(field) for field in first.split()[1 : 1 + _FIELDS]]
    return times[_STOLEN_FIELD], sum(times) - sum(times[_IDLE_FIELDS])


def busy_time(cores: Collection[int]) -> float:
    """Give the seconds in which these cores were not idle, in sum: proc(5), /proc/stat.

    What others did there, and so disturbed, is in it too.
    """
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            times = [int(field) for field in fields[:_FIELDS]]
            ticks += sum(times) - sum(times[_IDLE_FIELDS])
    return ticks / _TICKS
