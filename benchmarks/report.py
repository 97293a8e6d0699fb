"""The one table, as Markdown, with the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gateway.build import COMPILED

_PACKAGES = ("httptools", "uvloop", "numpy", "orjson", "pysimdjson")
_COLUMNS = ("", "directly", "through the gateway", "result", "bound")
_NOTES = """\
Times are medians, from the first byte sent to the last byte received; the client prints and
parses nothing meanwhile. Ratios are medians of those within each round; behind them stand the
quartiles, between which half of the rounds lie. Where a round takes some 0.1 s or more, and the
host of a virtual machine gave others over 2 % of it, it is gone again, up to twice as many as are
wanted, and those in which others had least count. Large JSON goes five times in a row one way
before it goes the other, in each round. *17 digits*: `json.dumps` of a float32 array's
`tolist()`, as most clients send it; *shortest digits*: `orjson.dumps` of the array. *The floor*:
the same exchange in binary form, and the JSON parsed and printed in one go on one core, with all of
it at hand; the gateway's helper converts on another one, and so can come below it. Large bodies,
the event loop, the p99 beside large requests, the time per number and idle connections are
measured in front of a server that drops and sends bytes as fast as it can; what is compared with
Envoy in JSON, two workers, and what a request takes longer than directly, in front of one whose
small answer is at hand; the rows that name KServe in front of a real one; all else in front of
Triton. *One core*: the proxy has it to itself, server and client (wrk for JSON) share the others;
the gateway converts JSON to binary and back, the others pass it on. Memory growth is the gateway
process' peak (VmHWM). The event loop is held for the CPU time of one of its turns, or the time on
the clock if it blocks."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a result must keep to."""

    text: str
    held: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; without a bound it is for information."""

    what: str
    directly: str = ""
    gateway: str = ""
    result: str = ""
    bound: Bound | None = None

    @property
    def missed(self) -> bool:
        """Tell whether the bound is missed."""
        return self.bound is not None and not self.bound.held

    @property
    def _cells(self) -> tuple[str, ...]:
        bound = "" if self.bound is None else self.bound.text
        if self.bound is not None:
            bound += " **missed**" if self.missed else " ✓"
        return self.what, self.directly, self.gateway, self.result, bound

    def markdown(self) -> str:
        """Write the line."""
        return f"| {' | '.join(self._cells)} |"


def markdown(rows: Iterable[Row], machine: str) -> str:
    """Write the whole report."""
    lines = [
        machine,
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|---|{'---:|' * (len(_COLUMNS) - 1)}",
        *(row.markdown() for row in rows),
        "",
        _NOTES,
    ]
    return "\n".join(lines)


def machine(triton_version: str | None) -> str:
    """Say what the figures were measured on."""
    software = [f"the gateway {'compiled' if COMPILED else 'not compiled'}", _python()]
    software += [f"{name} {version(name)}" for name in _PACKAGES]
    if triton_version is not None:
        software.append(f"Triton {triton_version}")
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu_model()}, {cores} cores, Linux {_kernel()}; {', '.join(software)}."


def _python() -> str:
    """Name the interpreter, which is some 20 % slower where it was built without optimizations.

    That it was built with them is not always told: Debian's was, and keeps it to itself.
    """
    optimized = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return f"Python {platform.python_version()}" + (" (optimized)" if optimized else "")


def missed(rows: Sequence[Row]) -> list[str]:
    """Name the bounds that were missed."""
    return [
        f"missed: {row.what}: {row.gateway} {row.result}, the bound is {row.bound.text}"
        for row in rows
        if row.bound is not None and row.missed
    ]


def milliseconds(seconds: float) -> str:
    """Write a time with three digits."""
    time = seconds * 1000
    return f"{time:.0f} ms" if time >= 100 else f"{time:.1f} ms" if time >= 10 else f"{time:.2f} ms"


def mebibytes(size: float) -> str:
    """Write a size."""
    return f"{size / 2**20:.0f} MiB"


def at_most(value: float, maximum: float, text: str) -> Bound:
    """Make a bound from above; ``text`` is the largest value as it is shown."""
    return Bound(f"≤ {text}", value <= maximum)


def below(value: float, bound: float, text: str) -> Bound:
    """Make a bound from above that must not be reached; ``text`` is how it is shown."""
    return Bound(f"< {text}", value < bound)


def at_least(value: float, minimum: float, text: str) -> Bound:
    """Make a bound from below; ``text`` is the least value as it is shown."""
    return Bound(f"≥ {text}", value >= minimum)


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _kernel() -> str:
    return ".".join(platform.release().split(".")[:2])
