"""The page in the browser during incidents, as an operator sees it in windows of all widths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.observe.incidents import INCIDENTS, begin, incident_site
from tests.interop.page.browser import BrowserPage, browser_page
from tests.interop.page.stand import BROKEN_PORTS, LIVE

WIDTHS = (390, 768, 1280, 1920)
SHOWN = ("frozen", "slow", "canary down", "bad reload", "worker stopped")
"""Incidents whose sentence names an endpoint, and some whose sentence names none.

tests/end_to_end/observe/test_alarms.py has the sentences of all, which the page shows as they are.
"""
PANELS = {
    "overview": ".problems li",
    "topology": ".endpoints tbody tr",
    "models": ".models tbody tr",
    "calls": ".calls tbody tr",
    "journal": ".journal tbody tr",
}
"""The panels, and what each of them shows once it has been read."""


@pytest.mark.parametrize("name", SHOWN)
async def test_page_names_an_incident_in_windows_of_all_widths(
    name: str, browser: str, tmp_path: Path
) -> None:
    incident = INCIDENTS[name]
    async with incident_site(tmp_path, incident) as site, browser_page(browser) as page:
        await begin(site, incident)
        for panel, content in PANELS.items():
            await page.open(f"{site.operator.url}/#{panel}")
            await page.wait_for(f"{LIVE} && document.querySelector({content!r}) !== null")
            for width in WIDTHS:
                await page.resize(width)
                if panel == "overview":
                    assert re.search(incident.sentence_of(site), await _problem(page))
                await _check_view(page, width)
        assert page.errors == []


async def _problem(page: BrowserPage) -> str:
    """Return the one problem that is shown."""
    (problem,) = await page.each(".problems li")
    return " ".join(problem.split())


async def _check_view(page: BrowserPage, width: int) -> None:
    assert await page.fits_width(), width
    assert await page.evaluate(BROKEN_PORTS) == [], width
    shares = re.findall(r"([\d.,]+) %", await page.evaluate("document.body.textContent"))
    assert all(float(each.replace(",", "")) <= 100 for each in shares), shares
