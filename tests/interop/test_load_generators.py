"""Load generators that others wrote: every one of their requests gets a good response."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gateway.demo.server.server import DemoServer
from tests.interop.programs import program
from tests.support.gateway import running_gateway
from tests.support.gateway_process import run

TARGET = "/v2/models/add/infer"
BODY = json.dumps(
    {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}
            for name in ("INPUT0", "INPUT1")
        ]
    }
)


@pytest.mark.parametrize("options", [["--h1"], ["--max-concurrent-streams=10"]], ids=["1", "2"])
async def test_each_request_of_h2load_succeeds(tmp_path: Path, options: list[str]) -> None:
    h2load, body = program("h2load"), tmp_path / "request.json"
    body.write_text(BODY)
    async with DemoServer() as server, running_gateway(server.url) as gateway:
        load = (*options, "--requests=2000", "--clients=16", f"--data={body}")
        json_type = "--header=Content-Type: application/json"
        status, out, err = await run(h2load, *load, json_type, gateway.url + TARGET)
    assert status == 0, out + err
    assert "2000 succeeded, 0 failed, 0 errored, 0 timeout" in out
    assert "2000 2xx" in out


async def test_nghttp_gets_a_response_on_each_stream(tmp_path: Path) -> None:
    nghttp, body = program("nghttp"), tmp_path / "request.json"
    body.write_text(BODY)
    async with DemoServer() as server, running_gateway(server.url) as gateway:
        load = ("--null-out", "--stat", "--multiply=20", f"--data={body}")
        json_type = "--header=Content-Type: application/json"
        status, out, err = await run(nghttp, *load, json_type, gateway.url + TARGET)
    assert status == 0, out + err
    assert len(re.findall(r" 200 +\S+ /v2/", out)) == 20, out


async def test_each_request_of_wrk_succeeds(tmp_path: Path) -> None:
    wrk, script = program("wrk"), tmp_path / "request.lua"
    script.write_text(
        f'wrk.method = "POST"\nwrk.body = {json.dumps(BODY)}\n'
        'wrk.headers["Content-Type"] = "application/json"\n'
    )
    async with DemoServer() as server, running_gateway(server.url) as gateway:
        load = ("--threads", "1", "--connections", "16", "--duration", "2s")
        status, out, err = await run(wrk, *load, "--script", str(script), gateway.url + TARGET)
    assert status == 0, out + err
    found = re.search(r"(\d+) requests in ", out)
    assert found is not None, out
    assert int(found[1]) > 50
    assert "Non-2xx" not in out
    assert "Socket errors" not in out
