"""What the tests of the page share: one browser, and one gateway for tests that break nothing.

They are skipped without a browser.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.page.browser import CHROMIUM, running_browser
from tests.interop.page.stand import Site, Stand, page_of, running_site


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a browser, or skip the test; each test has pages of its own."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed (apt install chromium)")
    with running_browser(tmp_path_factory.mktemp("browser")) as url:
        yield url


@pytest.fixture(scope="session")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run the gateway that tests share; its servers respond between tests, too."""
    with _in_a_thread(running_site(tmp_path_factory.mktemp("site"))) as site:
        yield site


@contextmanager
def _in_a_thread(context: AbstractAsyncContextManager[Site]) -> Iterator[Site]:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield asyncio.run_coroutine_threadsafe(_enter(context), loop).result()
            asyncio.run_coroutine_threadsafe(_leave(context), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


async def _enter(context: AbstractAsyncContextManager[Site]) -> Site:
    return await context.__aenter__()


async def _leave(context: AbstractAsyncContextManager[Site]) -> None:
    await context.__aexit__(None, None, None)


@pytest_asyncio.fixture
async def stand(browser: str, shared_site: Site) -> AsyncIterator[Stand]:
    """Open the page of the shared gateway, of which all is well in the end, too."""
    async with page_of(shared_site, browser) as running:
        yield running


@pytest_asyncio.fixture
async def own_stand(browser: str, tmp_path: Path) -> AsyncIterator[Stand]:
    """Open the page of a gateway that the test may break."""
    async with running_site(tmp_path) as site, page_of(site, browser) as running:
        yield running
