"""Each call has one line in the access log: what its client got, from where, and why it failed."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.observe.failure_log import FailureLog
from gateway.proxy import errors
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import grpc_client
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import INFER, binary_response, infer_json
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer, never_respond

WARM = "/v2/warm"
CLOSED = "the client closed the connection"
CHUNKED = message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"})


async def _send(client: RawClient, data: bytes) -> None:
    """Send a request, once there is an idle connection to the server."""
    await client.call("GET", WARM)
    await client.send(data)


class _Log:
    """The lines of an access log: request, status, upstream, endpoint and error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[str]:
        """Return the lines without time, sizes and request id, and without those of WARM."""
        fields = re.compile(r'\S+ (".*?" \d+) \d+ \d+\.\d \S+ (\S+ \S+ .*)')
        found = map(fields.fullmatch, self.path.read_text().splitlines())
        lines = [" ".join(each.groups()) for each in found if each]
        return [line for line in lines if WARM not in line]


def _gateway(log: Path, *urls: str, **settings: Any) -> AbstractAsyncContextManager[RunningGateway]:
    general = {"log": {"access": {"path": str(log)}}}
    return running_gateway(*urls, general=general, **settings)


@pytest.fixture
def log(tmp_path: Path) -> _Log:
    return _Log(tmp_path / "access.log")


def _responding(*parts: bytes, closes: bool = True) -> Callable[[Connection], Awaitable[None]]:
    """Make the script that answers WARM, and any other request with these bytes.

    Then it closes, or waits.
    """

    async def script(connection: Connection) -> None:
        while (await connection.request()).head.target == WARM:
            await connection.send(http_response())
        await connection.send(*parts)
        if not closes:
            await never_respond(connection)

    return script


RESPONSES: dict[str, tuple[bytes, tuple[bytes, ...], str]] = {
    "inference": (
        infer_json(),
        (binary_response(bytes(4)),),
        f'"POST {INFER}" 200 servers {{url}} -',
    ),
    "error of the server": (
        request("GET", "/v2/x"),
        (http_response(b"no", status="404 Not Found"),),
        '"GET /v2/x" 404 servers {url} "the server returned 404: no"',
    ),
    "in parts": (
        request("GET", "/v2/x"),
        (CHUNKED, *chunked(b"a", b"b").splitlines(keepends=True)),
        '"GET /v2/x" 200 servers {url} -',
    ),
    "no response": (
        request("POST", "/v2/x", b"x"),
        (),
        '"POST /v2/x" 502 servers {url} "{url} closed the connection ',
    ),
    "truncated response": (
        request("GET", "/v2/x"),
        (CHUNKED, chunk(b"begun")),
        '"GET /v2/x" 200 servers {url}'
        ' "{url} closed the connection before the end of its response"',
    ),
}


@pytest.mark.parametrize(("data", "parts", "line"), RESPONSES.values(), ids=RESPONSES)
async def test_line_of_a_response(
    data: bytes, parts: tuple[bytes, ...], line: str, path: Callable[[bytes], bytes], log: _Log
) -> None:
    async with (
        ScriptedServer(_responding(*parts)) as server,
        _gateway(log.path, server.url) as gateway,
        gateway.client() as client,
    ):
        await _send(client, path(data))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await client.read_response()
    (logged,) = log.lines
    assert logged.startswith(line.format(url=server.url))


async def test_line_of_a_request_that_no_server_gets(log: _Log) -> None:
    async with ScriptedServer(_responding()) as server:
        route = {"match": {"model": "[!n]*"}}
        async with _gateway(log.path, server.url, route=route) as gateway:
            for data in (request("GET", "/v2/models/none"), infer_json(b'{"inputs": 1}')):
                async with gateway.client() as client:
                    await _send(client, data)
                    await client.head()
    not_found, invalid = log.lines
    assert not_found.startswith('"GET /v2/models/none" 404 - - "no route for GET /v2/models/none; ')
    assert invalid.startswith(f'"POST {INFER}" 400 servers - "inputs')


async def test_failure_log_has_the_status_of_the_line_of_a_grpc_call(
    log: _Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RESOURCE_EXHAUSTED is 429 there, although the same error is a 503 over HTTP."""
    monkeypatch.setattr(errors, "FAILURE_LOG", FailureLog())  # another test logs the same

    async with (
        ScriptedServer(_responding(closes=False)) as server,
        _gateway(log.path, server.url, max_requests=1) as gateway,
        gateway.client() as first,
        grpc_client(gateway.url) as second,
    ):
        await _send(first, request("GET", "/v2/first"))
        await until(lambda: gateway.outstanding)
        response = await second.call("ModelInfer", b"\n\1m")  # the model is m
        assert response.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    (line,) = (line for line in log.lines if "ModelInfer" in line)
    assert 'ModelInfer" 429 servers - "' in line
    (failure,) = (each for each in caplog.messages if "failed with" in each)
    assert "failed with 429: " in failure


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "within"])
async def test_line_of_a_client_that_leaves(
    has_begun: bool, path: Callable[[bytes], bytes], log: _Log
) -> None:
    begun = (CHUNKED, chunk(b"begun")) if has_begun else ()
    async with (
        ScriptedServer(_responding(*begun, closes=False)) as server,
        _gateway(log.path, server.url) as gateway,
    ):
        async with gateway.client() as client:
            await _send(client, path(request("POST", "/v2/x", b"x")))
            await until(lambda: any(each.head.target == "/v2/x" for each in server.requests))
            if has_begun:
                await client.head()
        await gateway.until_idle()
    status = 200 if has_begun else 0
    assert log.lines == [f'"POST /v2/x" {status} servers {server.url} "{CLOSED}"']


async def test_line_of_a_call_that_a_drain_cuts(path: Callable[[bytes], bytes], log: _Log) -> None:
    async with (
        ScriptedServer(_responding(closes=False)) as server,
        _gateway(log.path, server.url, unchecked="it stops", drain_timeout="50ms") as gateway,
        gateway.client() as client,
    ):
        await _send(client, path(request("POST", "/v2/x", b"x")))
        await until(lambda: any(each.head.target == "/v2/x" for each in server.requests))
        await gateway.gateway.__aexit__(None, None, None)
        assert gateway.gateway.dropped == 1
        lines = log.lines
    why = "the gateway stopped before the call ended (limits.drain_timeout)"
    assert lines == [f'"POST /v2/x" 0 servers {server.url} "{why}"']


async def test_lines_of_calls_to_several_servers(log: _Log) -> None:
    load = "/v2/repository/models/m/load"
    async with ScriptedServer() as one, ScriptedServer(_responding()) as two:
        others = {"more": {"endpoints": [two.url], "dialect": "triton"}}
        async with (
            _gateway(log.path, one.url, others=others) as gateway,
            gateway.client() as client,
        ):
            await client.call("POST", load, b"{}")
            await client.call("GET", "/v2/health/live")
        route = {"upstream": [{"name": name, "weight": 1} for name in ("servers", "more")]}
        async with (
            _gateway(log.path, one.url, others=others, route=route) as gateway,
            gateway.client() as client,
        ):
            await client.call("POST", load, b"{}")
    gone = f"{two.url} closed the connection before it responded"
    assert log.lines == [
        f'"POST {load}" 200 servers {one.url} -',
        '"GET /v2/health/live" 200 - - -',
        f'"POST {load}" 502 servers,more - "POST {load} succeeded at {one.url}; failed: {gone}"',
    ]
