"""What a listener must not keep of its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.listener.running_listener import RunningListener
from tests.support.checks.nothing_left import find_left_in_listener
from tests.support.gateway import no_errors_logged, until
from tests.support.http2_client import connect_http2


@asynccontextmanager
async def nothing_left(
    running: RunningListener, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[None]:
    """Check that peers leave nothing behind, and that an innocent client is served."""
    with no_errors_logged(caplog):
        yield
        await until_nothing_left(running)
        async with connect_http2(running.url) as client:
            assert (await client.call("GET", "/innocent")).status == 200


async def until_nothing_left(running: RunningListener) -> None:
    await until(lambda: not any(find_left_in_listener(running.listener).values()))
