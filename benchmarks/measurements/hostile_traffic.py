"""What hostile traffic takes of a gateway's memory, at most and for good."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness.environment import Environment
from benchmarks.report import Row, below, mebibytes
from tests.resilience.hostile_traffic import (
    HELD,
    MIB,
    Attack,
    abort_responses,
    abort_uploads,
    answers_plenty,
    knows_a_model_and_never_reads,
    never_read_bytes,
    never_read_json,
    running_gateway,
    send_long_ids,
    upload_at_once,
)
from tests.support.servers.scripted_server import Script

_BODY = 50_000_000
_QUIET = 22.0
"""Seconds in which a gateway looks twice for memory that is free, to give it back."""
_LEFT = 64 * MIB
_MAX = 1.25 * HELD + 96 * MIB
"""What may be held, with the gaps between blocks of memory, and freed memory that stays."""


def memory(env: Environment) -> list[Row]:
    """Measure how memory grows while clients misbehave, and what is left of that."""
    aborted = env.rounds(200)
    deaf = knows_a_model_and_never_reads
    rows = [
        _row(
            f"{aborted} uploads of 50 MB, aborted",
            deaf,
            partial(abort_uploads, count=aborted, size=_BODY),
        ),
        _row(
            "20 responses to 50 MB, aborted",
            answers_plenty,
            partial(abort_responses, count=20, size=_BODY),
        ),
        _row("300 uploads that no server reads", deaf, partial(upload_at_once, size=2_000_000)),
        _row("1,000 × 1 MB of JSON around the data", deaf, partial(send_long_ids, count=1000)),
        _row("150 clients that read no byte of 64 MB", answers_plenty, never_read_bytes),
        _row("the same, of JSON", answers_plenty, never_read_json),
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
    """Give the bytes by which memory grew at its peak, and in a quiet moment behind it."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_gateway(script, Path(folder)) as gateway:
            start = gateway.memory("VmRSS")
            await attack(gateway)
            await gateway.until_idle()
            peak = gateway.memory("VmHWM") - start
            await asyncio.sleep(_QUIET)
            return peak, gateway.memory("VmRSS") - start
