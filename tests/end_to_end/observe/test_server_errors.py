"""The words of a server's error stand in the log line, the failure log and the endpoint's row."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import grpc_client
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import FLOATS, infer_binary, infer_json, metadata
from tests.support.inference_messages import binary_header as header
from tests.support.servers.grpc_server import fail, grpc_server
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

OOM = "CUDA out of memory on device 0"
ERROR = json.dumps({"error": OOM}).encode()
PREDICT = request("POST", "/v1/models/m:predict", b'{"instances": [1.5]}')
REQUESTS = {
    "pass-through": request("GET", "/v2/x"),
    "JSON": infer_json(),
    "binary": infer_binary(header(FLOATS.nbytes), FLOATS.tobytes()),
    "V1": PREDICT,
}


def _failing(*parts: bytes) -> Script:
    """Make the script of a server that has a model, and responds to all else with these bytes."""

    async def script(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target.startswith("/v2/models/m") and target.count("/") == 3:
                await connection.send(http_response(metadata(-1)))
            elif target in ("/warm", "/v2/models/m/config"):
                await connection.send(http_response(b"{}"))
            else:
                await connection.send(*parts)

    return script


def _gateway(log: Path, *urls: str, **settings: Any) -> AbstractAsyncContextManager[RunningGateway]:
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    return running_gateway(*urls, general=general, **settings)


def _reasons(log: Path) -> list[str]:
    lines = map(json.loads, log.read_text().splitlines())
    return [line["reason"] for line in lines if line.get("status", 0) >= 400]


async def _seen(
    folder: Path, data: bytes, body: bytes, *parts: bytes
) -> tuple[str | None, list[str]]:
    """Call a server that responds with these parts; return the endpoint's error, and the log's.

    The client must get the ``body``.
    """
    log = folder / "log"
    async with ScriptedServer(_failing(*parts)) as server, _gateway(log, server.url) as gateway:
        async with gateway.client() as client:
            await client.call("GET", "/warm")
            assert (await client.ask(data)).body == body
        await gateway.until_idle()
        (state,) = gateway.pool.snapshot()
    return state.last_error, _reasons(log)


@pytest.mark.parametrize("data", REQUESTS.values(), ids=REQUESTS)
async def test_words_stand_wherever_an_operator_looks(
    tmp_path: Path, path: Callable[[bytes], bytes], data: bytes
) -> None:
    response = http_response(ERROR, status="500 Internal Server Error")
    assert await _seen(tmp_path, path(data), ERROR, response) == (
        f"it returned 500: {OOM}",
        [f"the server returned 500: {OOM}"],
    )


async def test_words_of_a_large_error_come_from_its_start(
    tmp_path: Path, path: Callable[[bytes], bytes]
) -> None:
    body = b'{"error": "' + OOM.encode() + b'", "trace": "' + 500_000 * b"x" + b'"}'
    chunked = message("HTTP/1.1 500 Failed", {"Transfer-Encoding": "chunked"})
    parts = (chunked, chunk(body[:100_000]), chunk(body[100_000:]) + chunk(b""))
    _, reasons = await _seen(tmp_path, path(infer_json()), body, *parts)
    assert reasons == [f"the server returned 500: {OOM}"]


async def test_words_of_a_refusal_stand_in_the_line_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A 400 is the client's fault: the endpoint has not failed."""
    body = b'{"error": "unexpected shape"}'
    response = http_response(body, status="400 Bad Request")
    assert await _seen(tmp_path, infer_json(), body, response) == (
        None,
        ["the server returned 400: unexpected shape"],
    )
    assert "unexpected shape" not in caplog.text


async def test_words_of_a_server_that_is_asked_for_metadata_stand_in_the_line(
    tmp_path: Path,
) -> None:
    script = always_respond(http_response(ERROR, status="500 Failed"))
    log = tmp_path / "log"
    async with ScriptedServer(script) as server, _gateway(log, server.url) as gateway:
        async with gateway.client() as client:
            assert (await client.ask(PREDICT)).status == 500
        await gateway.until_idle()
        (state,) = gateway.pool.snapshot()
    assert state.last_error == f"it returned 500: {OOM}"
    assert _reasons(log) == [
        f"the server returned 500 to the request for the model's metadata: {OOM}"
    ]


@pytest.mark.parametrize("client_form", ["gRPC", "HTTP"])
async def test_words_of_a_grpc_server_stand_there_too(tmp_path: Path, client_form: str) -> None:
    log = tmp_path / "log"
    with grpc_server(unary={"ModelInfer": fail(grpc.StatusCode.INTERNAL, OOM)}) as server:
        async with _gateway(log, server.url) as gateway:
            if client_form == "gRPC":
                async with grpc_client(gateway.url) as client:
                    response = await client.call("ModelInfer", b"\n\1m")
                    assert response.code is grpc.StatusCode.INTERNAL
            else:
                async with gateway.client() as http_client:
                    assert (await http_client.ask(infer_json())).status == 500
            await gateway.until_idle()
            await until(lambda: log.read_text())
            (state,) = gateway.pool.snapshot()
    assert state.last_error == f"it returned INTERNAL: {OOM}"
    assert _reasons(log) == [f"the server returned INTERNAL: {OOM}"]
