"""What the tests of the page share: they are skipped without a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.page.browser import CHROMIUM
from tests.interop.page.stand import TOKEN, Stand, running_stand


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
        _check_quiet(running)


@pytest_asyncio.fixture
async def stand_with_actions(chromium: str, tmp_path: Path) -> AsyncIterator[Stand]:
    """Run a gateway like ``stand``, which allows actions with the key TOKEN."""
    keys = tmp_path / "keys"
    keys.write_text(f"{TOKEN}\n")
    more = (
        f"api_keys: {{operators: {{file: {keys}}}}}\nadmin_actions: true\nadmin_keys: operators\n"
    )
    async with running_stand(tmp_path, more) as running:
        yield running
        _check_quiet(running)


def _check_quiet(running: Stand) -> None:
    assert running.page.errors == []
    own = (f"http://{running.admin}/", "data:", "about:")
    assert [url for url in running.page.requests if not url.startswith(own)] == []
    assert not any(TOKEN in url for url in running.page.requests)
