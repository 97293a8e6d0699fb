"""Captured calls: the client gets its response, and an operator all that was sent for it."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.app import captured_calls
from gateway.app.captured_calls import send_connection
from gateway.app.standalone import StandaloneGateway
from gateway.listener.server import HttpListener
from gateway.observe.call_record import CallRecord
from tests.app.reloading import settings_for
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import (
    RunningGateway,
    gateway_of,
    no_errors_logged,
    no_leaks,
    running_gateway,
    until,
)
from tests.support.http_messages import http_response
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

HEADER = binary_header(8, binary_output=True)
BODY = HEADER + b"12345678"
CALL = infer_binary(HEADER, b"12345678")
ONE = binary_response(FLOATS.tobytes())


async def _answer(connection: Connection) -> None:
    """Respond to infer requests with binary tensors, and with metadata to others."""
    while True:
        received = await connection.request()
        is_infer = received.head.target == INFER
        await connection.send(ONE if is_infer else http_response(metadata(-1)))


@asynccontextmanager
async def _captured(
    gateway: StandaloneGateway, skips_conversion: bool = False
) -> AsyncIterator[tuple[RawClient, socket.socket]]:
    """Open a connection whose call is captured, and the socket that gets what is captured."""
    connection, sink = await gateway.source.connect_captured(skips_conversion)
    client = RawClient(*await asyncio.open_connection(sock=connection))
    with sink:
        try:
            yield client, sink
        finally:
            await client.close()
    await _until_nothing_is_served(gateway)


@asynccontextmanager
async def _capturing(
    script: Script, **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, RawClient, socket.socket]]:
    """Capture a call before a server of this script; see ``_captured``."""
    async with (
        no_leaks(),
        ScriptedServer(script) as server,
        running_gateway(server.url, **settings) as gateway,
        _captured(gateway.gateway) as (client, sink),
    ):
        yield server, client, sink


async def _until_nothing_is_served(gateway: StandaloneGateway) -> None:
    await until(lambda: not gateway._captured.served)


async def _read(sink: socket.socket) -> list[dict[str, Any]]:
    """Read what was captured, up to its end."""
    sink.setblocking(False)
    text = b""
    async with asyncio.timeout(5):
        while piece := await asyncio.get_running_loop().sock_recv(sink, 65536):
            text += piece
    attempts: list[dict[str, Any]] = json.loads(text) if text else []
    return attempts


def _body(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["body"])


@pytest.fixture
async def gateway(caplog: pytest.LogCaptureFixture) -> AsyncIterator[RunningGateway]:
    with no_errors_logged(caplog):
        async with (
            no_leaks(),
            ScriptedServer(_answer) as server,
            running_gateway(server.url) as running,
        ):
            yield running


async def test_client_gets_the_response_and_the_operator_both_messages(
    call_records: list[CallRecord], gateway: RunningGateway
) -> None:
    async with _captured(gateway.gateway) as (client, sink):
        response = await client.ask(CALL)
        (attempt,) = await _read(sink)
    assert response.status == 200
    (url,) = [each.url for each in gateway.pool.endpoints]
    assert (attempt["upstream"], attempt["endpoint"], attempt["error"]) == ("servers", url, None)
    sent, received = attempt["request"], attempt["response"]
    assert sent["start"] == f"POST {INFER} HTTP/1.1"
    assert [HEADER_LENGTH, str(len(HEADER))] in sent["headers"]
    assert (sent["size"], sent["json_size"], _body(sent)) == (len(BODY), len(HEADER), BODY)
    head, _, body = ONE.partition(b"\r\n\r\n")
    assert received["start"] == head.decode().split("\r\n")[0]
    assert {tuple(each) for each in received["headers"]} == {
        tuple(line.split(": ")) for line in head.decode().split("\r\n")[1:]
    }
    assert (received["size"], _body(received)) == (len(body), body)
    assert received["json_size"] == len(body) - FLOATS.nbytes
    # It is counted and logged as any other.
    (record,) = call_records
    assert (record.status, record.endpoint, record.error) == (200, url, "")


async def test_call_may_skip_conversion(gateway: RunningGateway) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
    async with _captured(gateway.gateway, skips_conversion=True) as (client, sink):
        response = await client.call("POST", INFER, body)
        (attempt,) = await _read(sink)
    assert response.status == 200
    assert _body(attempt["request"]) == body
    assert _body(attempt["response"]) == response.body


async def test_each_attempt_is_captured() -> None:
    scripts = [always_respond(http_response(b"busy %d" % i, status="503 No")) for i in range(2)]
    async with (
        no_leaks(),
        ScriptedServer(scripts[0]) as one,
        ScriptedServer(scripts[1]) as other,
        running_gateway(one.url, other.url, route={"retry_on": [503]}) as gateway,
        _captured(gateway.gateway) as (client, sink),
    ):
        response = await client.ask(CALL)
        attempts = await _read(sink)
        assert {each["endpoint"] for each in attempts} == {one.url, other.url}
    assert len(attempts) == 2
    assert {_body(each["request"]) for each in attempts} == {BODY}
    assert response.body == _body(attempts[1]["response"])
    assert attempts[0]["response"]["start"] == "HTTP/1.1 503 No"


async def test_call_that_takes_too_long_says_so() -> None:
    async with _capturing(never_respond, request_timeout=0.05, idle_timeout=0.05) as (
        _,
        client,
        sink,
    ):
        assert (await client.ask(CALL)).status == 504
        (attempt,) = await _read(sink)
    assert attempt["response"] is None
    assert attempt["error"].startswith("cancelled: a timeout")


@pytest.mark.parametrize("sent", [0, 10, len(CALL) - 4], ids=["nothing", "head", "body"])
async def test_client_that_closes_too_early_leaves_nothing_behind(
    gateway: RunningGateway, sent: int
) -> None:
    async with _captured(gateway.gateway) as (client, sink):
        await client.send(CALL[:sent])
        await client.close()
        for attempt in await _read(sink):  # those of a request whose body was cut
            assert attempt["response"] is None


async def test_client_that_closes_while_the_server_works_ends_the_call() -> None:
    async with _capturing(never_respond) as (server, client, sink):
        await client.send(CALL)
        working = await server.connection()
        await client.close()
        await asyncio.wait_for(working.left.wait(), 5)
        assert all(each["error"] for each in await _read(sink))


async def test_capture_that_nobody_reads_is_dropped(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_calls, "DELIVERY_TIMEOUT", 0.02)
    (ours, theirs), (source, sink) = socket.socketpair(), socket.socketpair()
    sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with theirs:
        send_connection(source, theirs, skips_conversion=False)
    gateway.gateway._captured.serve(sink)
    client = RawClient(*await asyncio.open_connection(sock=ours))
    with source:
        assert (
            await client.ask(infer_binary(binary_header(60_000, binary_output=True), bytes(60_000)))
        ).status == 200
        await until(lambda: sink.fileno() == -1)
        # Its connection is served until it is closed.
        assert (await client.ask(CALL)).status == 200
        await client.close()
        await _until_nothing_is_served(gateway.gateway)


async def test_listener_of_a_call_ends_with_it(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its check for idle connections would run on, and its watch keep a descriptor."""
    made: list[HttpListener] = []
    captured = gateway.gateway._captured
    make = captured.make_listener

    def make_listener(*arguments: Any) -> HttpListener:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(captured, "make_listener", make_listener)
    async with _captured(gateway.gateway) as (client, sink):
        assert (await client.ask(CALL)).status == 200
        await _read(sink)
        timer = made[0]._idle_check
        assert timer is not None
        assert not timer.cancelled()
    assert timer.cancelled()


async def test_socket_without_a_connection_is_closed(gateway: RunningGateway) -> None:
    for data in (b"", b"x"):
        ours, theirs = socket.socketpair()
        with ours:
            ours.send(data)
            gateway.gateway._captured.serve(theirs)
            assert theirs.fileno() == -1


async def test_stopping_gateway_drops_a_call_that_hangs(tmp_path: Path) -> None:
    async with no_leaks(), ScriptedServer(never_respond) as server:
        limits = {"drain_timeout": 0.05, "request_timeout": 3600, "idle_timeout": 3600}
        settings = settings_for(server.url, listen=f"unix:{tmp_path / 's'}", limits=limits)
        async with gateway_of(settings, unchecked="its stop ends the call") as gateway:
            connection, sink = await gateway.source.connect_captured(skips_conversion=False)
            client = RawClient(*await asyncio.open_connection(sock=connection))
            idle, other = await gateway.source.connect_captured(skips_conversion=False)
            await client.send(CALL)
            await server.connection()
            ended = asyncio.create_task(_read(sink))
        assert not gateway._captured.served
        await ended
        with suppress(ConnectionError):
            await client.rest()  # to its end
        # What comes after the stop is not served.
        late, last = await gateway.source.connect_captured(skips_conversion=False)
        assert late.recv(1) == b""
        await client.close()
        for each in (sink, idle, other, late, last):
            each.close()
