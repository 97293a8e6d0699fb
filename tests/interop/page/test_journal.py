"""The panel "Journal", and the curves of endpoints and routes."""

from __future__ import annotations

import json
import os
import signal

from tests.interop.page.accessibility import violations
from tests.interop.page.stand import Stand, calls_in_background

_EVENTS = "[...document.querySelectorAll('.journal tbody tr')]"


async def test_journal_shows_what_happened_to_whom_and_why(stand: Stand) -> None:
    page, server = stand.page, stand.servers[1]
    workers = await stand.process.wait_for_output(r"2 workers: (\d+), (\d+)")
    async with calls_in_background(stand):
        await stand.show("journal")
        await page.wait_for_text("gateway started", ".journal")
        url = server.url
        await server.stop()
        os.kill(int(workers[1]), signal.SIGKILL)
        await page.wait_for(f"{_EVENTS}.some(e => e.innerText.includes('process restarted'))")
        await page.wait_for(f"{_EVENTS}.some(e => e.innerText.includes('endpoint unhealthy'))")
        assert await violations(page) == []
    row = await page.evaluate(
        f"{_EVENTS}.find(e => /endpoint unhealthy/.test(e.innerText)).innerText"
    )
    assert url in row
    assert "health check" in row
    assert "refused" in row
    # The newest is first, and a search leaves those that have a text.
    assert "gateway started" in await page.evaluate(f"{_EVENTS}.at(-1).innerText")
    await page.evaluate("document.querySelector('#journal-search').focus()")
    await page.type("SIGKILL")
    await page.wait_for(f"{_EVENTS}.length === 1")
    assert f"worker {workers[1]}" in await page.evaluate(f"{_EVENTS}[0].innerText")


async def test_event_leads_to_its_endpoint(stand_with_actions: Stand) -> None:
    stand = stand_with_actions
    page, server = stand.page, stand.servers[1]
    url = server.url
    async with calls_in_background(stand):
        await server.stop()
        await stand.show("journal")
        await page.wait_for_text(url, ".journal")
        await page.click(".journal a[href]")
        await page.wait_for("location.hash.startsWith('#topology?')")
        await page.wait_for("document.querySelectorAll('.endpoints tbody tr').length === 1")
        assert url in await page.text(".endpoints tbody tr")


async def test_endpoint_and_route_open_to_the_curves_of_the_last_hour(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await stand.show("topology")
        for name in (f"Curves of {stand.servers[0].url} over", "Curves of route rest over"):
            button = (
                "[...document.querySelectorAll('.expand')]"
                f".find(e => e.ariaLabel.startsWith({json.dumps(name)}))"
            )
            await page.wait_for(f"({button})?.focus() ?? ({button}) !== undefined")
            await page.press("Enter")
            await page.wait_for(
                "[...document.querySelectorAll('.curves svg')]"
                ".some(e => /^Calls, last .*now [1-9]/.test(e.ariaLabel))"
            )
            assert await page.evaluate("document.querySelectorAll('.curves svg').length") == 3
            await page.press("Enter")
            await page.wait_for("!document.querySelector('.curves')")
