"""Formats the results as a Markdown table, with the machine that they were measured on."""

from __future__ import annotations

import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gateway.build_info import COMPILED

_PACKAGES = ("httptools", "uvloop", "numpy", "orjson")
_COLUMNS = ("", "directly", "through the gateway", "result", "bound")
_NOTES = """\
Times are medians, from the first byte sent to the last byte received; the client prints and parses
nothing meanwhile. Ratios are medians of the ratios of each round, with their quartiles in
parentheses. A round of 0.1 s or more with a CPU steal above 2 % is repeated, up to twice the number
of rounds; the rounds with the least steal count. In each round, large JSON is sent five times in a
row on each path. *17 digits*: `json.dumps` of a float32 array's `tolist()`, as most clients send
it. *Shortest digits*: `orjson.dumps` of the array. The gateway converts parts of large bodies by
threads on other cores. The raw server, which sends and discards bytes as fast as it can, serves
large bodies, the event loop, the p99 beside large requests, the time per number and idle
connections. A server with one small prepared response serves the JSON comparison with Envoy,
the workers and the added latency. KServe and MLServer serve the rows that name them. A server with
prepared messages serves the other gRPC rows, Triton all others. *One core*: the proxy has it to
itself, server and client (wrk for JSON, h2load for gRPC calls) share the others; the gateway
converts JSON to binary and back, the other proxies do not convert. *Heads all different*: each
request has its own trace id, request id and length. *Logged*: gateway and Envoy run with their
defaults and write an access log. Python's clients call one after the other over one connection;
what is added is the median of the differences within each round. Memory growth is the peak (VmHWM)
of the gateway process. The event loop is blocked for the CPU time of one of its time slices, or for
the wall clock time if the slice blocks."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit for a result, and whether the result keeps it."""

    text: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; without a bound it is for information."""

    what: str
    directly: str = ""
    gateway: str = ""
    result: str = ""
    bound: Bound | None = None

    @property
    def missed(self) -> bool:
        """Return whether the result misses its bound."""
        return self.bound is not None and not self.bound.kept

    @property
    def _cells(self) -> tuple[str, ...]:
        bound = "" if self.bound is None else self.bound.text
        if self.bound is not None:
            bound += " **missed**" if self.missed else " ✓"
        return self.what, self.directly, self.gateway, self.result, bound

    def markdown(self) -> str:
        """Format the row."""
        return f"| {' | '.join(self._cells)} |"


def markdown(rows: Iterable[Row], machine: str) -> str:
    """Format the whole report."""
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
    """Describe the machine and the software of the measurement."""
    software = [f"the gateway {'compiled' if COMPILED else 'not compiled'}", _python()]
    software += [f"{name} {version(name)}" for name in _PACKAGES]
    if triton_version is not None:
        software.append(f"Triton {triton_version}")
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu_model()}, {cores} cores, Linux {_kernel()}; {', '.join(software)}."


def _python() -> str:
    """Describe the interpreter, which is some 20 % slower if built without optimizations.

    Not every optimized build says so; Debian's does not.
    """
    optimized = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return f"Python {platform.python_version()}" + (" (optimized)" if optimized else "")


def missed(rows: Sequence[Row]) -> list[str]:
    """Return a line for each missed bound."""
    return [
        f"missed: {row.what}: {row.gateway} {row.result}, the bound is {row.bound.text}"
        for row in rows
        if row.bound is not None and row.missed
    ]


def milliseconds(seconds: float) -> str:
    """Format a time with three digits."""
    time = seconds * 1000
    return f"{time:.0f} ms" if time >= 100 else f"{time:.1f} ms" if time >= 10 else f"{time:.2f} ms"


def mebibytes(size: float) -> str:
    """Format a size."""
    return f"{size / 2**20:.0f} MiB"


def at_most(value: float, maximum: float, text: str) -> Bound:
    """Return the bound ``value <= maximum``; ``text`` shows the limit."""
    return Bound(f"≤ {text}", value <= maximum)


def below(value: float, bound: float, text: str) -> Bound:
    """Return the bound ``value < bound``; ``text`` shows the limit."""
    return Bound(f"< {text}", value < bound)


def at_least(value: float, minimum: float, text: str) -> Bound:
    """Return the bound ``value >= minimum``; ``text`` shows the limit."""
    return Bound(f"≥ {text}", value >= minimum)


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _kernel() -> str:
    return ".".join(platform.release().split(".")[:2])
