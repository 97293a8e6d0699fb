"""Names that clients and servers choose cannot become markup, nor look like others."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.interop.page.stand import Stand
from tests.support.http_messages import request
from tests.support.inference_messages import json_request

NAMES = (
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "\u202egnp.exe",
    "نموذج",
    "x" * 2000,
)


def _infer(name: str) -> bytes:
    return request("POST", f"/v2/models/{quote(name, safe='')}/infer", json_request())


async def test_hostile_model_names_are_text(stand: Stand) -> None:
    for name in NAMES:
        assert await stand.call(_infer(name)) >= 400
    page = stand.page
    await stand.show("calls")
    await page.wait_for(f"document.querySelectorAll('.toggle').length === {len(NAMES)}")
    for number in range(len(NAMES)):
        await page.evaluate(f"document.querySelectorAll('.toggle')[{number}].click()")
    await page.wait_for(f"document.querySelectorAll('.details').length === {len(NAMES)}")
    text = await page.text("main")
    assert "<script>window.hacked=1</script>" in text
    assert "⟨U+202E⟩gnp.exe" in text
    assert "نموذج" in text
    assert "x" * 400 not in text  # a server's words of it are 300 characters
    assert await page.evaluate("window.hacked === undefined && !document.querySelector('main img')")
    assert await page.evaluate("document.querySelectorAll('script').length") == 1
    assert await page.fits_width()


@pytest.mark.parametrize("name", [NAMES[0], NAMES[2], "x" * 2000])
async def test_details_of_a_hostile_model_name_are_shown(stand: Stand, name: str) -> None:
    page = stand.page
    await stand.show(f"models?name={quote(name, safe='')}")
    await page.wait_for_text("Its calls")
    title = await page.text("#panel-models h2")
    assert title.startswith(name[:20].replace("\u202e", "⟨U+202E⟩"))
    assert len(title) < 100
    assert await page.evaluate("window.hacked === undefined")
    if len(name) > 100:
        await page.evaluate(
            "[...document.querySelectorAll('button')].find("
            "each => each.innerText === 'Show the whole name').click()"
        )
        assert await page.text("#panel-models h2") == name
