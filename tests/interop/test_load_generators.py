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

BODY = json.dumps(
    {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}
            for name in ("INPUT0", "INPUT1")
        ]
    }
)
REQUEST = ("--data=request.json", "--header=Content-Type: application/json")
SCRIPT = f"""
wrk.method = "POST"
wrk.body = {json.dumps(BODY)}
wrk.headers["Content-Type"] = "application/json"
"""
H2LOAD = ("h2load", "--requests=1000", "--clients=16", *REQUEST)
ALL_SUCCEED = r"1000 succeeded, 0 failed, 0 errored, 0 timeout\s+status codes: 1000 2xx"
WRK = ("wrk", "--threads=1", "--connections=16", "--duration=1s", "--script=request.lua")


@pytest.mark.parametrize(
    ("command", "good", "bad"),
    [
        ((*H2LOAD, "--h1"), ALL_SUCCEED, "$^"),
        ((*H2LOAD, "--max-concurrent-streams=10"), ALL_SUCCEED, "$^"),
        (
            ("nghttp", "--null-out", "--stat", "--multiply=20", *REQUEST),
            r"(.* 200 .*/v2/.*\n){20}",
            "$^",
        ),
        (WRK, r"\d\d requests in ", "Non-2xx|Socket errors"),
    ],
    ids=["h2load of HTTP/1.1", "h2load of HTTP/2", "nghttp", "wrk"],
)
async def test_each_request_succeeds(
    tmp_path: Path, command: tuple[str, ...], good: str, bad: str
) -> None:
    (tmp_path / "request.json").write_text(BODY)
    (tmp_path / "request.lua").write_text(SCRIPT)
    name, *options = command
    async with DemoServer() as server, running_gateway(server.url) as gateway:
        url = f"{gateway.url}/v2/models/add/infer"
        status, out, err = await run("env", "-C", str(tmp_path), program(name), *options, url)
    assert status == 0, out + err
    assert re.search(good, out), out
    assert not re.search(bad, out), out
