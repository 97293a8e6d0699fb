"""Each panel of the operator's page in a browser: what it shows, how it is used, and by whom."""

from __future__ import annotations

import json

import pytest

from tests.interop.page.accessibility import violations
from tests.interop.page.stand import PANELS, Stand, calls_in_background, infer
from tests.interop.page.test_incidents import BROKEN_PORTS
from tests.support.grpc.client import grpc_client

_FILLED = {
    "overview": "[...document.querySelectorAll('.value')].every(each => each.innerText !== '–')",
    "topology": "/[1-9][0-9.]*\\/s/.test(document.querySelector('.picture').textContent)",
    "models": "[...document.querySelectorAll('.rows a')].some(each => each.innerText === 'half')",
    "calls": "document.querySelectorAll('.calls .toggle').length > 3",
    "journal": "document.querySelectorAll('.journal tbody tr').length > 0",
    "try": "document.querySelector('#panel-try').innerText.includes('payloads: true')",
}
"""What is true of a panel when it has something to show."""
_COVERED = """
(() => {
  const shapes = (selector) => [...document.querySelectorAll(`.picture ${selector}`)]
    .map((each) => [each.textContent, each.getBoundingClientRect()]);
  const labels = shapes(".edge-text");
  const boxes = [...document.querySelectorAll(".picture .node")].map((each) =>
    [each.textContent, each.querySelector("rect").getBoundingClientRect()]);
  const covers = (a, b) =>
    a.left < b.right && b.left < a.right && a.top + 3 < b.bottom - 3 && b.top + 3 < a.bottom - 3;
  return labels.flatMap(([text, box], index) =>
    [...labels.slice(index + 1), ...boxes]
      .filter(([, other]) => covers(box, other))
      .map(([other]) => `${text} | ${other}`));
})()
"""
_NODES = (
    "Object.fromEntries([...document.querySelectorAll('.picture .node')].map(each =>"
    " [each.querySelector('.node-title').textContent,"
    " [each.dataset.level, each.querySelector('.node-text').textContent]]))"
)
_UPSTREAMS = (
    "[...document.querySelectorAll('.upstream > .title-row .state')]"
    ".map(each => [each.dataset.level, each.innerText])"
)


async def _show_with_calls(stand: Stand, panel: str) -> None:
    """Open a panel, and wait until it shows something; of calls, open one."""
    await stand.show(panel)
    await stand.page.wait_for(_FILLED[panel])
    if panel == "calls":
        await stand.page.click(".toggle")
        await stand.page.wait_for_text("Timeline:")


@pytest.mark.parametrize("panel", PANELS)
async def test_panel_is_accessible_in_both_themes(stand: Stand, panel: str) -> None:
    async with calls_in_background(stand):
        await _show_with_calls(stand, panel)
        for scheme in ("light", "dark"):
            await stand.page.prefer(color_scheme=scheme)
            assert await violations(stand.page) == []


@pytest.mark.parametrize("width", [320, 780, 1024, 1100, 1400, 3840])
async def test_page_fits_each_width(stand: Stand, width: int) -> None:
    async with calls_in_background(stand):
        for panel in PANELS:
            await stand.page.resize(width)
            await _show_with_calls(stand, panel)
            assert await stand.page.fits_width()
        assert width > 400 or await violations(stand.page) == []


async def test_header_takes_two_lines_in_a_narrow_window(stand: Stand) -> None:
    page = stand.page
    await page.resize(390)
    async with calls_in_background(stand):
        await stand.servers[1].stop()  # so that panels have problems
        await stand.show("overview")
        await page.wait_for_text("refused", ".problems")
    heights = await page.evaluate(
        "['.brand', '#connection', '.theme', 'nav'].map(each =>"
        " document.querySelector(each).getBoundingClientRect())"
        ".map(({top, bottom}) => [top, bottom])"
    )
    *first, panels = heights
    assert max(bottom for _, bottom in first) <= panels[0] + 2  # below each other
    assert max(top for top, _ in first) < min(bottom for _, bottom in first)  # in one line
    assert await page.evaluate("document.querySelector('.top').offsetHeight") < 90


@pytest.mark.parametrize("width", [390, 1280])
async def test_addresses_are_not_broken_inside_the_port(stand: Stand, width: int) -> None:
    page = stand.page
    await page.resize(width)
    async with calls_in_background(stand):
        for panel, rows in (("topology", ".endpoints"), ("calls", ".calls")):
            await _show_with_calls(stand, panel)
            lines = await page.evaluate(
                f"[...document.querySelectorAll('{rows} .unbroken')]"
                ".map(each => each.getClientRects().length)"
            )
            assert lines
            assert set(lines) == {1}


async def test_picture_fits_a_narrow_window_with_all_its_boxes(stand: Stand) -> None:
    page = stand.page
    await page.resize(390)
    async with calls_in_background(stand):
        await _show_with_calls(stand, "topology")
        await page.wait_for("document.querySelector('.picture').clientWidth < 390")
        assert await page.evaluate(
            "[...document.querySelectorAll('.picture .node-title')].map(e => e.textContent)"
        ) == [
            *("model half", "→ main", "→ spare", "every request", "→ main", "→ spare"),
            *("main", *(each.url.removeprefix("http://") for each in stand.servers)),
            *("spare", stand.servers[0].url.removeprefix("http://")),
        ]


async def test_call_takes_three_lines_in_a_narrow_window(stand: Stand) -> None:
    page = stand.page
    await page.resize(390)
    async with calls_in_background(stand):
        await stand.show("calls")
        await page.wait_for("document.querySelectorAll('.calls .toggle').length > 3")
        heights = await page.evaluate(
            "[...document.querySelectorAll('.calls tbody tr:not([data-level])')]"
            ".map(each => each.offsetHeight)"
        )
    assert heights
    assert max(heights) < 90


@pytest.mark.parametrize("width", [768, 1150])
async def test_call_takes_two_lines_in_a_window_of_tablets(stand: Stand, width: int) -> None:
    page = stand.page
    await page.resize(width)
    async with calls_in_background(stand):
        await stand.show("calls")
        await page.wait_for("document.querySelectorAll('.calls .toggle').length > 3")
        heights = await page.evaluate(
            "[...document.querySelectorAll('.calls tbody tr:not([data-level])')]"
            ".map(each => each.offsetHeight)"
        )
    assert heights
    assert max(heights) < 60


async def test_status_of_a_wrong_rpc_fits_windows_of_laptops(stand: Stand) -> None:
    page = stand.page
    async with grpc_client(stand.url) as client:
        await client.call("ModelInfr", b"")
    await stand.show("calls")
    await page.wait_for_text("gRPC 12", ".calls")
    for width in (390, 768, 1200, 1201, 1280, 1400):
        await page.resize(width)
        assert await page.fits_width(), width


@pytest.mark.parametrize("width", [390, 1280])
async def test_numbers_are_not_broken(stand: Stand, width: int) -> None:
    page = stand.page
    await page.resize(width)
    lines = "[...document.querySelectorAll('{}')].map(each => each.getClientRects().length)"
    async with calls_in_background(stand):
        await _show_with_calls(stand, "topology")
        await page.wait_for_text("4xx", ".endpoints .statuses")
        assert set(await page.evaluate(lines.format(".statuses .unbroken"))) == {1}
        await stand.servers[1].stop()
        await stand.show("overview")
        await page.wait_for_text("(since", ".problems")
        for selector in (".tile .unbroken:not(:empty)", ".problems .unbroken:not(:empty)"):
            assert set(await page.evaluate(lines.format(selector))) == {1}


async def test_calls_of_two_workers_are_in_the_order_of_their_ends(stand: Stand) -> None:
    page = stand.page
    times = "[...document.querySelectorAll('.calls .toggle')].map(each => each.innerText)"
    async with calls_in_background(stand), calls_in_background(stand):
        await stand.show("calls")
        for _ in range(4):
            before = await page.evaluate(f"{times}[0] ?? ''")
            await page.wait_for(f"({times}[0] ?? '') !== {before!r}")
            found = await page.evaluate(times)
            assert found == sorted(found, reverse=True)


async def test_models_add_up_with_others_and_one_that_only_fails(stand: Stand) -> None:
    page = stand.page
    rows = "[...document.querySelectorAll('#panel-models .rows tbody tr')].map(e => e.innerText)"
    async with calls_in_background(stand):
        await stand.show("models")
        await page.wait_for(f"{rows}.some(each => each.startsWith('other models'))")
        await page.wait_for(f"{rows}.some(each => each.startsWith('no-such-model'))")
        (row,) = await page.evaluate(f"{rows}.filter(each => each.startsWith('no-such-model'))")
    assert "no call has succeeded; the last one failed" in row


async def test_overview_shows_rates_settings_and_workers(stand: Stand) -> None:
    async with calls_in_background(stand):
        await _show_with_calls(stand, "overview")
        page = stand.page
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
    async with calls_in_background(stand):
        await _show_with_calls(stand, "topology")
        page = stand.page
        await page.wait_for(
            "[...document.querySelectorAll('.picture .edge-text')]"
            ".filter(each => /^[0-9.]+\\/s/.test(each.textContent)).length >= 4"
        )
        assert "mirror 50 %" in await page.evaluate(
            "document.querySelector('.picture').textContent"
        )
        rows = await page.evaluate(
            "[...document.querySelectorAll('.endpoints tbody tr')].map(each => each.innerText)"
        )
        assert len(rows) == 3
        for server, row in zip(stand.servers, rows, strict=False):
            assert server.url in row
        assert all("healthy" in row for row in rows[:2])


async def test_search_and_upstream_leave_endpoints_of_both(stand: Stand) -> None:
    page, second = stand.page, stand.servers[1]
    await stand.show("topology")
    await page.wait_for("document.querySelectorAll('.endpoints tbody tr').length === 3")
    await page.evaluate("document.querySelector('#topology-search').focus()")
    await page.type(second.url)
    await page.wait_for("document.querySelectorAll('.endpoints tbody tr').length === 1")
    assert second.url in await page.text(".endpoints tbody")
    # The address has the search, so a link or a reload shows the same.
    await page.open(await page.evaluate("location.href"))
    await page.wait_for("document.querySelectorAll('.endpoints tbody tr').length === 1")


async def test_model_shows_its_inputs_rates_and_endpoints(stand: Stand) -> None:
    async with calls_in_background(stand):
        await _show_with_calls(stand, "models")
        page = stand.page
        await page.evaluate(
            "[...document.querySelectorAll('.rows a')].find(e => e.innerText === 'half').focus()"
        )
        await page.press("Enter")
        await page.wait_for_text("Its calls")
        assert await page.evaluate("location.hash") == "#models?name=half"
        await page.wait_for_text(stand.servers[0].url, "main")
        await page.wait_for_text("JSON", "main")


async def test_call_opens_to_its_timeline_by_keyboard(stand: Stand) -> None:
    headers = {"X-Request-Id": "operator-1"}
    assert await stand.call(infer("half", headers)) == 200
    page = stand.page
    await stand.show("calls?request_id=operator-1")
    await page.wait_for("document.querySelectorAll('.toggle').length === 1")
    await page.evaluate("document.querySelector('.toggle').focus()")
    await page.press("Enter")
    await page.wait_for_text("Timeline:")
    details = await page.text(".details")
    assert "operator-1" in details
    assert "JSON → binary" in details
    assert "from the client" in details
    assert await page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    assert len(await page.evaluate("[...document.querySelectorAll('.phases .phase')]")) >= 2
    await page.press("Enter")
    await page.wait_for("!document.querySelector('.details')")


async def test_filters_of_calls_leave_those_that_fit(stand: Stand) -> None:
    assert await stand.call(infer("half")) == 200
    assert await stand.call(infer("no-such-model")) in (400, 404)
    page = stand.page
    await stand.show("calls")
    await page.wait_for("document.querySelectorAll('.toggle').length >= 2")
    await page.click("#calls-errors")
    await page.wait_for("document.querySelectorAll('.toggle').length === 1")
    assert "no-such-model" in await page.text(".calls tbody")
    assert await page.evaluate("location.hash") == "#calls?errors=1"
    await page.evaluate(
        "(() => { const field = document.querySelector('#calls-status'); field.value = '2xx';"
        " field.dispatchEvent(new Event('change')); })()"
    )
    await page.wait_for_text("matches these filters")


async def test_follow_shows_new_calls_and_pause_keeps_the_list(stand: Stand) -> None:
    page = stand.page
    await stand.show("calls?model=half")
    await page.wait_for_text("No call", "main")
    await stand.call(infer("half", {"X-Request-Id": "first"}))
    await page.wait_for("document.querySelectorAll('.toggle').length === 1")
    await page.evaluate("document.querySelector('.toggle').focus()")
    await page.press("Enter")  # reading a call pauses
    await page.wait_for_text("Paused: follow")
    await stand.call(infer("half", {"X-Request-Id": "second"}))
    await page.wait_for(
        "fetch('api/calls?model=half').then(each => each.json()).then(({calls}) => calls[1])"
    )
    await page.evaluate("new Promise(resolve => setTimeout(resolve, 2000))")  # of two events
    assert await page.evaluate("document.querySelectorAll('.toggle').length") == 1
    await page.click(".filters button.primary")
    await page.wait_for("document.querySelectorAll('.toggle').length === 2")
    assert await page.evaluate("document.querySelector('.details') !== null")  # still open


async def test_page_is_used_by_keyboard_alone(stand: Stand) -> None:
    page = stand.page
    await stand.show("overview")
    await page.press("Tab")
    assert await page.evaluate("document.activeElement.innerText") == "Skip to the content"
    for _ in range(2):
        await page.press("Tab")
    assert "Topology" in await page.evaluate("document.activeElement.innerText")
    await page.press("Enter")
    await page.wait_for("location.hash === '#topology'")
    # The heading of the new panel gets the focus, so that a screen reader says it.
    await page.wait_for("document.activeElement.tagName === 'H1'")
    assert await page.evaluate("document.activeElement.innerText") == "Topology"
    await page.evaluate("history.back()")
    await page.wait_for("document.activeElement.innerText === 'Overview'")


async def test_chosen_theme_stays(stand: Stand) -> None:
    page = stand.page
    await page.prefer(color_scheme="light")
    await stand.show("overview")
    background = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(background)
    await page.evaluate(
        "(() => { const field = document.querySelector('#theme'); field.value = 'dark';"
        " field.dispatchEvent(new Event('change')); })()"
    )
    dark = await page.evaluate(background)
    assert dark != light
    await stand.show("topology")
    assert await page.evaluate(background) == dark


async def test_page_keeps_no_token(stand: Stand) -> None:
    page = stand.page
    await stand.show("topology")
    stored = await page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert json.loads(stored) == [{}, {}, ""]


async def test_table_of_endpoints_fits_windows_of_laptops(stand_with_actions: Stand) -> None:
    """With a sentence that has an address, and a button in each row."""
    page = stand_with_actions.page
    async with calls_in_background(stand_with_actions):
        await stand_with_actions.servers[1].stop()
        await stand_with_actions.show("topology")
        await page.wait_for_text("refused", ".endpoints")
        for width in (768, 1080, 1150, 1200, 1201, 1280, 1560, 1561, 1920):
            await page.resize(width)
            assert await page.fits_width(), width
            assert await page.evaluate(BROKEN_PORTS) == [], width


@pytest.mark.parametrize("width", [768, 1280, 1920])
async def test_rates_cover_neither_boxes_nor_each_other(stand: Stand, width: int) -> None:
    page = stand.page
    await page.resize(width)
    async with calls_in_background(stand):
        await stand.servers[0].stop()
        await stand.show("topology")
        await page.wait_for_text("refused", ".endpoints")
        await page.wait_for(
            "[...document.querySelectorAll('.picture .edge[data-level=error]')].length > 2"
        )
        assert await page.evaluate("document.querySelectorAll('.picture .edge-text').length") > 3
        assert await page.evaluate(_COVERED) == []


@pytest.mark.parametrize("width", [390, 768])
async def test_box_of_an_endpoint_begins_with_its_state(stand: Stand, width: int) -> None:
    page = stand.page
    await page.resize(width)
    async with calls_in_background(stand):
        await stand.servers[0].stop()
        await stand.show("topology")
        # The spare has no health checks, and its only endpoint is never ejected.
        await page.wait_for(
            "[...document.querySelectorAll('.picture .node-text')]"
            ".some(each => /^✖ .*unreachable:/.test(each.textContent))"
        )


async def test_arrow_to_a_failing_upstream_is_red_in_a_narrow_window(stand: Stand) -> None:
    page = stand.page
    await page.resize(390)
    async with calls_in_background(stand):
        await stand.servers[0].stop()
        await stand.show("topology")
        await page.wait_for(f"({_NODES})['→ spare'][0] === 'error'")


async def test_upstream_says_how_many_of_its_endpoints_are_not_in_use(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await stand.servers[1].stop()
        await stand.show("topology")
        await page.wait_for_text("refused", ".endpoints")
        await page.wait_for(
            "/^(.*1 (ejected|unhealthy) of 2 endpoints)$/.test("
            "document.querySelector('.upstream > .title-row .state').innerText)"
        )
        (level, _), *_ = await page.evaluate(_UPSTREAMS)
        box, text = (await page.evaluate(_NODES))["main"]
    assert level == box == "warning"
    assert "of 2 endpoints" in text


async def test_upstream_that_is_not_required_is_a_warning(stand: Stand) -> None:
    page = stand.page
    async with calls_in_background(stand):
        await stand.servers[0].stop()
        await stand.show("topology")
        await page.wait_for_text("cannot be reached", ".upstream > .title-row .state")
        _, (level, text) = await page.evaluate(_UPSTREAMS)
        box, _ = (await page.evaluate(_NODES))["spare"]
    assert "cannot be reached" in text
    assert level == box == "warning"
