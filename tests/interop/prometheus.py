"""Runs Prometheus before a gateway, with the settings of deploy/prometheus, and asks it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.deploy.monitoring import PROMETHEUS
from tests.interop.programs import program
from tests.support.addresses import free_address
from tests.support.gateway_process import Process, running_process
from tests.support.raw_client import connect

PATIENCE = 60.0
"""Seconds after which a test fails that waits for what Prometheus should see."""
SCRAPE_INTERVAL = "500ms"


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a result: its labels, and its values in order of time."""

    labels: dict[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the data of a response of the HTTP API."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        async with connect(self._url) as client:
            reply = await client.call("GET", f"/api/v1/{path}{query}")
        assert reply.status == 200, reply.body.decode()
        return reply.json["data"]

    async def query(self, expression: str) -> list[Series]:
        """Return what an expression is now, or the samples of a range."""
        data = await self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [_series({}, [data["result"]])]
        return [
            _series(each["metric"], each["values"] if "values" in each else [each["value"]])
            for each in data["result"]
        ]

    async def value(self, expression: str) -> float:
        """Return the one value of an expression; NaN if there is none."""
        found = await self.query(expression)
        assert len(found) <= 1, found
        return found[0].values[-1] if found else math.nan

    async def label_values(self, series: str, label: str) -> list[str]:
        """Return the values of a label, as Grafana asks for them."""
        values: list[str] = await self.get(f"label/{label}/values", **{"match[]": series})
        return values

    async def wait_until(self, expression: str, holds: Callable[[float], bool]) -> float:
        """Wait until the one value of an expression is as wanted; return it."""
        value = math.nan
        try:
            async with asyncio.timeout(PATIENCE):
                while not holds(value := await self.value(expression)):  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{expression} is still {value}") from None
        return value

    async def wait_for_scrapes(self, count: int) -> None:
        """Wait until it has scraped the gateway so many more times."""
        scrapes = "sum(count_over_time(up[1h]))"
        before = await self.value(scrapes)
        await self.wait_until(scrapes, lambda seen: seen >= before + count)

    async def is_ready(self) -> bool:
        """Tell whether it answers queries."""
        try:
            async with connect(self._url) as client:
                return (await client.call("GET", "/-/ready")).status == 200
        except ConnectionError:
            return False


def _series(labels: dict[str, str], samples: list[list[Any]]) -> Series:
    times = tuple(float(time) for time, _ in samples)
    return Series(labels, times, tuple(float(value) for _, value in samples))


def write_example(folder: Path, target: str) -> Path:
    """Write the example settings with a gateway of this machine, and scrape it often."""
    settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": "1s"}
    settings["rule_files"] = [str(PROMETHEUS / file) for file in settings["rule_files"]]
    (job,) = settings["scrape_configs"]
    (static,) = job["static_configs"]
    static["targets"] = [target]
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(settings))  # which is YAML, too
    return file


@asynccontextmanager
async def running_prometheus(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    """Run Prometheus on the loopback interface, with its data in a folder."""
    address = free_address()
    command = (
        program("prometheus"),
        f"--config.file={write_example(folder, target)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    )
    async with running_process(*command) as process:
        prometheus = Prometheus(address)
        await _wait_until_ready(process, prometheus)
        yield prometheus


async def _wait_until_ready(process: Process, prometheus: Prometheus) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await prometheus.is_ready():
            assert process.running, await process.end()
            await asyncio.sleep(0.05)
