"""Every call frees its memory at once when it ends: nothing waits for the cyclic collector."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from gateway.listener.client_call import Continuation
from gateway.listener.connection import Http1Call
from gateway.upstream.address import TcpAddress
from tests.support.checks.garbage import no_garbage, no_suspended_generators
from tests.support.gateway import (
    RunningGateway,
    gateway_before,
    http1_connections,
    running_gateway,
    until,
)
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    infer_binary,
    infer_json,
    infer_raw,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.servers.model_scripts import model_script, read_heads_only
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

SIZE = 1_200_000
"""Bytes of a body: more than one read, and more than socket buffers hold."""


def _json(datatype: str, element: str, count: int) -> bytes:
    head = f'{{"inputs":[{{"name":"IN","shape":[{count}],"datatype":"{datatype}","data":['
    return f"{head}{','.join([element] * count)}]}}]}}".encode()


def _chunked(target: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    chunks = [chunk(body[start : start + 50_000]) for start in range(0, len(body), 50_000)]
    head = {"Host": "x", "Transfer-Encoding": "chunked", **(headers or {})}
    return message(f"POST {target} HTTP/1.1", head, b"".join(chunks) + b"0\r\n\r\n")


FLOATS = _json("FP32", "0.5", SIZE // 4)
STRINGS = _json("BYTES", f'"{"a" * 17}"', SIZE // 20)
INSTANCES = json.dumps({"instances": [0.5] * (SIZE // 5)}).encode()
ROWS = json.dumps({"instances": [{"IN": 0.5}] * (SIZE // 13)}).encode()
MIXED = b',"outputs":[{"name":"OUT0","parameters":{"binary_data":true}},{"name":"OUT1"}]}'
GZIP = {"Content-Encoding": "gzip"}

LARGE = {
    "floats": infer_json(FLOATS),
    "strings": infer_json(STRINGS),
    "JSON without data": infer_json(b'{"id":"' + b"a" * 900_000 + b'"}'),
    "gzip": infer_json(gzip.compress(STRINGS, 0), GZIP),
    "chunked JSON": _chunked(INFER, FLOATS),
    "binary": infer_binary(binary_header(SIZE), bytes(SIZE)),
    "raw": infer_raw(bytes(SIZE)),
    "chunked raw": _chunked(INFER, bytes(SIZE), {HEADER_LENGTH: "0"}),
    "V1": request("POST", "/v1/models/m:predict", INSTANCES),
    "V1 rows": request("POST", "/v1/models/m:predict", ROWS),
    "mixed outputs": infer_json(FLOATS[:-1] + MIXED),
    "passed": request("POST", "/v2/x", bytes(SIZE)),
    "chunked passed": _chunked("/v2/x", bytes(SIZE)),
    "load": request("POST", "/v2/repository/models/m/load", b" " * SIZE),
}
SMALL = {
    "small JSON": infer_json(),
    "small V1": request("POST", "/v1/models/m:predict", b'{"instances":[1,2]}'),
    "GET": request("GET", "/v2/models/m/stats"),
}
EVERY = LARGE | SMALL

CAPS = {
    "max_request_bytes": 200_000,
    "max_inference_header_bytes": 2000,
    "max_buffered_body_bytes": 2**20,
    "max_buffered_bytes": 2**20,
}

PLENTY = 400_000_000
RESPONSE = message(
    "HTTP/1.1 200 OK",
    {HEADER_LENGTH: str(len(binary_response_header(PLENTY))), "Content-Length": str(PLENTY + 1000)},
    binary_response_header(PLENTY),
)


JSON_RESPONSE = b'{"model_name":"m","outputs":[{"name":"OUT","datatype":"FP32","shape":[9],"data":['


def after_the_metadata(script: Script) -> Script:
    """Return the script that serves the model's metadata first."""

    async def answers_first(connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.target not in ("/v2/models/m", "/v2/models/m/config"):
                break
            await connection.send(http_response(metadata(-1)))
        await script(connection)

    return answers_first


async def endless(connection: Connection) -> None:
    """Respond with a slow body."""
    await connection.send(RESPONSE)
    while True:
        await connection.send(bytes(100_000))


async def cuts(connection: Connection) -> None:
    """Close in the middle of a response."""
    await connection.send(RESPONSE, bytes(300_000))


async def closes(connection: Connection) -> None:
    """Close without a response."""


async def endless_json(connection: Connection) -> None:
    """Respond with slow JSON."""
    await connection.request()
    await connection.send(
        message("HTTP/1.1 200 OK", {"Content-Length": str(PLENTY)}, JSON_RESPONSE)
    )
    while True:
        await connection.send(b"0.5," * 25_000)


async def leaves(client: RawClient) -> None:
    """Close the connection."""
    await client.close()


async def resets(client: RawClient) -> None:
    """Reset the connection."""
    client.reset()


async def half_closes(client: RawClient) -> None:
    """Close one direction, which counts as a disconnect: nothing else would show it."""
    client.shutdown_write()
    with suppress(ConnectionError):
        await client.rest()


WAYS = {"closes": leaves, "resets": resets, "half-closes": half_closes}
_in_turn = itertools.cycle(WAYS.values())


async def leave(client: RawClient, gateway: RunningGateway) -> None:
    """Leave in the next of the ways, and wait until its call has ended."""
    await next(_in_turn)(client)
    await gateway.until_idle()


Ending = Callable[[RawClient, bytes, RunningGateway], Awaitable[None]]


async def check_each(forms: dict[str, bytes], script: Script, end: Ending, **settings: Any) -> None:
    """Check that a call of each encoding leaves nothing, on its own connection."""
    async with gateway_before(script, **settings) as (server, gateway):
        async with gateway.client() as client:
            # Whatever is created once for all calls exists already.
            assert (await client.call("GET", "/v2/health/live")).status == 200

        async def call(data: bytes) -> None:
            async with gateway.client() as client:
                await end(client, data, gateway)
            await gateway.until_idle()
            await until(lambda: not gateway.gateway.listener.connections)
            if script is read_heads_only:
                assert not server.requests
                await until(lambda: all(each.left.is_set() for each in server.connections))

        try:
            # A look at all objects takes longer than a call.
            with no_garbage("all forms"):
                for data in forms.values():
                    await call(data)
        except AssertionError:
            for form, data in forms.items():
                with no_garbage(form):
                    await call(data)
            raise


async def is_answered(client: RawClient, data: bytes, _: RunningGateway) -> None:
    """Send a request and read the response to its end."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        client.send_nowait(data)
        await client.read_response()


async def hangs(client: RawClient, data: bytes, gateway: RunningGateway) -> None:
    """Send half of a request, and wait for the response."""
    await is_answered(client, data[: len(data) // 2], gateway)


async def breaks(client: RawClient, data: bytes, gateway: RunningGateway) -> None:
    """Send a request with garbage in the middle."""
    middle = len(data) // 2
    await is_answered(client, data[:middle] + b'{"\x00[,,}\r\n' + data[middle + 9 :], gateway)


async def leaves_sending(client: RawClient, data: bytes, gateway: RunningGateway) -> None:
    """Send a part of a request, then disconnect."""
    client.send_nowait(data[: len(data) * 2 // 3])
    await until(lambda: gateway.gateway.listener._active_calls)
    await asyncio.sleep(0.02)
    await leave(client, gateway)


async def leaves_waiting(client: RawClient, data: bytes, gateway: RunningGateway) -> None:
    """Send a request, then disconnect before the response."""
    client.send_nowait(data)
    await until(lambda: gateway.outstanding or not gateway.gateway.listener._active_calls)
    await asyncio.sleep(0.02)
    await leave(client, gateway)


async def leaves_reading(client: RawClient, data: bytes, gateway: RunningGateway) -> None:
    """Send a request, then disconnect during the response."""
    client.send_nowait(data)
    await client.head()
    await asyncio.sleep(0.02)
    await leave(client, gateway)


COMPRESSED = {
    form: data.replace(b"\r\n", b"\r\nAccept-Encoding: gzip\r\n", 1) for form, data in EVERY.items()
}
TO_JSON = {form: LARGE[form] for form in ("floats", "binary", "passed", "mixed outputs")}
REWRITTEN = {"buffered binary": infer_binary(binary_header(20_000), bytes(20_000))}
"""A request that is written as JSON anew for each attempt."""
SILENT = after_the_metadata(never_respond)
GONE = {"endpoints": ["http://127.0.0.1:9", "http://127.0.0.1:11"]}

MIRRORED = {
    "route": {"mirror": {"upstream": "other", "percent": "100%"}},
    "others": {"other": {**GONE, "dialect": "triton"}},
}

CASES: dict[str, tuple[dict[str, bytes], Script, Ending, dict[str, Any]]] = {
    "leaves during its upload": (LARGE, read_heads_only, leaves_sending, {}),
    "leaves before the response": (EVERY, SILENT, leaves_waiting, {}),
    "leaves during the response": (EVERY, after_the_metadata(endless), leaves_reading, {}),
    "leaves during a compressed response": (
        COMPRESSED,
        after_the_metadata(endless),
        leaves_reading,
        {"route": {"compression": ["gzip"]}},
    ),
    "leaves during the response of a JSON server": (
        TO_JSON,
        endless_json,
        leaves_waiting,
        {"upstream": {"dialect": "json"}},
    ),
    "has a JSON server": (
        TO_JSON | REWRITTEN,
        always_respond(http_response(JSON_RESPONSE + b"0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5]}]}")),
        is_answered,
        {"upstream": {"dialect": "json"}},
    ),
    "hangs during its upload": (LARGE, read_heads_only, hangs, {"idle_timeout": 0.1}),
    "leaves a mirrored call": (EVERY, SILENT, leaves_waiting, MIRRORED),
    "sends garbage": (LARGE, after_the_metadata(closes), breaks, {}),
    "has a server that cuts": (EVERY, after_the_metadata(cuts), is_answered, {}),
    "has a server that closes": (EVERY, after_the_metadata(closes), is_answered, {}),
    "has a server that hangs": (EVERY, SILENT, is_answered, {"idle_timeout": 0.1}),
    "has no server": (EVERY, never_respond, is_answered, {"upstream": GONE}),
    **{
        f"sends more than {cap}": (LARGE, after_the_metadata(closes), is_answered, {cap: size})
        for cap, size in CAPS.items()
    },
}


@pytest.mark.parametrize(("forms", "script", "end", "settings"), CASES.values(), ids=CASES)
async def test_call_frees_everything_of_a_client_that(
    forms: dict[str, bytes], script: Script, end: Ending, settings: dict[str, Any]
) -> None:
    await check_each(forms, script, end, **settings)


@pytest.mark.parametrize("form", [*SMALL, *TO_JSON])
async def test_converted_response_leaves_no_suspended_generator(form: str) -> None:
    header = binary_response_header(400)
    # It is decoded as it arrives, so nobody knows how long it is.
    headers = {**GZIP, HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
    coded = http_response(gzip.compress(header + bytes(400)), headers)
    async with gateway_before(model_script(coded)) as (_, gateway), gateway.client() as client:
        with no_suspended_generators():
            assert (await client.ask(EVERY[form])).status == 200
            await gateway.until_idle()


@pytest.mark.parametrize("size", [0, 1_000_000], ids=["asked again", "relayed"])
async def test_client_disconnect_before_its_task_starts_frees_everything(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        await connection.send(http_response(bytes(size), status="200 OK" if size else "503 Busy"))
        await connection.wait_for_close()

    go_on = Http1Call.continue_in_task

    def leave_and_go_on(call: Http1Call, rest: Continuation, over: Callable[[], None]) -> None:
        # Both connections end in one iteration of the event loop.
        call._connection.transport.abort()
        go_on(call, rest, over)

    monkeypatch.setattr(Http1Call, "continue_in_task", leave_and_go_on)
    async with (
        ScriptedServer(script) as one,
        ScriptedServer(script) as other,
        running_gateway(one.url, other.url, route={"retry_on": [503]}) as gateway,
    ):
        async with gateway.client() as first, gateway.client() as second:
            await asyncio.gather(first.ask(SMALL["GET"]), second.ask(SMALL["GET"]))
        await gateway.until_idle()
        with no_garbage("a task that never began"):
            async with gateway.client() as client:
                await client.send(SMALL["GET"])
                assert not await client.rest()
            await gateway.until_idle()
        buffers = gateway.gateway.listener.buffers
        assert (buffers.reserved, buffers.buffered, buffers.streams) == (0, 0, 0)


async def test_client_disconnect_during_a_retry_frees_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def closes_as_it_is_used_again(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()

    connecting = asyncio.Event()

    async def never(*_: object) -> None:
        connecting.set()
        await asyncio.Event().wait()

    async with gateway_before(closes_as_it_is_used_again) as (_, gateway):
        async with gateway.client() as client:
            await client.ask(SMALL["GET"])
        await gateway.until_idle()
        monkeypatch.setattr(TcpAddress, "connect", never)
        with no_garbage("a request that is sent again"):
            async with gateway.client() as client:
                await client.send(SMALL["GET"])
                await connecting.wait()
            await gateway.until_idle()
            await asyncio.sleep(0.02)


async def test_client_disconnects_while_the_gateway_connects(unused_backlog: str) -> None:
    async with running_gateway(unused_backlog) as gateway, gateway.client() as client:
        await client.send(SMALL["small JSON"])
        await until(lambda: gateway.outstanding == 1)
        await client.close()
        await gateway.until_idle()


async def never_reads(connection: Connection) -> None:
    """Read nothing."""
    connection.stop_reading()
    await asyncio.sleep(60)


async def _fill(client: RawClient, gateway: RunningGateway, data: bytes = bytes(50_000)) -> None:
    """Send until the gateway stops reading, and all that was sent has left the client's host."""
    (connection,) = http1_connections(gateway.gateway.listener)
    seen = 0
    async with asyncio.timeout(20):
        while seen < 5 or client.unsent:  # several times: a single pause may be short
            seen = seen + 1 if connection.read_flow.paused else 0
            if not seen and not client.unsent:
                client.send_nowait(data)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("leave", WAYS.values(), ids=WAYS)
async def test_client_disconnects_while_its_upload_is_paused(
    leave: Callable[[RawClient], Awaitable[None]],
) -> None:
    async with gateway_before(never_reads) as (_, gateway), gateway.client() as client:
        await client.send(request("POST", "/v2/x", headers={"Content-Length": "60000000"}))
        await _fill(client, gateway)
        assert gateway.outstanding == 1
        await leave(client)
        await until(lambda: not gateway.gateway.listener.connections)
        await gateway.until_idle()
        assert gateway.gateway.listener.buffers.total == 0


async def test_client_disconnects_while_many_of_its_requests_wait() -> None:
    async with gateway_before(never_respond) as (_, gateway), gateway.client() as client:
        await client.send(SMALL["GET"])
        await until(lambda: gateway.outstanding == 1)
        await _fill(client, gateway, SMALL["GET"] * 500)
        await client.close()
        await gateway.until_idle()
        assert gateway.gateway.listener.buffers.total == 0
