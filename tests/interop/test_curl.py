"""curl as a client: each way in which it sends a request reaches the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.demo.server.server import DemoServer
from tests.interop.programs import program
from tests.support.certificates import ca_file, certificate_files, server_certificate
from tests.support.gateway import running_gateway
from tests.support.gateway_process import gateway_process, run, write_settings

TARGET = "/v2/models/identity_fp32/infer"
VALUES = [0.5] * 20_000


@pytest.fixture
def body(tmp_path: Path) -> str:
    """A file with a JSON request."""
    file = tmp_path / "request.json"
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [len(VALUES)], "data": VALUES}
    file.write_text(json.dumps({"inputs": [tensor]}))
    return str(file)


async def infer(url: str, body: str, *options: str) -> None:
    """Send the request, and check that the response is what the model gives."""
    json_type = ("--header", "Content-Type: application/json")
    command = [program("curl"), "--silent", "--show-error", "--fail-with-body", "--max-time", "20"]
    status, out, err = await run(*command, *json_type, *options, "--data", f"@{body}", url + TARGET)
    assert status == 0, out + err
    (output,) = json.loads(out)["outputs"]
    assert output["data"] == VALUES


async def test_curl_gets_the_tensor_back(body: str) -> None:
    async with (
        DemoServer() as server,
        running_gateway(server.url, route={"compression": ["gzip"]}) as gateway,
    ):
        for options in (
            [],
            ["--http1.0"],
            ["--compressed"],
            ["--header", "Expect: 100-continue"],
            ["--header", "Transfer-Encoding: chunked"],
            ["--http2"],  # an upgrade that the gateway does not take
            ["--http2-prior-knowledge"],
            ["--http2-prior-knowledge", "--compressed", "--header", "Expect: 100-continue"],
        ):
            await infer(gateway.url, body, *options)


async def test_curl_trusts_the_certificate_of_the_gateway(body: str, tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    tls = {"certificate": certificate, "key": key}
    async with DemoServer() as server, running_gateway(server.url, tls=tls) as gateway:
        options = ("--cacert", ca_file(tmp_path))
        for version, option in (("1.1", "--http1.1"), ("2", "--http2")):
            await infer(gateway.url, body, *options, option)
            command = (program("curl"), "--silent", *options, option, "--output", "/dev/null")
            _, out, _ = await run(
                *command, "--write-out", "%{http_version}", gateway.url + "/v2/health/live"
            )
            assert out == version


async def test_curl_uses_a_unix_socket(body: str, tmp_path: Path) -> None:
    socket = tmp_path / "gateway.sock"
    async with DemoServer() as server:
        config = write_settings(tmp_path / "gateway.yaml", server.url, f"unix:{socket}")
        async with gateway_process(config):
            await infer("http://gateway", body, "--unix-socket", str(socket))
