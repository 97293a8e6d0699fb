"""The page behind proxies: under a path prefix, without events, by a name that is not known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from gateway import __version__
from tests.interop.page.stand import LIVE, PANELS, Stand
from tests.support.addresses import HOST, free_port

PREFIX = "/deep/gate"


@dataclass(slots=True)
class PrefixProxy:
    """Serves the admin address under PREFIX."""

    target: str
    url: str = ""
    host: str = ""
    """A Host header of its own."""
    holds_events: bool = False
    """Whether events are collected, and never sent on."""
    replaced: dict[bytes, bytes] = field(default_factory=dict)
    """What is replaced in bodies but those of events."""

    async def pass_on(
        self, client: aiohttp.ClientSession, request: web.Request
    ) -> web.StreamResponse:
        """Pass on a request, and its response, of events as they come."""
        headers = {"Accept": request.headers.get("Accept", "*/*")}
        if self.host:
            headers["Host"] = self.host
        url = f"{self.target}/{request.match_info['path']}"
        async with client.get(url, params=request.query, headers=headers) as source:
            sent = ("Content-Type", "Content-Security-Policy")
            passed = {name: source.headers[name] for name in sent if name in source.headers}
            if source.content_type != "text/event-stream":
                body = await source.read()
                for old, new in self.replaced.items():
                    body = body.replace(old, new)
                return web.Response(body=body, status=source.status, headers=passed)
            response = web.StreamResponse(status=source.status, headers=passed)
            await response.prepare(request)
            async for part in source.content.iter_any():
                if not self.holds_events:
                    await response.write(part)
            return response


@asynccontextmanager
async def prefix_proxy(stand: Stand) -> AsyncIterator[PrefixProxy]:
    """Run a proxy; afterwards the page has asked nobody else."""
    proxy, application = PrefixProxy(f"http://{stand.admin}"), web.Application()
    port = free_port()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:

        async def handle(request: web.Request) -> web.StreamResponse:
            return await proxy.pass_on(client, request)

        application.router.add_get(PREFIX + "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        proxy.url = f"http://{HOST}:{port}"
        try:
            yield proxy
            await stand.page.send("Page.navigate", url="about:blank")
            await asyncio.sleep(0)
            own = (f"{proxy.url}{PREFIX}/", "about:", "data:")
            assert [each for each in stand.page.requests if not each.startswith(own)] == []
            stand.page.requests.clear()
        finally:
            await runner.cleanup()


async def test_page_works_behind_a_path_prefix(stand: Stand) -> None:
    async with prefix_proxy(stand) as proxy:
        page = stand.page
        await stand.show("overview", base=proxy.url + PREFIX)
        for panel in PANELS[1:]:
            await page.click(f"nav a[href='#{panel}']")
            await page.wait_for(f"!document.querySelector('#panel-{panel}').hidden")


async def test_page_polls_while_a_proxy_holds_events_back(stand: Stand) -> None:
    async with prefix_proxy(stand) as proxy:
        proxy.holds_events = True
        page = stand.page
        await page.open(f"{proxy.url}{PREFIX}/#overview")
        await page.wait_for_text("Polling", "#connection")
        polled = "performance.getEntriesByType('resource').filter(e => /overview$/.test(e.name))"
        before = await page.evaluate(f"{polled}.length")
        await page.wait_for(f"{polled}.length > {before}")
        assert not await page.text("#notices")


async def test_page_says_why_the_gateway_refuses_it(stand: Stand) -> None:
    async with prefix_proxy(stand) as proxy:
        proxy.host = "gate.example"
        page = stand.page
        await page.open(f"{proxy.url}{PREFIX}/#overview")
        await page.wait_for_text("gate.example", "#notices")
        assert "admin.hosts" in await page.text("#notices")
        proxy.host = ""
        await page.wait_for(LIVE)
        assert not await page.text("#notices")


async def test_page_of_an_older_version_offers_a_reload(stand: Stand) -> None:
    async with prefix_proxy(stand) as proxy:
        proxy.holds_events = True
        proxy.replaced = {f'"version":"{__version__}"'.encode(): b'"version":"0.0.1"'}
        page = stand.page
        await page.open(f"{proxy.url}{PREFIX}/#overview")
        await page.wait_for_text("0.0.1", "#version")
        proxy.replaced, proxy.holds_events = {}, False
        await page.wait_for_text(f"This page is of version 0.0.1, the gateway of {__version__}.")
        await page.click("#notices button")
        await page.wait_for_text(__version__, "#version")
        await page.wait_for(LIVE)
        assert not await page.text("#notices")
