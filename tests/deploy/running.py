"""Run the gateway by a command line of deploy/."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.support.gateway_process import TENSORGATE, Process, running_process


@asynccontextmanager
async def run_gateway(
    arguments: Sequence[str], **environ: str
) -> AsyncIterator[tuple[Process, str]]:
    """Run ``tensorgate`` with these arguments; yield the process and its address.

    Checks that SIGTERM ends it without an error.
    """
    async with running_process(TENSORGATE, *arguments, **environ) as process:
        found = await process.wait_for_output(r"listening on (\S+)")
        yield process, found[1]
        process.signal(signal.SIGTERM)
        status, _, err = await process.end()
        assert status == 0, err
        assert "ERROR" not in err
