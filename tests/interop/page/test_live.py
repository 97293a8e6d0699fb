"""The page follows what happens: reloads, failing servers, changes of operators, and the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.interop.page.stand import (
    LIVE,
    TOKEN,
    Stand,
    calls_in_background,
    infer,
    page_of,
    running_site,
    violations,
)
from tests.support.gateway_process import gateway_process

_EVENTS = ".journal tbody tr"
_ROWS = ".endpoints tbody tr"


async def test_reload_failed_reload_and_end_are_shown_until_the_gateway_is_back(
    own_stand: Stand,
) -> None:
    stand, page, good = own_stand, own_stand.page, own_stand.file.read_text()
    await stand.show("overview")
    await page.wait_for_text("settings number 1, since", "main")
    stand.file.write_text(f"{good}limits: {{idle_timeout: 1m}}\n")
    stand.process.signal(signal.SIGHUP)
    await page.wait_for_text("settings number 2, since", "main")
    await page.wait_for(LIVE)
    stand.file.write_text(f"{good}nonsense: 1\n")
    stand.process.signal(signal.SIGHUP)
    await page.wait_for_text("The settings before it are still in use.", "main")
    assert "nonsense" in await page.text(".message")
    await page.wait_for_text("Error", ".problems")
    assert "settings number 2, since" in await page.text("main")
    await page.click("nav a[href='#topology']")
    await page.wait_for_count(3, _ROWS)
    stand.process.signal(signal.SIGTERM)
    await stand.process.end()
    await page.wait_for_text("Not connected since", "#notices")
    # What was known stays to be read.
    assert await page.count(_ROWS) == 3
    stand.file.write_text(good)
    async with gateway_process(str(stand.file)):
        await page.wait_for(LIVE)
        await page.wait_for("!document.querySelector('#notices').innerText")


async def test_failing_server_is_said_in_a_sentence_and_leads_to_its_row(own_stand: Stand) -> None:
    stand, page, server = own_stand, own_stand.page, own_stand.servers[1]
    url = server.url
    async with calls_in_background(stand):
        await stand.show("overview")
        await page.wait_for_text("Nothing is wrong.", ".wrong")
        await server.stop()
        await page.wait_for_text(url, ".problems")
        assert "refused" in await page.text(".problems")
        # A screen reader hears of it.
        await page.wait_for_text(url, "#announcements")
        await page.click(".problems a")
        await page.wait_for("location.hash.startsWith('#topology?')")
        await page.wait_for_count(1, _ROWS)
        row = await page.text(_ROWS)
        assert url in row
        assert "refused" in row
        assert ("ejected" in row) or ("unhealthy" in row)
        assert await page.evaluate("document.title.startsWith('(')")
        await server.start()
        await page.wait_for_text("healthy", _ROWS)
        await page.click("nav a[href='#overview']")
        await page.wait_for_text("Nothing is wrong.", ".wrong")


async def test_stream_has_only_what_the_visible_panel_shows(stand: Stand) -> None:
    page = stand.page
    await stand.show("overview")
    await page.click("nav a[href='#topology']")
    await page.wait_for_count(3, _ROWS)
    streams = [url for url in page.requests if "/api/events" in url]
    assert "topics=overview&" not in streams[-1]
    assert streams[0].endswith("topics=overview")
    assert "topics=overview%2Ctopology" in streams[-1]


async def test_hidden_page_takes_no_events(stand: Stand) -> None:
    page = stand.page
    await stand.show("overview")
    await page.evaluate(
        "(() => { Object.defineProperty(document, 'hidden', {get: () => window.hide});"
        " window.hide = true; document.dispatchEvent(new Event('visibilitychange')); })()"
    )
    await page.wait_for_text("Paused while hidden", "#connection")
    streams = sum("/api/events" in url for url in page.requests)
    started = "[...document.querySelectorAll('.facts tr')].find(e => /Started/.test(e.innerText))"
    before = await page.evaluate(f"{started}.innerText")
    await page.evaluate("new Promise(resolve => setTimeout(resolve, 2500))")
    assert await page.evaluate(f"{started}.innerText") == before
    await page.evaluate(
        "(() => { window.hide = false; document.dispatchEvent(new Event('visibilitychange')); })()"
    )
    await page.wait_for_text("Live", "#connection")
    await page.wait_for(f"{started}.innerText !== {before!r}")
    assert sum("/api/events" in url for url in page.requests) == streams + 1


async def test_focus_scroll_and_selection_stay_while_numbers_change(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await page.resize(1200, 500)
        await stand.show("topology")
        await page.wait_for_count(3, _ROWS)
        await page.evaluate(
            "(() => { const link = document.querySelector('.endpoints tbody a'); link.focus();"
            " window.kept = link; scrollTo(0, 200); const name = document"
            ".querySelector('.endpoints tbody .name'); getSelection().selectAllChildren(name); })()"
        )
        place = await page.evaluate("scrollY")
        cell = "document.querySelector('.endpoints tbody td.number + td').innerText"
        before = await page.evaluate(cell)
        await page.wait_for(f"{cell} !== {before!r}")
        assert await page.evaluate("document.activeElement === window.kept")
        assert await page.evaluate("scrollY") == place
        assert await page.evaluate("getSelection().toString()") in (
            each.url for each in stand.servers
        )


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


_NAMES = f"{_ROWS} .name"


async def test_endpoint_is_drained_and_restored(own_stand: Stand) -> None:
    stand = own_stand
    page, url = stand.page, stand.servers[1].url
    async with calls_in_background(stand):
        await stand.show("topology")
        await page.wait_for_count(3, _ROWS)
        names = await page.each(_NAMES)
        assert names[1] == url
        await page.press_button(f"Drain {url}")
        await stand.enter_token()
        await page.wait_for("!document.querySelector('dialog')")
        await stand.check_that_the_token_is_kept_nowhere()
        # It is still drained, and at its place, for a page that is loaded anew.
        for _ in range(2):
            await page.wait_for_text("drained", _ROWS)
            assert [url in row for row in await page.each(_ROWS) if "drained" in row] == [True]
            assert await page.each(_NAMES) == names
            await stand.show("topology")
        # A warning is not shown as an error.
        await page.wait_for_count(2, badges := ".badge:not([hidden])")
        assert await page.each(badges, "dataset.level") == ["warning"] * 2
        assert await page.each(badges, "ariaLabel") == ["1 warning"] * 2
        for scheme in ("light", "dark"):
            await page.prefer(scheme)
            assert await violations(page) == []
        # The token is forgotten.
        await page.press_button(f"Restore {url}")
        await stand.enter_token()
        await page.wait_for_text(f"{url} of main is restored.", "#announcements")
        await page.wait_for_count(0, badges)
        assert not any("drained" in row for row in await page.each(_ROWS))
    await stand.process.wait_for_output(rf"drained {url}")
    await stand.process.wait_for_output(rf"restored {url}")
    assert TOKEN not in stand.process.said


async def test_wrong_token_changes_nothing(stand: Stand) -> None:
    page, url = stand.page, stand.servers[1].url
    await stand.show("topology")
    await page.press_button(f"Drain {url}")
    await stand.enter_token("wrong")
    await page.wait_for_text("Not done:", "dialog")
    assert await violations(page) == []
    await page.press("Escape")
    await page.wait_for("!document.querySelector('dialog')")
    # The focus is where it was.
    assert await page.focused("ariaLabel") == f"Drain {url}"
    assert "drained" not in await page.text("#panel-topology")


async def test_trace_settings_are_changed(stand: Stand) -> None:
    page = stand.page
    assert await stand.call(infer("half")) == 200
    await stand.show("models?name=half")
    await page.wait_for_text("trace_rate", "#panel-models")
    await page.press_button("Change", "#panel-models button")
    await page.wait_for("document.querySelector('dialog') !== null")
    labels = await page.each("dialog label")
    fields = await page.each("dialog label", "htmlFor")
    await page.fill(f"#{fields[labels.index('trace_rate')]}", "77")
    await page.evaluate("document.querySelector('#action-key').focus()")
    await stand.enter_token()
    await page.wait_for("!document.querySelector('dialog')")
    await page.wait_for_text("77", "#panel-models .facts")


async def test_page_says_what_actions_and_calls_take_where_they_are_off(
    browser: str, tmp_path: Path
) -> None:
    async with (
        running_site(tmp_path, allows_all=False) as site,
        page_of(site, browser) as stand,
    ):
        page = stand.page
        await stand.show("topology")
        await page.wait_for_count(3, _ROWS)
        assert "admin.actions is off" in await page.text("#panel-topology")
        assert await page.count(".endpoints button:not(.expand)") == 0
        await stand.show("try?model=half")
        await page.wait_for_text("Calls cannot be sent from here", "#panel-try")
        text = await page.text("#panel-try")
        assert "payloads: true" in text
        assert "keys: operators" in text
        assert "Send" not in text.split()
        assert await violations(page) == []
