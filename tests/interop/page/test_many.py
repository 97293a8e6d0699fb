"""The page with 1,000 endpoints and 1,000 models: it shows a part, finds the rest, and responds."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

from tests.interop.page.browser import browser_page
from tests.interop.page.stand import Stand
from tests.support.http_messages import http_response
from tests.support.operator import operated_gateway
from tests.support.servers.scripted_server import Connection, ScriptedServer

COUNT = 1000
MOST_ELEMENTS = 12_000
"""Of a panel: each takes the browser some microseconds with each event."""

PARTS = 10
"""Each endpoint has one of so many parts of the models."""
_INDEXES = [
    json.dumps(
        [
            {"name": f"model-{number:04}", "version": "1", "state": "READY"}
            for number in range(part, COUNT, PARTS)
        ]
    ).encode()
    for part in range(PARTS)
]
_indexes = cycle(_INDEXES)


async def _serve(connection: Connection) -> None:
    """Answer with the list of models, and that all is ready."""
    while True:
        target = (await connection.request()).head.target
        connection.requests.clear()
        await connection.send(http_response(next(_indexes) if "index" in target else b"{}"))


async def test_thousand_endpoints_of_thousand_models(browser: str, tmp_path: Path) -> None:
    # Each address of 127.0.0.0/8 leads here.
    async with ScriptedServer(_serve, host="0.0.0.0") as server:
        urls = [
            f"http://127.1.{number // 250}.{number % 250 + 1}:{server.port}"
            for number in range(COUNT)
        ]
        upstream = f"dialect: triton, model_discovery: true, endpoints: {json.dumps(urls)}"
        async with (
            operated_gateway(tmp_path, f"upstreams: {{many: {{{upstream}}}}}\n") as gateway,
            browser_page(browser) as page,
        ):
            admin = gateway.operator.url.removeprefix("http://")
            stand = Stand(gateway.process, gateway.url, admin, gateway.file, [], page)
            await _look_at_endpoints(stand, urls[777])
            await _look_at_models(stand)
            assert page.errors == []


async def _look_at_endpoints(stand: Stand, wanted: str) -> None:
    page = stand.page
    await stand.show("topology")
    await page.wait_for_text("1 to 100 of 1,000", ".pager")
    assert await page.count("*") < MOST_ELEMENTS
    await page.press_button("Next", ".pager button")
    await page.wait_for_text("101 to 200 of 1,000", ".pager")
    await page.type(wanted, "#topology-search")
    await page.wait_for_count(1, ".endpoints tbody tr")
    assert wanted in await page.text(".endpoints tbody")


async def _look_at_models(stand: Stand) -> None:
    page = stand.page
    await stand.show("models")
    await page.wait_for_text("1 to 100 of 1,000", "#panel-models .pager")
    assert await page.count("*") < MOST_ELEMENTS
    await page.type("model-0777", "#models-search")
    await page.wait_for_count(1, "#panel-models .rows tbody tr")
    assert "model-0777" in await page.text("#panel-models .rows tbody")
