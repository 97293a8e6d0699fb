"""Bodies that arrive in many pieces: they are waited for a moment, and never held back for long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import orjson
import pytest

from gateway.listener.client_call import ClientCall
from gateway.system.buffers import MAX_WINDOW
from gateway.upstream.http.endpoint import HttpEndpoint
from tests.listener.fast_path.fast_path_listener import FastPathListener, listening, serving
from tests.support.doubles.streaming import LIMITS
from tests.support.gateway import until
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response
from tests.support.inference_messages import (
    HEADER_LENGTH,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    json_request,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer

PIECE = 16 * 1024


LARGE_BODIES = replace(
    LIMITS, max_request_bytes=8 * MAX_WINDOW, max_inference_header_bytes=1_000_000
)


def _endpoint(here: FastPathListener) -> HttpEndpoint:
    (endpoint,) = here.destination.upstream.pool.endpoints
    assert isinstance(endpoint, HttpEndpoint)
    return endpoint


def _wait_longer(here: FastPathListener) -> None:
    """Wait long for bodies, so that a busy machine does not change the path."""
    here.listener.deferrals._large._timeout = here.listener.deferrals._small._timeout = 5.0


def _tensor(size: int) -> bytes:
    """Return bytes that differ all over, in whole FP32 numbers."""
    return np.arange(size // 4, dtype=np.float32).tobytes()


def _binary(tensor: bytes) -> bytes:
    return infer_binary(binary_header(len(tensor), binary_output=True), tensor)


def _pieces(data: bytes) -> Sequence[bytes]:
    return [data[start : start + PIECE] for start in range(0, len(data), PIECE)]


async def _echo_tensor(connection: Connection) -> None:
    """Send back the tensor of each binary request, in pieces."""
    while True:
        received = await connection.request()
        length = received.head.get(HEADER_LENGTH)
        reply = binary_response(received.body[int(length) :]) if length else http_response()
        for piece in _pieces(reply):
            await connection.send(piece)


@pytest.mark.parametrize("size", [PIECE, 2**16 + 4, MAX_WINDOW - 1024])
async def test_binary_call_in_pieces_takes_the_fast_path(
    size: int, fast_path_requests: list[str]
) -> None:
    tensor = _tensor(size)
    data = _binary(tensor)
    async with serving(_echo_tensor) as (here, client):
        _wait_longer(here)
        for _ in range(2):
            client.send_nowait(data)
            reply = await client.read_response()
            assert reply.body.endswith(tensor)
            assert reply.head.get("Content-Length") == str(len(reply.body))
            assert here.server.requests[-1].body == data.partition(b"\r\n\r\n")[2]
        assert len(fast_path_requests) == 2
        await here.until_idle()
        assert here.listener.buffers.total == 0
        assert len(here.server.connections) == 1


async def test_request_that_does_not_fit_its_window_is_not_waited_for(
    fast_path_requests: list[str],
) -> None:
    """Reading is paused at the window, so that the rest would come only after the timeout."""
    tensor = _tensor(300_000)
    async with serving(_echo_tensor) as (here, client):
        _wait_longer(here)
        here.listener.buffers.set_limit(8 * 100_000)
        data = _binary(tensor)
        await client.send(data[:1000])
        connection = here.connection
        await until(lambda: connection.call is not None and connection.call.is_deferred)
        await client.send(data[1000:])
        assert (await client.read_response()).body.endswith(tensor)
        assert fast_path_requests == []
        await here.until_idle()
        assert here.listener.buffers.total == 0


async def test_unread_large_response_counts_as_buffered() -> None:
    tensor = _tensor(600_000)
    async with ScriptedServer(_echo_tensor) as server, listening(server) as here:
        async with here.client() as client:
            sock = here.connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.send_nowait(_binary(tensor) * 2)
            await until(lambda: here.listener.buffers.buffered > 100_000)
            for _ in range(2):
                assert (await client.read_response()).body.endswith(tensor)
        await here.until_idle()
        assert here.listener.buffers.total == 0


async def test_connection_is_not_reused_before_the_server_has_read_the_request() -> None:
    async def refuse_unread(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send(http_response(b"{}", status="413 Too Large"))
        await done.wait()

    done = asyncio.Event()
    async with serving(refuse_unread) as (here, client):
        ((_, connection),) = _endpoint(here).connections.idle
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.send_nowait(_binary(_tensor(600_000)))
        assert (await client.read_response()).status == 413
        await here.until_idle()
        assert connection.transport.is_closing()
        done.set()


def _numbers(count: int) -> list[float]:
    return [round(number / 7, 4) for number in range(count)]


def _check_numbers(body: bytes, count: int) -> None:
    found = orjson.loads(body)["outputs"][0]["data"]
    assert np.array_equal(np.array(found, np.float32), np.array(_numbers(count), np.float32))


@pytest.mark.parametrize("count", [8_000, 17_000, 160_000])
async def test_json_call_takes_the_fast_path(count: int, fast_path_requests: list[str]) -> None:
    """Neither 128 KiB of text nor 64 KiB of tensors are a step; larger text is read before."""
    data = infer_json(json_request(*_numbers(count)))
    async with serving(_echo_tensor, limits=LARGE_BODIES) as (here, client):
        _wait_longer(here)
        fast_path_requests.clear()
        for _ in range(2):
            client.send_nowait(data)
            _check_numbers((await client.read_response()).body, count)
        client.send_nowait(data + infer_json())  # the next request is right behind
        _check_numbers((await client.read_response()).body, count)
        assert (await client.read_response()).status == 200
        assert len(fast_path_requests) == 4
        await here.until_idle()
        assert here.listener.buffers.total == 0


async def _half_sent(here: FastPathListener, client: RawClient, data: bytes) -> ClientCall:
    await client.send(data[: len(data) // 2])
    await until(lambda: _received(here) > len(data) // 2 - 1000)
    (call,) = here.listener._active_calls
    return call


async def test_large_json_that_comes_slowly_is_read_as_it_arrives(
    fast_path_requests: list[str],
) -> None:
    data = infer_json(json_request(*_numbers(160_000)))
    async with serving(_echo_tensor, limits=LARGE_BODIES) as (here, client):
        fast_path_requests.clear()
        call = await _half_sent(here, client, data)
        await until(lambda: not call.is_deferred)
        await client.send(data[len(data) // 2 :])
        _check_numbers((await client.read_response()).body, 160_000)
        assert fast_path_requests == []
        await here.until_idle()
        assert here.listener.buffers.total == 0


async def test_invalid_large_json_is_refused_before_all_of_it_is_there() -> None:
    data = infer_json(json_request(*_numbers(160_000)).replace(b"1000.0", b"x000.0", 1))
    async with serving(_echo_tensor, limits=LARGE_BODIES) as (here, client):
        _wait_longer(here)
        await client.send(data[:-1000])
        reply = await client.read_response()
        assert reply.status == 400
        assert b"IN" in reply.body
        await here.until_idle()
        assert here.listener.deferrals.size == 0
    assert here.destination.memory_budget.buffers.total == 0


@pytest.mark.parametrize("is_complete", [False, True])
async def test_memory_of_a_body_is_given_back_when_its_client_goes(
    is_complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = infer_json(json_request(*_numbers(160_000)))
    async with (
        ScriptedServer(_echo_tensor) as server,
        listening(server, limits=LARGE_BODIES) as here,
    ):
        async with here.client() as client:
            _wait_longer(here)
            call = await _half_sent(here, client, data)
            buffers = here.destination.memory_budget.buffers
            assert call.is_deferred
            assert len(data) // 2 - 1000 < buffers.reserved < 2 * len(data)
            if is_complete:
                await client.send(data[len(data) // 2 :])
                await until(lambda: call.has_sent_all)
        await here.until_idle()
        assert here.listener.deferrals.size == 0
        async with here.client() as innocent:
            assert (await innocent.ask(infer_json())).status == 200
        await here.until_idle()
        assert (buffers.total, here.listener.buffers.total) == (0, 0)
        assert not caplog.records


async def test_large_response_of_strings_is_converted_in_time_slices() -> None:
    text = b"\x01\0\0\0a" * 20_000
    fields = {"name": "OUT0", "datatype": "BYTES", "shape": [20_000]}
    parameters = {"binary_data_size": len(text)}
    header = orjson.dumps({"model_name": "m", "outputs": [{**fields, "parameters": parameters}]})
    sent = http_response(header + text, {HEADER_LENGTH: str(len(header))})

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        await connection.send(sent)

    async with serving(script) as (_, client):
        reply = await client.ask(infer_json())
        assert reply.head.get("Transfer-Encoding") == "chunked"
        assert orjson.loads(reply.body)["outputs"][0]["data"] == ["a"] * 20_000


@pytest.mark.parametrize("arrives", [True, False])
async def test_body_over_http2_is_waited_for_while_some_of_it_comes(
    arrives: bool, fast_path_requests: list[str]
) -> None:
    """Other streams have their share of a connection, so that it may take longer than usual."""
    tensor = _tensor(200_000)
    data = _binary(tensor).partition(b"\r\n\r\n")[2]
    size = str(len(data) - len(tensor))
    headers = ((HEADER_LENGTH.lower(), size), ("content-length", str(len(data))))
    async with (
        ScriptedServer(_echo_tensor) as server,
        listening(server) as here,
        connect_http2(here.url) as client,
    ):
        _wait_longer(here)
        await client.call("GET", "/v2/x")  # connects to the server
        stream = client.send_headers("POST", "/v2/models/m/infer", headers)
        await client.send_data(stream, data[:20_000], end_stream=False)
        await until(lambda: _received(here) == 20_000)
        (call,) = here.listener._active_calls
        call.on_timeout()
        assert call.is_deferred
        if arrives:
            await client.send_data(stream, data[20_000:40_000], end_stream=False)
            await until(lambda: _received(here) == 40_000)
        call.on_timeout()
        assert call.is_deferred
        call.on_timeout()
        assert call.is_deferred == arrives
        await client.send_data(stream, data[40_000:] if arrives else data[20_000:])
        assert (await client.response(stream)).body.endswith(tensor)
        assert fast_path_requests == ["/v2/x", *(["/v2/models/m/infer"] if arrives else [])]
        await here.until_idle()
        assert here.listener.deferrals.size == 0
        assert here.listener.buffers.total == 0


def _received(here: FastPathListener) -> int:
    return sum(call.record.request_bytes for call in here.listener._active_calls)
