"""Reads the pages of the admin address, as operators and their tools do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.raw_client import connect


class Operator:
    """Fetches each page over a new connection, which any worker may get."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    async def counted(self) -> dict[str, float]:
        """Return the number of calls by model."""
        async with connect(self._url) as client:
            text = (await client.call("GET", "/metrics")).body.decode()
        return {
            sample.labels["model"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "tensorgate_requests_total" and sample.labels["status"] == "2xx"
        }

    async def until_counted(self, calls: int) -> None:
        """Wait until each of several scrapes, which meet any worker, shows that many calls."""
        async with asyncio.timeout(10):
            while sum((await self.counted()).values()) != calls:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)
        for _ in range(6):
            assert sum((await self.counted()).values()) == calls

    async def status(self) -> dict[str, Any]:
        """Return the status, from any worker."""
        async with connect(self._url) as client:
            status: dict[str, Any] = (await client.call("GET", "/status")).json
        return status

    async def until_status(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until a condition holds for what any worker shows."""
        async with asyncio.timeout(10):
            while not condition(await self.status()):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)
        for _ in range(6):
            assert condition(await self.status())

    async def worker(self) -> int:
        """Return the process id of a worker."""
        pid: int = (await self.status())["workers"][0]["pid"]
        return pid
