from collections.abc import AsyncIterator, Generator

import pytest
import uvloop

from tests.fuzz import broken_bytes
from tests.support.event_loops import LoopFactories
from tests.support.gateway import no_errors_logged, no_leaks


@pytest.hookimpl
def pytest_asyncio_loop_factories() -> LoopFactories:
    """Run each test on one loop only: these take their time."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell in which round of ``rounds`` a test has failed."""
    if call.when == "setup":
        broken_bytes.last_round = -1
    report = yield
    if call.when == "call" and report.failed and broken_bytes.last_round >= 0:
        again = f"{broken_bytes.ROUND}={broken_bytes.last_round}"
        report.sections.append(("Fuzz", f"again with {again}: {item.nodeid}"))
    return report


@pytest.fixture
async def clean(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Check that nothing leaves a task or a socket behind, or makes anything log an error."""
    with no_errors_logged(caplog):
        async with no_leaks():
            yield
