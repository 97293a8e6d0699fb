"""The memory of a gateway under hostile traffic stays within what docs/memory.md says."""

from pathlib import Path

import pytest

from tests.resilience.hostile_traffic import ATTACKS, BUFFERED, MIB, running_gateway
from tests.support.gateway import until
from tests.support.servers.scripted_server import Script

BASELINE = 160 * MIB
FRAGMENTATION = 1.25
CONNECTIONS, PER_CONNECTION = 1500, 4096
CALLS, PER_CALL = 400, 20 * 1024
MAX_GROWTH = BASELINE + FRAGMENTATION * BUFFERED + CONNECTIONS * PER_CONNECTION + CALLS * PER_CALL

MAX_REMAINING = 64 * MIB
"""Bytes by which memory may have grown once all calls have ended."""


@pytest.mark.parametrize("script", ATTACKS)
async def test_memory_under_hostile_traffic_stays_within_the_formula(
    script: Script, tmp_path: Path
) -> None:
    async with running_gateway(script, tmp_path) as gateway:
        start = gateway.memory("VmRSS")
        for attack in ATTACKS[script]:
            await attack(gateway)
            await gateway.until_idle()
            assert gateway.memory("VmHWM") < MAX_GROWTH, attack.__name__
        # What is free goes back to the system within ten quiet seconds.
        await until(lambda: gateway.memory("VmRSS") < start + MAX_REMAINING, 25)
