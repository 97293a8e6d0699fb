"""Names that clients and servers choose cannot become markup, nor look like others."""

from __future__ import annotations

from urllib.parse import quote
from uuid import uuid4

from tests.interop.page.stand import HOSTILE_SORTS, NAMES, Stand, shown_begin
from tests.support.http_messages import request
from tests.support.inference_messages import json_request


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
