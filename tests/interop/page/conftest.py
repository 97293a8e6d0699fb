"""What the tests of the page share: they are skipped without a browser."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.page.browser import CHROMIUM
from tests.interop.page.stand import Stand, running_stand


@pytest.fixture(autouse=True)
def chromium() -> str:
    """Return the browser, or skip the test."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed (apt install chromium)")
    return CHROMIUM


@pytest_asyncio.fixture
async def stand(chromium: str, tmp_path: Path) -> AsyncIterator[Stand]:
    """Run a gateway with its page; the page may not complain, nor ask other hosts."""
    async with running_stand(tmp_path) as running:
        yield running
        assert running.page.errors == []
        own = (f"http://{running.admin}/", "data:", "about:")
        assert [url for url in running.page.requests if not url.startswith(own)] == []


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """Return where screenshots go: TENSORGATE_SCREENSHOTS, as docs/images, or a folder of tests."""
    return Path(os.environ.get("TENSORGATE_SCREENSHOTS", tmp_path))
