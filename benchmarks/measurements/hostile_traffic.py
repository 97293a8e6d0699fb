"""Measures how much memory hostile traffic makes a gateway use, at its peak and afterwards."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness.environment import Environment
from benchmarks.report import Row, below, mebibytes
from tests.resilience.hostile_traffic import (
    BUFFERED,
    MIB,
    Attack,
    abort_responses,
    abort_uploads,
    never_read_bytes,
    never_read_json,
    never_reads_inference,
    running_gateway,
    send_long_ids,
    sends_large_responses,
    upload_at_once,
)
from tests.support.servers.scripted_server import Script

_BODY = 50_000_000
_QUIET = 22.0
"""Seconds in which a gateway returns free memory to the system twice."""
_LEFT = 64 * MIB
_MAX = 1.25 * BUFFERED + 96 * MIB
"""The buffered bytes, with fragmentation and the memory that the C library keeps."""


def memory(env: Environment) -> list[Row]:
    """Measure memory while clients misbehave, and after they have left."""
    aborted = env.rounds(200)
    silent = never_reads_inference
    rows = [
        _row(
            f"{aborted} uploads of 50 MB, aborted",
            silent,
            partial(abort_uploads, count=aborted, size=_BODY),
        ),
        _row(
            "20 responses to 50 MB, aborted",
            sends_large_responses,
            partial(abort_responses, count=20, size=_BODY),
        ),
        _row("300 uploads that no server reads", silent, partial(upload_at_once, size=2_000_000)),
        _row("1,000 × 1 MB of JSON around the data", silent, partial(send_long_ids, count=1000)),
        _row("150 clients that read no byte of 64 MB", sends_large_responses, never_read_bytes),
        _row("the same, of JSON", sends_large_responses, never_read_json),
    ]
    return [row for pair in rows for row in pair]


def _row(name: str, script: Script, attack: Attack) -> list[Row]:
    peak, left = asyncio.run(_attack(script, attack))
    return [
        Row(
            f"{name}: memory growth",
            "",
            mebibytes(peak),
            bound=below(peak, _MAX, mebibytes(_MAX)),
        ),
        Row(f"{name}: left", "", mebibytes(left), bound=below(left, _LEFT, mebibytes(_LEFT))),
    ]


async def _attack(script: Script, attack: Attack) -> tuple[int, int]:
    """Return the growth of memory in bytes, at its peak and after a quiet time."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_gateway(script, Path(folder)) as gateway:
            start = gateway.memory("VmRSS")
            await attack(gateway)
            await gateway.until_idle()
            peak = gateway.memory("VmHWM") - start
            await asyncio.sleep(_QUIET)
            return peak, gateway.memory("VmRSS") - start
