"""Makes the documentation's pictures of the page: TENSORGATE_SCREENSHOTS names their folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.interop.page.stand import Stand, calls_in_background

FOLDER = os.environ.get("TENSORGATE_SCREENSHOTS", "")
SECONDS = 75
"""Of calls, which the charts show."""


pytestmark = pytest.mark.skipif(not FOLDER, reason="TENSORGATE_SCREENSHOTS is not set")


async def test_screenshots(own_stand: Stand) -> None:
    stand, folder = own_stand, Path(FOLDER)
    page = stand.page
    await page.resize(1400, 900)
    async with calls_in_background(stand), calls_in_background(stand):
        await stand.show("overview")
        await asyncio.sleep(SECONDS)
        await page.prefer("dark")
        await page.screenshot(folder / "page-overview-dark.png")
        await page.prefer("light")
        await stand.show("models?name=half")
        await page.wait_for_text("trace_rate", "#panel-models")
        await page.screenshot(folder / "page-model.png")
        await stand.servers[1].stop()
        await stand.show("overview")
        await page.wait_for_text("refused", ".problems")
        await page.screenshot(folder / "page-overview.png")
        await stand.show("topology")
        await page.wait_for_text("refused", ".endpoints")
        await page.screenshot(folder / "page-topology.png")
        await stand.show("calls")
        await page.wait_for("document.querySelectorAll('.toggle').length > 20")
        await page.click(".toggle")
        await page.wait_for_text("Timeline:")
        await page.screenshot(folder / "page-calls.png")


async def test_screenshot_of_try_it(stand: Stand) -> None:
    page = stand.page
    await page.resize(1400, 900)
    await page.prefer("light")
    await stand.show("try?model=add")
    await page.wait_for_count(2, ".input")
    await page.evaluate(
        "(() => { for (const field of document.querySelectorAll('.input input[type=number]'))"
        " field.value = '1000'; })()"
    )
    await page.click("#panel-try .primary")
    await stand.enter_token()
    await page.wait_for("!document.querySelector('.result').hidden")
    await page.screenshot(Path(FOLDER) / "page-try-it.png")
