"""Each panel of the operator's page in a browser: what it shows, how it is used, and by whom."""

from __future__ import annotations

from urllib.parse import quote
from uuid import uuid4

import pytest

from tests.interop.page.stand import (
    HOSTILE_SORTS,
    NAMES,
    PANELS,
    Stand,
    calls_in_background,
    infer,
    shown_begin,
    violations,
)
from tests.support.http_messages import request
from tests.support.inference_messages import json_request

_FILLED = {
    "overview": "[...document.querySelectorAll('.value')].every(each => each.innerText !== '–')",
    "topology": "/[1-9][0-9.]*\\/s/.test(document.querySelector('.picture').textContent)",
    "models": "[...document.querySelectorAll('.rows a')].some(each => each.innerText === 'half')",
    "calls": "document.querySelectorAll('.calls .toggle').length > 3",
    "journal": "document.querySelectorAll('.journal tbody tr').length > 0",
    "try": "document.querySelector('#panel-try .primary') !== null",
}
"""What is true of a panel when it has something to show."""
_ROWS = ".endpoints tbody tr"


async def _show_with_calls(stand: Stand, panel: str) -> None:
    """Open a panel, and wait until it shows something; of calls, open one."""
    await stand.show(panel)
    await stand.page.wait_for(_FILLED[panel])
    if panel == "calls":
        await stand.page.click(".toggle")
        await stand.page.wait_for_text("Timeline:")


@pytest.mark.parametrize("panel", PANELS)
async def test_panel_fits_windows_of_all_widths_and_is_accessible(stand: Stand, panel: str) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await _show_with_calls(stand, panel)
        for scheme in ("light", "dark"):
            await page.prefer(scheme)
            assert await violations(page) == []
        for width in (3840, 1400, 1100, 1024, 780, 320):
            await page.resize(width)
            assert await page.fits_width(), width
        assert await violations(page) == []


async def test_calls_of_two_workers_are_in_the_order_of_their_ends(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand), calls_in_background(stand):
        await stand.show("calls")
        for _ in range(4):
            newest = (await page.each(".calls .toggle") or [""])[0]
            await page.wait_for(
                f"(document.querySelector('.calls .toggle')?.innerText ?? '') !== {newest!r}"
            )
            found = await page.each(".calls .toggle")
            assert found == sorted(found, reverse=True)


async def test_overview_shows_rates_settings_and_workers(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await _show_with_calls(stand, "overview")
        await page.wait_for(
            "/^[1-9].*\\/s$/.test(document.querySelector('.tile .value').innerText)"
        )
        text = await page.text("main")
    assert "Nothing is wrong." in text
    assert stand.file.name in text
    assert "settings number 1, since" in text
    assert text.count("\ntakes calls") == 2  # workers
    assert await page.evaluate(
        "[...document.querySelectorAll('.tile svg')].every(each => / ms|\\/s| %|now /.test("
        "each.getAttribute('aria-label')))"
    )


async def test_topology_shows_rates_on_edges_and_a_row_for_each_endpoint(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await _show_with_calls(stand, "topology")
        await page.wait_for(
            "[...document.querySelectorAll('.picture .edge-text')]"
            ".filter(each => /^[0-9.]+\\/s/.test(each.textContent)).length >= 4"
        )
    assert "mirror" in await page.evaluate("document.querySelector('.picture').textContent")
    main, second, spare = await page.each(_ROWS)
    assert all(map(str.__contains__, (main, second), (each.url for each in stand.servers)))
    assert stand.servers[0].url in spare
    assert "healthy" in main
    assert "healthy" in second
    # A search leaves those that fit; the address has it, so a link or a reload shows the same.
    await page.type(stand.servers[1].url, "#topology-search")
    await page.wait_for_count(1, _ROWS)
    assert stand.servers[1].url in await page.text(_ROWS)
    await page.open(await page.evaluate("location.href"))
    await page.wait_for_count(1, _ROWS)


async def test_model_shows_its_inputs_rates_and_endpoints(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await _show_with_calls(stand, "models")
        await page.press_button("half", ".rows a")
        await page.wait_for_text("Its calls")
        assert await page.evaluate("location.hash") == "#models?name=half"
        await page.wait_for_text(stand.servers[0].url, "main")
        await page.wait_for_text("JSON", "main")


async def test_call_opens_to_its_timeline_by_keyboard(stand: Stand) -> None:
    page, number = stand.page, str(uuid4())
    assert await stand.call(infer("half", {"X-Request-Id": number})) == 200
    await stand.show(f"calls?request_id={number}")
    await page.wait_for_count(1, ".toggle")
    await page.press("Enter", ".toggle")
    await page.wait_for_text("Timeline:")
    details = await page.text(".details")
    assert number in details
    assert "JSON → binary" in details
    assert "from the client" in details
    assert await page.focused("ariaExpanded") == "true"
    assert await page.count(".phases .phase") >= 2
    await page.press("Enter")
    await page.wait_for("!document.querySelector('.details')")


async def test_filters_of_calls_leave_those_that_fit(stand: Stand) -> None:
    page, number = stand.page, {"X-Request-Id": str(uuid4())}
    assert await stand.call(infer("half", number)) == 200
    assert await stand.call(infer("no-such-model", number)) in (400, 404)
    await stand.show(f"calls?request_id={number['X-Request-Id']}")
    await page.wait_for_count(2, ".toggle")
    await page.click("#calls-errors")
    await page.wait_for_count(1, ".toggle")
    assert "no-such-model" in await page.text(".calls tbody")
    assert "errors=1" in await page.evaluate("location.hash")
    await page.fill("#calls-status", "2xx")
    await page.wait_for_text("matches these filters")


async def test_follow_shows_new_calls_and_pause_keeps_the_list(stand: Stand) -> None:
    page, number = stand.page, {"X-Request-Id": str(uuid4())}
    filters = f"calls?request_id={number['X-Request-Id']}"
    await stand.show(filters)
    await page.wait_for_text("No call", "main")
    await stand.call(infer("half", number))
    await page.wait_for_count(1, ".toggle")
    await page.press("Enter", ".toggle")  # reading a call pauses
    await page.wait_for_text("Paused: follow")
    await stand.call(infer("half", number))
    await page.wait_for(
        f"fetch('api/{filters}').then(each => each.json()).then(({{calls}}) => calls[1])"
    )
    await page.evaluate("new Promise(resolve => setTimeout(resolve, 2000))")  # of two events
    assert await page.count(".toggle") == 1
    await page.click(".filters button.primary")
    await page.wait_for_count(2, ".toggle")
    assert await page.count(".details") == 1  # still open


async def test_page_is_used_by_keyboard_alone(stand: Stand) -> None:
    page = stand.page
    await stand.show("overview")
    await page.press("Tab")
    assert await page.focused("innerText") == "Skip to the content"
    for _ in range(2):
        await page.press("Tab")
    assert "Topology" in await page.focused("innerText")
    await page.press("Enter")
    await page.wait_for("location.hash === '#topology'")
    # The heading of the new panel gets the focus, so that a screen reader says it.
    await page.wait_for("document.activeElement.tagName === 'H1'")
    assert await page.focused("innerText") == "Topology"
    await page.evaluate("history.back()")
    await page.wait_for("document.activeElement.innerText === 'Overview'")


async def test_chosen_theme_stays(stand: Stand) -> None:
    page, background = stand.page, "getComputedStyle(document.body).backgroundColor"
    await page.prefer("light")
    await stand.show("overview")
    light = await page.evaluate(background)
    stored = "[localStorage.length, sessionStorage.length, document.cookie]"
    assert await page.evaluate(stored) == [0, 0, ""]
    await page.fill("#theme", "dark")
    dark = await page.evaluate(background)
    assert dark != light
    await stand.show("topology")
    assert await page.evaluate(background) == dark


async def test_hostile_model_names_are_text(stand: Stand) -> None:
    page, number = stand.page, str(uuid4())
    for name in NAMES:
        target = f"/v2/models/{quote(name, safe='')}/infer"
        call = request("POST", target, json_request(), {"X-Request-Id": number})
        assert await stand.call(call) >= 400
    await stand.show(f"calls?request_id={number}")
    await page.wait_for_count(len(NAMES), ".toggle")
    await page.evaluate("document.querySelectorAll('.toggle').forEach(each => each.click())")
    await page.wait_for_count(len(NAMES), ".details")
    text = await page.text("main")
    assert "<script>window.hacked=1</script>" in text
    assert "⟨U+202E⟩gnp.exe" in text
    assert "نموذج" in text
    assert "x" * 400 not in text  # a server's words of it are 300 characters
    assert await page.evaluate("window.hacked === undefined && !document.querySelector('main img')")
    assert await page.count("script") == 1
    assert await page.fits_width()


async def test_details_of_hostile_model_names_are_shown(stand: Stand) -> None:
    page = stand.page
    for name in HOSTILE_SORTS:
        await stand.show(f"models?name={quote(name, safe='')}")
        await page.wait_for_text("Its calls")
        title = await page.text("#panel-models h2")
        assert title.startswith(shown_begin(name))
        assert len(title) < 100
        assert await page.evaluate("window.hacked === undefined")
    await page.press_button("Show the whole name")
    assert await page.text("#panel-models h2") == name
