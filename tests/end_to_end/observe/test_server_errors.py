"""The words of a server's error stand in the log line, the failure log and the endpoint's row."""

from __future__ import annotations

import gzip
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
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer

OOM = "CUDA out of memory on device 0"
ERROR = json.dumps({"error": OOM}).encode()
PREDICT = request("POST", "/v1/models/m:predict", b'{"instances": [1.5]}')
REQUESTS = {
    "pass-through": request("GET", "/v2/x"),
    "JSON": infer_json(),
    "binary": infer_binary(header(FLOATS.nbytes), FLOATS.tobytes()),
    "V1": PREDICT,
    "generate": request("POST", "/v2/models/m/generate", b'{"text_input": "x"}'),
}
BODIES = {
    "V2": ERROR,
    "KServe": json.dumps({"detail": OOM}).encode(),
    "OpenAI": json.dumps({"error": {"message": OOM, "code": 500}}).encode(),
    "text": OOM.encode(),
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


@pytest.mark.parametrize("data", REQUESTS.values(), ids=REQUESTS)
async def test_words_stand_wherever_an_operator_looks(
    tmp_path: Path, path: Callable[[bytes], bytes], data: bytes
) -> None:
    log = tmp_path / "log"
    script = _failing(http_response(ERROR, status="500 Internal Server Error"))
    async with ScriptedServer(script) as server, _gateway(log, server.url) as gateway:
        async with gateway.client() as client:
            await client.call("GET", "/warm")
            await client.send(path(data))
            reply = await client.read_response()
            assert (reply.status, reply.json) == (500, {"error": OOM})
        await gateway.until_idle()
        (state,) = gateway.pool.snapshot()
    assert state.last_error == f"it returned 500: {OOM}"
    assert _reasons(log) == [f"the server returned 500: {OOM}"]


@pytest.mark.parametrize(
    ("body", "coding"),
    [*((body, "identity") for body in BODIES.values()), (ERROR, "gzip")],
    ids=[*BODIES, "gzip"],
)
async def test_words_are_found_in_each_form(
    tmp_path: Path, path: Callable[[bytes], bytes], body: bytes, coding: str
) -> None:
    log = tmp_path / "log"
    sent = gzip.compress(body) if coding == "gzip" else body
    response = http_response(sent, {"Content-Encoding": coding}, "503 Service Unavailable")
    async with ScriptedServer(_failing(response)) as server, _gateway(log, server.url) as gateway:
        async with gateway.client() as client:
            await client.call("GET", "/warm")
            await client.send(path(infer_json()))
            assert (await client.read_response()).body == sent
        await gateway.until_idle()
        (state,) = gateway.pool.snapshot()
    assert state.last_error == f"it returned 503: {OOM}"
    assert _reasons(log) == [f"the server returned 503: {OOM}"]


async def test_words_of_a_large_error_come_from_its_start(
    tmp_path: Path, path: Callable[[bytes], bytes]
) -> None:
    log = tmp_path / "log"
    body = b'{"error": "' + OOM.encode() + b'", "trace": "' + 500_000 * b"x" + b'"}'
    chunked = message("HTTP/1.1 500 Failed", {"Transfer-Encoding": "chunked"})
    parts = (chunked, chunk(body[:100_000]), chunk(body[100_000:]) + chunk(b""))
    async with ScriptedServer(_failing(*parts)) as server, _gateway(log, server.url) as gateway:
        async with gateway.client() as client:
            await client.call("GET", "/warm")
            await client.send(path(infer_json()))
            assert (await client.read_response()).body == body
        await gateway.until_idle()
    assert _reasons(log) == [f"the server returned 500: {OOM}"]


async def test_control_characters_of_a_server_are_escaped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    body = json.dumps({"error": "no\n\x1b[31m " + 1000 * "y"}).encode()
    script = _failing(http_response(body, status="500 Failed"))
    async with ScriptedServer(script) as server, _gateway(log, server.url) as gateway:
        async with gateway.client() as client:
            await client.ask(infer_json())
        await gateway.until_idle()
        (state,) = gateway.pool.snapshot()
    (reason,) = _reasons(log)
    assert reason.startswith("the server returned 500: no \\x1b[31m yyy")
    assert len(reason) < 350
    assert state.last_error is not None
    assert state.last_error.isprintable()
    assert "\x1b" not in caplog.text


async def test_words_of_a_refusal_stand_in_the_line_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A 400 is the client's fault: the endpoint has not failed."""
    log = tmp_path / "log"
    script = _failing(http_response(b'{"error": "unexpected shape"}', status="400 Bad Request"))
    async with ScriptedServer(script) as server, _gateway(log, server.url) as gateway:
        async with gateway.client() as client:
            assert (await client.ask(infer_json())).status == 400
        await gateway.until_idle()
        (state,) = gateway.pool.snapshot()
    assert state.last_error is None
    assert _reasons(log) == ["the server returned 400: unexpected shape"]
    assert "unexpected shape" not in caplog.text


async def test_words_of_a_response_that_is_retried_stand_in_the_row_alone(
    tmp_path: Path, path: Callable[[bytes], bytes]
) -> None:
    log = tmp_path / "log"
    bad = _failing(http_response(ERROR, status="503 Busy"))
    good = _failing(http_response(b"{}"))
    async with (
        ScriptedServer(bad) as first,
        ScriptedServer(good) as second,
        _gateway(log, first.url, second.url, route={"retry_on": [503]}) as gateway,
    ):
        async with gateway.client() as client:
            for _ in range(2):
                await client.call("GET", "/warm")
            for _ in range(4):
                await client.send(path(request("POST", "/v2/x", b"x")))
                assert (await client.read_response()).status == 200
        await gateway.until_idle()
        (state, _) = gateway.pool.snapshot()
    assert state.last_error == f"it returned 503: {OOM}"
    assert not _reasons(log)
    assert OOM not in log.read_text()


async def test_words_of_a_server_that_is_asked_for_metadata_stand_in_the_line(
    tmp_path: Path,
) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(http_response(ERROR, status="500 Failed"))

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
