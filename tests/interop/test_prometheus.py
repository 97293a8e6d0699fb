"""Prometheus' own checker reads the metrics."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from gateway.demo.server.server import DemoServer
from tests.interop.programs import program
from tests.support.addresses import free_address
from tests.support.gateway_process import gateway_process, write_settings
from tests.support.raw_client import connect


async def test_promtool_accepts_the_metrics(tmp_path: Path) -> None:
    promtool, admin = program("promtool"), free_address()
    async with DemoServer() as server:
        more = f"admin: {admin}\n"
        config = write_settings(tmp_path / "gateway.yaml", server.url, more=more)
        async with gateway_process(config) as (_, url):
            async with connect(url) as client:
                for target in ("/v2/health/ready", "/v2/models/add", "/v2/models/none"):
                    await client.call("GET", target)
            async with connect(f"http://{admin}") as operator:
                metrics = await operator.call("GET", "/metrics")
    assert metrics.status == 200
    done = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=metrics.body, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
