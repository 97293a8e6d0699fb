"""A gateway of two workers in front of demo servers, its page in a browser, and clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.demo.server.server import DemoServer
from tests.interop.page.browser import BrowserPage, browser_page
from tests.interop.programs import installed_folder
from tests.support.addresses import HOST, free_address, free_port
from tests.support.gateway_process import TENSORGATE, Process, gateway_process
from tests.support.http_messages import request
from tests.support.raw_client import connect

PANELS = ("overview", "topology", "models", "calls", "journal", "try")

TOKEN = "token-of-operators-0123456789abcdef"

BROKEN_PORTS = """
(() => {
  const broken = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const found of node.data.matchAll(/:\\d{2,5}\\b/g)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      const lines = new Set([...range.getClientRects()].map((each) => Math.round(each.top)));
      if (lines.size > 1) broken.push(node.data);
    }
  }
  return broken;
})()
"""
"""What the page has of ports that a line break cuts, in a browser."""

NAMES = (
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "\u202egnp.exe",
    "نموذج",
    "x" * 2000,
)
HOSTILE_SORTS = (NAMES[0], NAMES[2], NAMES[4])
"""Names that would be markup, or look like others, if the page showed them as they are."""

SETTINGS = """
listen: {host}:0
admin: {{listen: {admin}{of_admin}}}
workers: 2
watch: false
upstreams:
  main:
    endpoints: ["{first}", "{second}"]
    model_discovery: true
    health_check: {{interval: 200ms, timeout: 1s}}
    outlier_detection: {{consecutive_failures: 2, base_ejection_time: 5m}}
  spare: {{endpoints: ["{first}"], dialect: triton, required: false}}
routes:
  - name: canary
    match: {{model: "half"}}
    upstream: [{{name: main, weight: 3}}, {{name: spare, weight: 1}}]
  - {{name: rest, upstream: main, mirror: {{upstream: spare, percent: 50}}}}
"""
_OF_OPERATORS = ", keys: operators, actions: true, payloads: true"
LIVE = "document.querySelector('#connection').dataset.state === 'live'"

MODELS = ("half", "half", "identity_fp32")
"""Those of the calls in the background."""


def infer(model: str, headers: dict[str, str] | None = None) -> bytes:
    """Write a JSON infer request to a model of the demo server."""
    datatype = "FP16" if model == "half" else "FP32"
    entry = {"name": "INPUT0", "shape": [3], "datatype": datatype, "data": [1, 2.5, -3]}
    body = json.dumps({"inputs": [entry]}).encode()
    return request("POST", f"/v2/models/{model}/infer", body, headers)


def shown_begin(name: str) -> str:
    """Return how a name begins where the page shows it."""
    return name[:20].replace("\u202e", "⟨U+202E⟩")


@dataclass(slots=True)
class Site:
    """A gateway with its servers; its operators have the key TOKEN."""

    process: Process
    url: str
    admin: str
    file: Path
    servers: list[DemoServer]


@dataclass(slots=True)
class Stand(Site):
    """A site and its page."""

    page: BrowserPage

    async def show(self, panel: str, base: str = "") -> None:
        """Open a panel of the page, and wait until it is live."""
        await self.page.open(f"{base or f'http://{self.admin}'}/#{panel}")
        await self.page.wait_for(LIVE)

    async def call(self, data: bytes) -> int:
        """Send a request on a connection of its own, and return the status."""
        async with connect(self.url) as client:
            return (await client.ask(data)).status

    async def enter_token(self, token: str = TOKEN) -> None:
        """Enter a key where the page asks for it."""
        await self.page.wait_for("document.activeElement.id === 'action-key'")
        await self.page.type(token)
        await self.page.press("Enter")

    async def check_that_the_token_is_kept_nowhere(self) -> None:
        """Assert that neither the page nor the browser's storages have the key."""
        places = "location.href, document.cookie, {...localStorage}, {...sessionStorage}"
        assert TOKEN not in await self.page.evaluate(f"JSON.stringify([{places}])")
        assert TOKEN not in await self.page.evaluate("document.documentElement.outerHTML")

    async def send_calls(self) -> None:
        """Send calls without end, some of which fail by the client's fault."""
        number = 0
        while True:
            number += 1
            model = "no-such-model" if number % 10 == 0 else MODELS[number % len(MODELS)]
            try:
                async with connect(self.url) as client:
                    for _ in range(5):
                        await client.ask(infer(model))
                        await asyncio.sleep(0.02)
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                await asyncio.sleep(0.05)  # its worker was killed


@asynccontextmanager
async def running_site(folder: Path, *, allows_all: bool = True) -> AsyncIterator[Site]:
    """Run servers and a gateway, which may allow its operators to change and to try all."""
    admin, file, keys = free_address(), folder / "gateway.yaml", folder / "keys"
    keys.write_text(f"{TOKEN}\n")
    of_admin, of_keys = (
        (_OF_OPERATORS, f"api_keys: {{operators: {{file: {keys}}}}}\n") if allows_all else ("", "")
    )
    async with DemoServer(HOST, free_port()) as first, DemoServer(HOST, free_port()) as second:
        places = {"host": HOST, "admin": admin, "first": first.url, "second": second.url}
        file.write_text(SETTINGS.format(of_admin=of_admin, **places) + of_keys)
        # In its folder, so the page shows no path of this machine.
        command = ("env", "-C", str(folder), TENSORGATE)
        async with gateway_process(file.name, command) as (process, url):
            await process.wait_for_output(r"listening on \S+ \(admin\)")
            yield Site(process, url, admin, file, [first, second])


@asynccontextmanager
async def page_of(site: Site, browser: str) -> AsyncIterator[Stand]:
    """Open the page of a site; in the end it has not complained, nor asked other hosts."""
    async with browser_page(browser) as page:
        yield Stand(site.process, site.url, site.admin, site.file, site.servers, page)
        assert page.errors == []
        own = (f"http://{site.admin}/", "data:", "about:")
        assert [url for url in page.requests if not url.startswith(own)] == []
        assert not any(TOKEN in url for url in page.requests)


@asynccontextmanager
async def calls_in_background(stand: Stand) -> AsyncIterator[None]:
    """Send calls while the context is open."""
    task = asyncio.create_task(stand.send_calls())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def violations(page: BrowserPage) -> list[Any]:
    """Return what axe-core finds on a page as it is now, or skip the test without axe-core."""
    script = installed_folder("axe-core/node_modules/axe-core") / "axe.min.js"
    await page.evaluate(f"{script.read_text()};0")
    found = await page.evaluate(
        "axe.run(document).then(({violations}) => violations.map("
        "({id, help, nodes}) => [id, help, ...nodes.slice(0, 3).map(({html}) => html)]))"
    )
    assert isinstance(found, list)
    return found
