"""What operators change by the page: they drain endpoints, and set how models are traced."""

from __future__ import annotations

import json

from tests.interop.page.accessibility import violations
from tests.interop.page.stand import TOKEN, Stand, calls_in_background, infer

_ROWS = "[...document.querySelectorAll('.endpoints tbody tr')]"


async def _press_button(stand: Stand, label: str) -> None:
    """Press a button by the keyboard."""
    found = (
        f"[...document.querySelectorAll('button')].find(e => e.ariaLabel === {json.dumps(label)})"
    )
    await stand.page.wait_for(f"{found}?.focus() ?? {found} !== undefined")
    await stand.page.press("Enter")


async def _enter_token(stand: Stand, token: str) -> None:
    page = stand.page
    await page.wait_for("document.activeElement.id === 'action-key'")
    await page.type(token)
    await page.press("Enter")


async def test_endpoint_is_drained_and_restored(stand_with_actions: Stand) -> None:
    stand = stand_with_actions
    page, url = stand.page, stand.servers[1].url
    async with calls_in_background(stand):
        await stand.show("topology")
        await _press_button(stand, f"Drain {url}")
        await _enter_token(stand, TOKEN)
        await page.wait_for("!document.querySelector('dialog')")
        await page.wait_for(f"{_ROWS}.some(e => e.innerText.includes('drained'))")
        row = await page.evaluate(f"{_ROWS}.find(e => e.innerText.includes('drained')).innerText")
        assert url in row
        # It is still drained for a page that is loaded anew; the token is forgotten.
        await stand.show("topology")
        await _press_button(stand, f"Restore {url}")
        await _enter_token(stand, TOKEN)
        await page.wait_for_text(f"{url} of main is restored.", "#announcements")
        await page.wait_for(f"!{_ROWS}.some(e => e.innerText.includes('drained'))")
    await stand.process.wait_for_output(rf"drained {url}")
    await stand.process.wait_for_output(rf"restored {url}")
    assert TOKEN not in stand.process.said


async def test_drained_endpoint_keeps_its_place(stand_with_actions: Stand) -> None:
    stand = stand_with_actions
    page, url = stand.page, stand.servers[1].url
    names = f"{_ROWS}.map(each => each.querySelector('.name').innerText)"
    await stand.show("topology")
    await page.wait_for(f"{_ROWS}.length === 3")
    before = await page.evaluate(names)
    assert before[1] == url
    await _press_button(stand, f"Drain {url}")
    await _enter_token(stand, TOKEN)
    await page.wait_for(f"{_ROWS}.some(e => e.innerText.includes('drained'))")
    assert await page.evaluate(names) == before
    # On a page that is loaded anew, too.
    await stand.show("topology")
    await page.wait_for(f"{_ROWS}.some(e => e.innerText.includes('drained'))")
    assert await page.evaluate(names) == before


async def test_badge_of_warnings_alone_is_not_that_of_an_error(stand_with_actions: Stand) -> None:
    stand = stand_with_actions
    page = stand.page
    await stand.show("topology")
    await _press_button(stand, f"Drain {stand.servers[1].url}")
    await _enter_token(stand, TOKEN)
    badges = "[...document.querySelectorAll('.badge:not([hidden])')]"
    await page.wait_for(f"{badges}.length === 2")
    said = await page.evaluate(f"{badges}.map(each => [each.dataset.level, each.ariaLabel])")
    assert said == [["warning", "1 warning"]] * 2
    for scheme in ("light", "dark"):
        await page.prefer(color_scheme=scheme)
        assert await violations(page) == []


async def test_wrong_token_changes_nothing(stand_with_actions: Stand) -> None:
    stand = stand_with_actions
    page, url = stand.page, stand.servers[1].url
    await stand.show("topology")
    await _press_button(stand, f"Drain {url}")
    await _enter_token(stand, "wrong")
    await page.wait_for_text("Not done:", "dialog")
    assert await violations(page) == []
    await page.press("Escape")
    await page.wait_for("!document.querySelector('dialog')")
    # The focus is where it was.
    assert await page.evaluate("document.activeElement.ariaLabel") == f"Drain {url}"
    assert "drained" not in await page.text("#panel-topology")


async def test_token_is_in_no_storage(stand_with_actions: Stand) -> None:
    stand = stand_with_actions
    page, url = stand.page, stand.servers[1].url
    await stand.show("topology")
    await _press_button(stand, f"Drain {url}")
    await _enter_token(stand, TOKEN)
    await page.wait_for("!document.querySelector('dialog')")
    kept = (
        "JSON.stringify([location.href, document.cookie, {...localStorage}, {...sessionStorage}])"
    )
    assert TOKEN not in await page.evaluate(kept)
    assert TOKEN not in await page.evaluate("document.documentElement.outerHTML")


async def test_trace_settings_are_changed(stand_with_actions: Stand) -> None:
    stand = stand_with_actions
    page = stand.page
    assert await stand.call(infer("half")) == 200
    await stand.show("models?name=half")
    await page.wait_for_text("trace_rate", "#panel-models")
    await page.evaluate(
        "[...document.querySelectorAll('#panel-models button')]"
        ".find(each => each.innerText === 'Change').focus()"
    )
    await page.press("Enter")
    await page.wait_for("document.querySelector('dialog') !== null")
    await page.evaluate(
        "(() => { const label = [...document.querySelectorAll('dialog label')]"
        ".find(each => each.innerText === 'trace_rate');"
        " document.getElementById(label.htmlFor).value = '77';"
        " document.querySelector('#action-key').focus(); })()"
    )
    await _enter_token(stand, TOKEN)
    await page.wait_for("!document.querySelector('dialog')")
    await page.wait_for_text("77", "#panel-models .facts")


async def test_page_without_actions_has_no_buttons_for_them(stand: Stand) -> None:
    page = stand.page
    await stand.show("topology")
    await page.wait_for(f"{_ROWS}.length === 3")
    assert "admin.actions is off" in await page.text("#panel-topology")
    buttons = "document.querySelectorAll('.endpoints button:not(.expand)').length"
    assert await page.evaluate(buttons) == 0
