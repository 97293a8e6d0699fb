"""A line of JSON tells where a call went, in which forms, how large it was, how long it took."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import running_gateway
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    FLOATS,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    metadata,
)
from tests.support.raw_client import ReceivedResponse
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "X-Request-Id": "r-1"}


async def _model(connection: Connection) -> None:
    while True:
        target = (await connection.request()).head.target
        if target.endswith("/infer"):
            await connection.send(binary_response(FLOATS.tobytes()))
        elif "/models/" in target:
            await connection.send(http_response(metadata(-1)))
        else:
            await connection.send(http_response(b"12345", status="503 Busy"))


async def _line(
    data: bytes,
    log: Path,
    route: dict[str, Any] | None = None,
    script: Script = _model,
    **settings: object,
) -> tuple[dict[str, Any], ReceivedResponse, str]:
    """Return the line of a call, its response, and the URL of the server."""
    async with ScriptedServer(script) as server:
        general = {"log": {"access": {"path": str(log), "format": "json"}}, **settings}
        async with (
            running_gateway(server.url, route=route, general=general) as running,
            running.client() as client,
        ):
            response = await client.ask(data)
    lines = log.read_text().splitlines()  # noqa: ASYNC240  (nobody waits)
    return json.loads(lines[-1]), response, server.url


TENSOR = FLOATS.tobytes()
BINARY_HEADER = binary_header(len(TENSOR), binary_output=True)
V1 = request("POST", "/v1/models/m:predict", b'{"instances": [1.5, -2]}', HEADERS)
INFERENCES: dict[str, tuple[bytes, str, str]] = {
    "JSON": (infer_json(headers=HEADERS), "json", "binary"),
    "binary": (infer_binary(BINARY_HEADER, TENSOR, HEADERS), "binary", "binary"),
    "raw binary": (infer_raw(TENSOR, HEADERS), "raw", "binary"),
    "V1": (V1, "v1", "binary"),
}


@pytest.mark.parametrize(
    ("data", "client_form", "server_form"), INFERENCES.values(), ids=INFERENCES
)
async def test_line_of_an_inference(
    data: bytes, client_form: str, server_form: str, path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    line, response, url = await _line(path(data), tmp_path / "log", {"name": "all"})
    assert (response.status, response.head.all("X-Request-Id")) == (200, ["r-1"])
    times = [line.pop(name) for name in ("first_byte_ms", "server_ms", "duration_ms")]
    assert 0 < times[0] <= times[1] <= times[2] < 5000
    request_body = data.partition(b"\r\n\r\n")[2]
    assert line.pop("request_bytes") == len(request_body)
    assert line.pop("response_bytes") == len(response.body)
    assert line.pop("sent_bytes") > len(TENSOR) / 2
    assert line.pop("received_bytes") > len(TENSOR)
    assert line.pop("time").endswith("Z")
    assert line == {
        "client": "127.0.0.1",
        "method": "POST",
        "target": data.split(b" ")[1].decode(),
        "operation": "infer",
        "route": "all",
        "model": "m",
        "upstream": "servers",
        "endpoint": url,
        "attempts": 1,
        "status": 200,
        "answered_by": "server",
        "client_form": client_form,
        "server_form": server_form,
        "request_id": "r-1",
        "trace_id": TRACE,
    }


async def test_line_of_an_error_of_the_gateway(
    path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    data = infer_json(b'{"inputs": 1}', HEADERS)
    line, response, _ = await _line(path(data), tmp_path / "log")
    assert response.head.all("X-Request-Id") == ["r-1"]
    assert (line["status"], line["answered_by"]) == (400, "gateway")
    assert line["error_kind"] == "bad_request"
    assert line["reason"] == response.error
    assert (line["route"], line["model"], line["client_form"]) == ("1", "m", "json")
    assert (line["attempts"], line["sent_bytes"]) == (0, 0)
    assert "endpoint" not in line


async def test_line_has_the_decoded_model_that_the_server_is_asked_for(
    path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    rewrite = {"rewrite": {"model": "n%20o"}}
    data = request("GET", "/v2/models/m/versions/2/ready")
    line, *_ = await _line(path(data), tmp_path / "log", rewrite)
    assert (line["model"], line["version"], line["operation"]) == ("n o", "2", "health")


@pytest.mark.parametrize("has_ids", [True, False])
async def test_request_id_replaces_that_of_the_server_unless_ids_are_off(
    has_ids: bool, path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    script = always_respond(http_response(b"x", {"X-REQUEST-ID": "server", "X-Other": "1"}))
    data = path(request("GET", "/v2/x", headers=HEADERS))
    line, response, _ = await _line(data, tmp_path / "log", script=script, request_id=has_ids)
    assert response.head.all("X-Request-Id") == ["r-1" if has_ids else "server"]
    assert response.head.get("X-Other") == "1"
    assert ("request_id" in line) is has_ids
