"""Gateways in processes of their own, as operators and their tools see them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.addresses import HOST, free_address
from tests.support.checks.nothing_left_in_process import until_nothing_is_left
from tests.support.gateway import until
from tests.support.gateway_process import TENSORGATE, TIMEOUT, Process, gateway_process
from tests.support.raw_client import connect


class Operator:
    """Fetches each page over a new connection, which any worker may get."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    async def text(self, path: str) -> str:
        """Return a page."""
        async with connect(self.url) as client:
            reply = await client.call("GET", path)
        assert reply.status == 200, reply
        return reply.body.decode()

    async def get(self, path: str) -> Any:
        """Return a JSON document."""
        return json.loads(await self.text(path))

    async def samples(self, name: str = "") -> list[Sample]:
        """Return the samples of a metric, or of all."""
        return [
            sample
            for family in text_string_to_metric_families(await self.text("/metrics"))
            for sample in family.samples
            if sample.name == name or not name
        ]

    async def counted(self) -> dict[str, float]:
        """Return the number of calls by model."""
        return {
            sample.labels["model"]: sample.value
            for sample in await self.samples("tensorgate_requests_total")
            if sample.labels["status"] == "2xx"
        }

    async def until_counted(self, calls: int) -> None:
        """Wait until each of several scrapes, which meet any worker, shows that many calls."""

        async def is_counted() -> bool:
            return sum((await self.counted()).values()) == calls

        await until(is_counted, TIMEOUT)
        for _ in range(6):
            assert await is_counted()

    async def status(self) -> dict[str, Any]:
        """Return the status, from any worker."""
        status: dict[str, Any] = await self.get("/status")
        return status

    async def until_status(self, condition: Callable[[dict[str, Any]], object]) -> None:
        """Wait until a condition holds for what any worker shows."""

        async def holds() -> object:
            return condition(await self.status())

        await until(holds, TIMEOUT)
        for _ in range(6):
            assert await holds()

    async def worker(self) -> int:
        """Return the process id of a worker."""
        pid: int = (await self.status())["workers"][0]["pid"]
        return pid


@dataclass
class OperatedGateway:
    """A gateway process, its URL, its settings file, and its operator."""

    process: Process
    url: str
    file: Path
    operator: Operator

    async def until_status(self, condition: Callable[[dict[str, Any]], object]) -> None:
        """Wait until a condition of its status holds."""
        await self.operator.until_status(condition)

    async def until_idle(self) -> None:
        """Wait until nothing is left of all clients."""
        await until_nothing_is_left(self.operator.url)

    def memory(self, field: str) -> int:
        """Return bytes of memory: proc(5), /proc/PID/status."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024


@asynccontextmanager
async def operated_gateway(
    folder: Path, settings: str, command: Sequence[str] = (TENSORGATE,)
) -> AsyncIterator[OperatedGateway]:
    """Run a gateway process with these settings beside its addresses."""
    admin, file = free_address(), folder / "gateway.yaml"
    file.write_text(f"listen: {HOST}:0\nadmin: {admin}\n{settings}")
    async with gateway_process(str(file), command) as (process, url):
        await process.wait_for_output(r"listening on \S+ \(admin\)")
        yield OperatedGateway(process, url, file, Operator(admin))
