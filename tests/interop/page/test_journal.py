"""The panel "Journal", and the curves of endpoints and routes."""

from __future__ import annotations

import os
import signal

from tests.interop.page.accessibility import violations
from tests.interop.page.stand import LIVE, Stand, calls_in_background

_EVENTS = ".journal tbody tr"


async def test_death_of_a_worker_and_failure_of_a_server_are_followed_and_kept(
    own_stand: Stand,
) -> None:
    stand, page, server = own_stand, own_stand.page, own_stand.servers[1]
    url = server.url
    workers = await stand.process.wait_for_output(r"2 workers: (\d+), (\d+)")
    async with calls_in_background(stand):
        await stand.show("overview")
        await page.wait_for_text(f"process {workers[1]}", "main")
        os.kill(int(workers[1]), signal.SIGKILL)
        await stand.process.wait_for_output(r"worker \d+ is up")
        await page.wait_for(
            f"!document.querySelector('main').innerText.includes('process {workers[1]}') &&"
            " [...document.querySelectorAll('.rows tr')]"
            ".filter(each => each.innerText.includes('takes calls')).length === 2"
        )
        await page.wait_for(LIVE)
        await stand.show("journal")
        await page.wait_for_text("process restarted", _EVENTS)
        await server.stop()
        await page.wait_for_text("endpoint unhealthy", _EVENTS)
        assert await violations(page) == []
        (row,) = [row for row in await page.each(_EVENTS) if "endpoint unhealthy" in row]
        assert url in row
        assert "health check" in row
        assert "refused" in row
        # The newest is first, and a search leaves those that have a text.
        assert "gateway started" in (await page.each(_EVENTS))[-1]
        await page.type("SIGKILL", "#journal-search")
        await page.wait_for_count(1, _EVENTS)
        assert f"worker {workers[1]}" in await page.text(_EVENTS)
        # An event leads to its endpoint.
        await page.fill("#journal-search", "endpoint unhealthy")
        await page.wait_for_text(url, _EVENTS)
        await page.click(".journal a[href]")
        await page.wait_for("location.hash.startsWith('#topology?')")
        await page.wait_for_count(1, ".endpoints tbody tr")
        assert url in await page.text(".endpoints tbody tr")


async def test_endpoint_and_route_open_to_the_curves_of_the_last_hour(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await stand.show("topology")
        for name in (f"Curves of {stand.servers[0].url} over", "Curves of route rest over"):
            await page.press_button(name, ".expand")
            await page.wait_for(
                "[...document.querySelectorAll('.curves svg')]"
                ".some(e => /^Calls, last .*now [1-9]/.test(e.ariaLabel))"
            )
            assert await page.count(".curves svg") == 3
            await page.press("Enter")
            await page.wait_for("!document.querySelector('.curves')")
