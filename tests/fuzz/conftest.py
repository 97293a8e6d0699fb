from collections.abc import AsyncIterator

import pytest

from tests.support.event_loops import both_loops
from tests.support.gateway import no_errors_logged, no_leaks

pytest_asyncio_loop_factories = both_loops


@pytest.fixture
async def clean(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Check that nothing leaves a task or a socket behind, or makes anything log an error."""
    with no_errors_logged(caplog):
        async with no_leaks():
            yield
