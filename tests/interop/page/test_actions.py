"""What operators change by the page: they drain endpoints, and set how models are traced."""

from __future__ import annotations

from pathlib import Path

from tests.interop.page.stand import (
    TOKEN,
    Stand,
    calls_in_background,
    infer,
    page_of,
    running_site,
    violations,
)

_ROWS = ".endpoints tbody tr"
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
