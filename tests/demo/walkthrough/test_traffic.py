"""The traffic of the demo: it meets success and failure, in every form."""

import asyncio
from contextlib import suppress

import pytest

from gateway.demo.server.server import DemoServer
from gateway.demo.walkthrough import walkthrough
from gateway.settings.schema import Settings
from tests.support.gateway import gateway_of, no_leaks, until


async def test_traffic_has_every_form_and_some_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walkthrough, "_PAUSE", 0.0)
    async with no_leaks(), DemoServer() as server:
        settings = Settings.model_validate(
            {"listen": "127.0.0.1:0", "upstreams": {"demo": {"endpoints": [server.url]}}}
        )
        async with gateway_of(settings) as gateway:
            task = asyncio.create_task(walkthrough.make_traffic(gateway.addresses[0], server))
            seen: set[tuple[str, str, int]] = set()
            wanted = {
                ("infer", "json", 200),
                ("infer", "raw", 200),
                ("generate", "", 200),
                ("infer", "json", 400),
            }
            observe = gateway.call_metrics.observe
            gateway.listener.observers = (
                observe,
                lambda record: seen.add(
                    (record.labels.operation, record.labels.client_form, record.status)
                ),
            )
            await until(lambda: wanted <= seen)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
