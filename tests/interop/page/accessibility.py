"""Checks a page with axe-core."""

from __future__ import annotations

from typing import Any

from tests.interop.page.browser import BrowserPage
from tests.interop.programs import installed_folder


async def violations(page: BrowserPage) -> list[Any]:
    """Return what axe-core finds on a page as it is now, or skip the test without axe-core."""
    script = installed_folder("axe-core/node_modules/axe-core") / "axe.min.js"
    await page.evaluate(f"{script.read_text()};0")
    found = await page.evaluate(
        "axe.run(document).then(({violations}) => violations.map("
        "({id, help, nodes}) => [id, help, ...nodes.slice(0, 3).map(({html}) => html)]))"
    )
    assert isinstance(found, list)
    return found
