"""Each call has one line in the access log: what its client got, from where, and why it failed.

The words of a server's error stand in the line, and in the row of its endpoint.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.observe.failure_log import FailureLog
from gateway.proxy import errors
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import grpc_client
from tests.support.http2_client import connect_http2
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.servers.grpc_server import fail, grpc_server
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

WARM = "/v2/warm"
MODEL = ("/v2/models/m", "/v2/models/m/config")
CHUNKED = message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"})
TENSOR = FLOATS.tobytes()
POST = request("POST", "/v2/x", b"x")


class Logged:
    """A gateway with an access log of JSON, and a client of it."""

    def __init__(self, gateway: RunningGateway, client: RawClient, log: Path) -> None:
        self.gateway = gateway
        self.client = client
        self._log = log

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines, without those of WARM; all of them are there once the gateway ends."""
        lines = map(json.loads, self._log.read_text().splitlines())
        return [line for line in lines if line["target"] != WARM]

    @property
    def line(self) -> dict[str, Any]:
        """Return the one line."""
        (line,) = self.lines
        return line


@asynccontextmanager
async def logged(folder: Path, *urls: str, **settings: Any) -> AsyncIterator[Logged]:
    """Run a gateway with an idle connection to its first server."""
    log = folder / "access.log"
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    general |= settings.pop("general", {})
    async with (
        running_gateway(*urls, general=general, **settings) as gateway,
        gateway.client() as client,
    ):
        if urls[0].startswith("http"):
            await client.call("GET", WARM)
        yield Logged(gateway, client, log)


def responding(*parts: bytes, waits: bool = False) -> Script:
    """Make the script that answers WARM and metadata, and any other request with these bytes.

    Then it closes, or waits.
    """

    async def script(connection: Connection) -> None:
        while (target := (await connection.request()).head.target) in (WARM, *MODEL):
            await connection.send(http_response(metadata(-1) if target != WARM else b""))
        await connection.send(*parts)
        if waits:
            await never_respond(connection)

    return script


# ----------------------------------------------------------------------------- responses and errors

RESPONSES: dict[str, tuple[bytes, tuple[bytes, ...], int, str]] = {
    "inference": (infer_json(), (binary_response(bytes(4)),), 200, ""),
    "in parts": (POST, (CHUNKED, *map(chunk, (b"a", b"b", b""))), 200, ""),
    "truncated response": (
        POST,
        (CHUNKED, chunk(b"begun")),
        *(200, "{url} closed the connection before the end of its response"),
    ),
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_line_of_a_response(
    name: str, path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    data, parts, status, reason = RESPONSES[name]
    async with (
        ScriptedServer(responding(*parts)) as server,
        logged(tmp_path, server.url) as log,
    ):
        await log.client.send(path(data))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await log.client.read_response()
    line = log.line
    assert (line["status"], line["upstream"], line["endpoint"]) == (status, "servers", server.url)
    assert line.get("reason", "").startswith(reason.format(url=server.url))
    assert ("reason" in line) is bool(reason)


OOM = "CUDA out of memory on device 0"
ERROR = json.dumps({"error": OOM}).encode()
PREDICT = request("POST", "/v1/models/m:predict", b'{"instances": [1.5]}')
FAILED = http_response(ERROR, status="500 Failed")
LARGE = b'{"error": "' + OOM.encode() + b'", "trace": "' + 500_000 * b"x" + b'"}'
WORDS: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "pass-through": (POST, (FAILED,)),
    "JSON": (infer_json(), (FAILED,)),
    "binary": (infer_binary(binary_header(12), TENSOR), (FAILED,)),
    "V1": (PREDICT, (FAILED,)),
    "start of a large one": (
        infer_json(),
        (
            message("HTTP/1.1 500 Failed", {"Transfer-Encoding": "chunked"}),
            chunk(LARGE[:100_000]),
            chunked(LARGE[100_000:]),
        ),
    ),
}


@pytest.mark.parametrize(("data", "parts"), WORDS.values(), ids=WORDS)
async def test_words_of_an_error_stand_wherever_an_operator_looks(
    data: bytes, parts: tuple[bytes, ...], path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    async with (
        ScriptedServer(responding(*parts)) as server,
        logged(tmp_path, server.url) as log,
    ):
        assert (await log.client.ask(path(data))).status == 500
        (state,) = log.gateway.pool.snapshot()
    line = log.line
    assert line["reason"] == f"the server returned 500: {OOM}"
    assert state.last_error == f"it returned 500: {OOM}"


async def test_words_of_a_refusal_stand_in_the_line_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A 400 is the client's fault: the endpoint has not failed."""
    response = http_response(b'{"error": "unexpected shape"}', status="400 Bad Request")
    async with (
        ScriptedServer(responding(response)) as server,
        logged(tmp_path, server.url) as log,
    ):
        await log.client.ask(infer_json())
        (state,) = log.gateway.pool.snapshot()
    line = log.line
    assert (line["reason"], state.last_error) == (
        "the server returned 400: unexpected shape",
        None,
    )
    assert "unexpected shape" not in caplog.text


async def test_words_of_a_server_that_is_asked_for_metadata_stand_in_the_line(
    tmp_path: Path,
) -> None:
    async with (
        ScriptedServer(always_respond(FAILED)) as server,
        logged(tmp_path, server.url) as log,
    ):
        assert (await log.client.ask(PREDICT)).status == 500
    line = log.line
    why = "the server returned 500 to the request for the model's metadata"
    assert line["reason"] == f"{why}: {OOM}"


@pytest.mark.parametrize("over_grpc", [True, False], ids=["gRPC", "HTTP"])
async def test_words_of_a_grpc_server_stand_there_too(tmp_path: Path, over_grpc: bool) -> None:
    with grpc_server(unary={"ModelInfer": fail(grpc.StatusCode.INTERNAL, OOM)}) as server:
        async with logged(tmp_path, server.url) as log:
            if over_grpc:
                async with grpc_client(log.gateway.url) as client:
                    await client.call("ModelInfer", b"\n\1m")
            else:
                assert (await log.client.ask(infer_json())).status == 500
            (state,) = log.gateway.pool.snapshot()
    line = log.line
    assert state.last_error == f"it returned INTERNAL: {OOM}"
    assert line["reason"] == f"the server returned INTERNAL: {OOM}"


async def test_failure_log_has_the_status_of_the_line_of_a_grpc_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RESOURCE_EXHAUSTED is 429 there, although the same error is a 503 over HTTP."""
    monkeypatch.setattr(errors, "FAILURE_LOG", FailureLog())  # another test logs the same
    async with (
        ScriptedServer(responding(waits=True)) as server,
        logged(tmp_path, server.url, max_requests=1) as log,
        grpc_client(log.gateway.url) as second,
    ):
        await log.client.send(POST)
        await until(lambda: log.gateway.outstanding)
        response = await second.call("ModelInfer", b"\n\1m")  # the model is m
        assert response.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    (line,) = (line for line in log.lines if "ModelInfer" in line["target"])
    assert line["status"] == 429
    (failure,) = (each for each in caplog.messages if "failed with" in each)
    assert "failed with 429: " in failure


# ---------------------------------------------------------- calls that end early, and those of many


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "within"])
async def test_line_of_a_client_that_leaves(
    has_begun: bool, path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    begun = (CHUNKED, chunk(b"begun")) if has_begun else ()
    async with (
        ScriptedServer(responding(*begun, waits=True)) as server,
        logged(tmp_path, server.url) as log,
    ):
        await log.client.send(path(POST))
        await until(lambda: len(server.requests) == 2)
        if has_begun:
            await log.client.head()
        await log.client.close()
    line = log.line
    assert line.get("status", 0) == (200 if has_begun else 0)
    assert (line["endpoint"], line["reason"]) == (server.url, "the client closed the connection")


async def test_line_of_a_call_that_a_drain_cuts(
    path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    async with ScriptedServer(responding(waits=True)) as server:
        settings = {"unchecked": "it stops", "drain_timeout": "50ms"}
        async with logged(tmp_path, server.url, **settings) as log:
            await log.client.send(path(POST))
            await until(lambda: len(server.requests) == 2)
            await log.gateway.gateway.__aexit__(None, None, None)
            assert log.gateway.gateway.dropped == 1
    line = log.line
    assert line["reason"] == "the gateway stopped before the call ended (limits.drain_timeout)"


async def test_lines_of_calls_to_several_servers(tmp_path: Path) -> None:
    load = "/v2/repository/models/m/load"
    async with ScriptedServer() as one, ScriptedServer(responding()) as two:
        others = {"more": {"endpoints": [two.url], "dialect": "triton"}}
        route = {"upstream": [{"name": name, "weight": 1} for name in ("servers", "more")]}
        async with logged(tmp_path, one.url, others=others, route=route) as log:
            await log.client.call("GET", "/v2/health/live")
            await log.client.call("POST", load, b"{}")
    live, failed = log.lines
    assert (live["status"], live["answered_by"], "endpoint" in live) == (200, "gateway", False)
    assert (failed["status"], failed["upstream"]) == (502, "servers,more")
    gone = f"{two.url} closed the connection "
    assert failed["reason"].startswith(f"POST {load} succeeded at {one.url}; failed: {gone}")


# -------------------------------------------------------------------------------------- whole lines

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "X-Request-Id": "r-1"}
V1 = request("POST", "/v1/models/m:predict", b'{"instances": [1.5, -2]}', HEADERS)
INFERENCES = {
    "json": infer_json(headers=HEADERS),
    "binary": infer_binary(binary_header(12, binary_output=True), TENSOR, HEADERS),
    "raw": infer_raw(TENSOR, HEADERS),
    "v1": V1,
}


@pytest.mark.parametrize("form", INFERENCES)
async def test_line_of_an_inference(
    form: str, path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    data = INFERENCES[form]
    async with (
        ScriptedServer(infer_floats) as server,
        logged(tmp_path, server.url, route={"name": "all"}) as log,
    ):
        response = await log.client.ask(path(data))
    line = log.line
    assert (response.status, response.head.all("X-Request-Id")) == (200, ["r-1"])
    times = [line.pop(name) for name in ("first_byte_ms", "server_ms", "duration_ms")]
    assert 0 < times[0] <= times[1] <= times[2] < 5000
    assert line.pop("request_bytes") == len(data.partition(b"\r\n\r\n")[2])
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
        "endpoint": server.url,
        "attempts": 1,
        "status": 200,
        "answered_by": "server",
        "client_form": form,
        "server_form": "binary",
        "request_id": "r-1",
        "trace_id": TRACE,
    }


async def test_line_of_an_error_of_the_gateway(
    path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    async with ScriptedServer(infer_floats) as server, logged(tmp_path, server.url) as log:
        response = await log.client.ask(path(infer_json(b'{"inputs": 1}', HEADERS)))
    line = log.line
    assert response.head.all("X-Request-Id") == ["r-1"]
    assert (line["status"], line["answered_by"]) == (400, "gateway")
    assert (line["error_kind"], line["reason"]) == ("bad_request", response.error)
    assert (line["route"], line["model"], line["client_form"]) == ("1", "m", "json")
    assert (line["attempts"], line["sent_bytes"]) == (0, 0)
    assert "endpoint" not in line


async def test_line_has_the_decoded_model_that_the_server_is_asked_for(
    path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    route = {"rewrite": {"model": "n%20o"}}
    async with ScriptedServer() as server, logged(tmp_path, server.url, route=route) as log:
        await log.client.ask(path(request("GET", "/v2/models/m/versions/2/ready")))
    line = log.line
    assert (line["model"], line["version"], line["operation"]) == ("n o", "2", "health")


@pytest.mark.parametrize("has_ids", [True, False])
async def test_request_id_replaces_that_of_the_server_unless_ids_are_off(
    has_ids: bool, path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    script = always_respond(http_response(b"x", {"X-REQUEST-ID": "server", "X-Other": "1"}))
    ids = {"request_id": has_ids}
    async with ScriptedServer(script) as server, logged(tmp_path, server.url, general=ids) as log:
        response = await log.client.ask(path(request("GET", INFER, headers=HEADERS)))
    line = log.line
    assert response.head.all("X-Request-Id") == ["r-1" if has_ids else "server"]
    assert response.head.get("X-Other") == "1"
    assert ("request_id" in line) is has_ids


# ------------------------------------------------------------------------------------ forged lines

QUOTED = r'"(?:[ !#-\[\]-~]|\\["\\x])*"'
TEXT_LINE = re.compile(rf"\S{{24}} {QUOTED} \d+ \d+ \d+\.\d \S+ \S+ \S+ (?:-|{QUOTED})")
TARGETS = [
    f'{start}{chr(odd)}"{end}'
    for start in ("/", "http://h")
    for odd in range(256)
    for end in ("", " 200 0 0.1 - - - -")
]
TARGETS += ["/" + 1999 * "a" + "\\", "/" + 1000 * '"', "*", '"']


async def test_no_target_forges_a_line_of_text(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    general = {"log": {"access": {"path": str(log), "format": "text"}}}
    server = ScriptedServer(always_respond(http_response()))
    async with server, running_gateway(server.url, general=general) as gateway:
        for target in TARGETS:
            head = f"GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
            async with gateway.client() as client:
                await client.send(head.encode("latin-1"))
                await client.rest()
        async with connect_http2(gateway.url) as http2:
            for odd in '"\\ \n\x85\xad':
                await http2.call("GET", f'/{odd}" 200 0 0.1 - - - -')
                await http2.call("GET", f'/{odd}"')
        async with gateway.client() as client:
            assert (await client.call("GET", "/v2/innocent")).status == 200
    lines = log.read_text().split("\n")
    assert len(lines) > len(TARGETS)
    assert lines.pop() == ""
    assert [line for line in lines if not TEXT_LINE.fullmatch(line)] == []
    assert '"GET /v2/innocent" 200 ' in lines[-1]
    assert sum(r'"GET /\\\"" 200 ' in line for line in lines) == 2
