import logging
from collections.abc import Iterator

import pytest

from tests.support.event_loops import both_loops

pytest_asyncio_loop_factories = both_loops


@pytest.fixture
def log_level() -> Iterator[logging.Logger]:
    """Return the logger whose level a reload sets; restore that."""
    logger = logging.getLogger()
    before = logger.level
    yield logger
    logger.setLevel(before)
