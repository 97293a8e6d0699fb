"""A gateway of two workers in front of demo servers, its page in a browser, and clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.demo.server.server import DemoServer
from tests.interop.page.browser import BrowserPage, browser_page
from tests.support.addresses import HOST, free_address, free_port
from tests.support.gateway_process import TENSORGATE, Process, gateway_process
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect

PANELS = ("overview", "topology", "models", "calls", "journal", "try")

TOKEN = "token-of-operators-0123456789abcdef"

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


MODELS = ("half", "half", "identity_fp32")
"""Those of the calls in the background."""


def infer(model: str, headers: dict[str, str] | None = None) -> bytes:
    """Write a JSON infer request to a model of the demo server."""
    datatype = "FP16" if model == "half" else "FP32"
    entry = {"name": "INPUT0", "shape": [3], "datatype": datatype, "data": [1, 2.5, -3]}
    body = json.dumps({"inputs": [entry]}).encode()
    return request("POST", f"/v2/models/{model}/infer", body, headers)


@dataclass(slots=True)
class Stand:
    """A gateway with its servers and its page."""

    process: Process
    url: str
    admin: str
    file: Path
    servers: list[DemoServer]
    page: BrowserPage

    async def show(self, panel: str, base: str = "") -> None:
        """Open a panel of the page, and wait until it is live."""
        await self.page.open(f"{base or f'http://{self.admin}'}/#{panel}")
        await self.page.wait_for("document.querySelector('#connection').dataset.state === 'live'")

    async def call(self, data: bytes) -> int:
        """Send a request on a connection of its own, and return the status."""
        async with connect(self.url) as client:
            return (await client.ask(data)).status

    def background(self) -> asyncio.Task[None]:
        """Send calls without end, some of which fail by the client's fault."""
        return asyncio.create_task(self._send_calls())

    async def _send_calls(self) -> None:
        number = 0
        while True:
            number += 1
            model = "no-such-model" if number % 10 == 0 else MODELS[number % len(MODELS)]
            try:
                async with connect(self.url) as client:
                    await self._send_some(client, model)
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                await asyncio.sleep(0.05)  # its worker was killed

    async def _send_some(self, client: RawClient, model: str) -> None:
        for _ in range(5):
            await client.ask(infer(model))
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running_stand(folder: Path, more: str = "", of_admin: str = "") -> AsyncIterator[Stand]:
    """Run servers, a gateway and a browser; ``more`` are further settings."""
    admin, file = free_address(), folder / "gateway.yaml"
    async with DemoServer(HOST, free_port()) as first, DemoServer(HOST, free_port()) as second:
        urls = {"first": first.url, "second": second.url}
        file.write_text(SETTINGS.format(host=HOST, admin=admin, of_admin=of_admin, **urls) + more)
        # In its folder, so the page shows no path of this machine.
        command = ("env", "-C", str(folder), TENSORGATE)
        async with gateway_process(file.name, command) as (process, url):
            await process.wait_for_output(r"listening on \S+ \(admin\)")
            async with browser_page(folder / "browser") as page:
                yield Stand(process, url, admin, file, [first, second], page)


@asynccontextmanager
async def calls_in_background(stand: Stand) -> AsyncIterator[None]:
    """Send calls while the context is open."""
    task = stand.background()
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
