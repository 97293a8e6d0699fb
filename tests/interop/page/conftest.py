"""What the tests of the page share: they are skipped without a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    async with _stand_with_keys(tmp_path, "actions: true") as running:
        yield running


@pytest_asyncio.fixture
async def stand_with_payloads(chromium: str, tmp_path: Path) -> AsyncIterator[Stand]:
    """Run a gateway like ``stand``, at which calls can be tried with the key TOKEN."""
    async with _stand_with_keys(tmp_path, "payloads: true") as running:
        yield running


@asynccontextmanager
async def _stand_with_keys(folder: Path, settings: str) -> AsyncIterator[Stand]:
    keys = folder / "keys"
    keys.write_text(f"{TOKEN}\n")
    more = f"api_keys: {{operators: {{file: {keys}}}}}\n"
    async with running_stand(folder, more, f", keys: operators, {settings}") as running:
        yield running
        _check_quiet(running)


def _check_quiet(running: Stand) -> None:
    assert running.page.errors == []
    own = (f"http://{running.admin}/", "data:", "about:")
    assert [url for url in running.page.requests if not url.startswith(own)] == []
    assert not any(TOKEN in url for url in running.page.requests)
