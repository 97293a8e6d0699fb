"""Clients that leave, are slow or lie disturb no other whose tensors go through shared memory."""

from __future__ import annotations

import http.client
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.proxying.shared_memory_calls import (
    IMAGE,
    SIZE,
    SLOW_IMAGE,
    binary_request,
    calls_by_lane,
    check_unharmed,
    check_values,
    gateway_before,
    load_on,
    memory_of,
    pattern,
    slow_pattern,
    until,
    with_header,
)
from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.gateway import Gateway
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer
from tests.support.http2_client import Headers, Http2Client, Http2Reply, connect_http2
from tests.support.http_messages import request

pytestmark = pytest.mark.triton

RESET = struct.pack("ii", 1, 0)
"""What makes the close of a socket a reset."""
BATCH = 8
"""Images of a response that no buffer of the kernel holds as a whole."""
READERS = 6
LEAVING = 20
STEP = 64 * 1024
LARGE_MEMORY = {"size": "64MiB", "min_bytes": "128KiB"}
"""Enough for the images that slow clients get and send, and for those of others."""


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer((*named(IMAGE), SLOW_IMAGE)) as running:
        yield running


@pytest.fixture(scope="module")
def running(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    limits = {"min_body_rate": "0"}
    with gateway_before(
        tmp_path_factory.mktemp("gateway"),
        server,
        shared_memory=LARGE_MEMORY,
        settings={"limits": limits},
    ) as gateway:
        yield gateway


@pytest.fixture
def shared(running: Gateway, server: TritonServer) -> Iterator[Gateway]:
    """A gateway that must be unharmed after each test."""
    yield running
    check_unharmed(running, server)


def open_socket(gateway: Gateway, receive_buffer: int = 0) -> socket.socket:
    opened = socket.socket()
    if receive_buffer:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    opened.settimeout(60)
    opened.connect((gateway.host, gateway.port))
    return opened


def target(model: str) -> str:
    return f"/v2/models/{model}/infer"


def message(values: Any, more: int = 0, model: str = IMAGE) -> bytes:
    """Return a request whose Content-Length is larger than its body by so much."""
    body, headers = binary_request(values)
    length = {"Content-Length": str(len(body) + more)}
    return request("POST", target(model), body, {**headers, **length})


def read_head(connection: socket.socket) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response


def whole(response: http.client.HTTPResponse, body: bytes) -> Response:
    return Response(response.status, response.reason, response.headers, body)


# ----------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("part", [0.001, 0.5, 0.99, 1])
def test_clients_that_leave_in_a_call_harm_no_other(
    shared: Gateway, part: float, reset: bool
) -> None:
    with load_on(shared) as load:
        for number in range(30):
            data = message(pattern(number))
            with open_socket(shared) as leaving:
                if reset:
                    leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                leaving.sendall(data[: int(part * len(data))])
        load.until_calls(10)
    assert (load.statuses, load.lost) == ({200}, 0)


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_clients_that_leave_while_the_model_runs_harm_no_other(
    shared: Gateway, reset: bool
) -> None:
    def leave(number: int, seconds: float = 0.05) -> bool:
        with open_socket(shared) as leaving:
            if reset:
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            leaving.sendall(message(slow_pattern(number, seconds), model=SLOW_IMAGE.name))
        return False

    with load_on(shared) as load:
        for number in range(LEAVING):
            leave(number)
        # A busy gateway may have read nothing of those that have reset their connections. The next
        # ones take longer than what passes until the memory is looked at again.
        until(lambda: memory_of(shared)["quarantined"] or leave(LEAVING, 0.5))
        until(lambda: not memory_of(shared)["quarantined"])
    assert (load.statuses, load.lost) == ({200}, 0)


async def test_streams_that_end_while_the_model_runs_harm_no_other(shared: Gateway) -> None:
    with load_on(shared) as load:
        async with connect_http2(shared.url) as client:
            for number in range(LEAVING):
                values = slow_pattern(number, 0.05)
                stream = await start_upload(client, values, part=1, model=SLOW_IMAGE.name)
                await client.until_processed()
                client.reset_stream(stream)
            until(lambda: memory_of(shared)["quarantined"])
            until(lambda: not memory_of(shared)["quarantined"])
    assert (load.statuses, load.lost) == ({200}, 0)


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_clients_that_leave_in_a_response_harm_no_other(shared: Gateway, reset: bool) -> None:
    with load_on(shared) as load:
        for number in range(10):
            with open_socket(shared, 4096) as leaving:
                if reset:
                    leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                leaving.sendall(message(pattern(number, BATCH)))
                response = read_head(leaving)
                assert (response.status, len(response.read(1000))) == (200, 1000)
        load.until_calls(10)
    assert (load.statuses, load.lost) == ({200}, 0)


async def test_streams_that_end_in_a_call_harm_no_other(shared: Gateway) -> None:
    with load_on(shared) as load:
        async with connect_http2(shared.url) as client:
            for number in range(30):
                stream = await start_upload(client, pattern(number), part=0.01 * number)
                client.reset_stream(stream)
            for number in range(30):
                async with connect_http2(shared.url) as leaving:
                    await start_upload(leaving, pattern(number), part=0.03 * number)
            reply = await call_over_http2(client, pattern(1))
        load.until_calls(10)
    check_reply(reply, pattern(1))
    assert (load.statuses, load.lost) == ({200}, 0)


async def test_streams_that_end_in_a_response_harm_no_other(shared: Gateway) -> None:
    with load_on(shared) as load:
        async with connect_http2(shared.url) as client:
            client.reads = False
            client.open_window(2**30)
            for number in range(10):
                stream = await start_upload(client, pattern(number, BATCH), part=1)
                await client.until(lambda stream=stream: client.replies[stream].body)
                client.reset_stream(stream)
            client.reads = True
            reply = await call_over_http2(client, pattern(1))
        load.until_calls(10)
    check_reply(reply, pattern(1))
    assert (load.statuses, load.lost) == ({200}, 0)


async def start_upload(client: Http2Client, values: Any, part: float, model: str = IMAGE) -> int:
    """Send a part of a request; return its stream's id."""
    body, headers = binary_request(values)
    stream = client.send_headers("POST", target(model), fields(headers, len(body)), flush=False)
    await client.send_data(stream, body[: int(part * len(body))], end_stream=part == 1)
    return stream


def fields(headers: dict[str, str], length: int) -> Headers:
    given = {name.lower(): value for name, value in headers.items()}
    return [*given.items(), ("content-length", str(length))]


async def call_over_http2(client: Http2Client, values: Any) -> Http2Reply:
    return await client.response(await start_upload(client, values, part=1))


def check_reply(reply: Http2Reply, values: Any) -> None:
    assert (reply.status, reply.ended) == (200, True)
    message = http.client.HTTPMessage()
    for name, value in reply.headers:
        message[name] = value
    check_values(Response(200, "", message, reply.body), values)


# ----------------------------------------------------------------------------- slow clients


# Others of the same size take the slices of a slow reader as soon as they are free.


def test_slow_readers_get_the_bytes_of_their_own_call(shared: Gateway) -> None:
    before = calls_by_lane(shared)
    with load_on(shared, clients=3, batch=BATCH) as load, ExitStack() as stack:
        readers = [stack.enter_context(open_socket(shared, 4096)) for _ in range(READERS)]
        begun = []
        for number, reader in enumerate(readers):
            reader.sendall(message(pattern(number, BATCH)))
            response = read_head(reader)
            begun.append((response, bytearray(response.read(1000))))
        load.until_calls(20)
        assert memory_of(shared)["in_use"] > READERS * SIZE * BATCH
        # At one of the pauses, the gateway has done all but to hand the rest to the kernel.
        while any(not response.isclosed() for response, _ in begun):
            for response, body in begun:
                body += response.read(STEP)
            load.until_calls(2)
        for number, (response, body) in enumerate(begun):
            check_values(whole(response, bytes(body)), pattern(number, BATCH))
    assert (load.statuses, load.lost) == ({200}, 0)
    lanes = calls_by_lane(shared)
    assert lanes["outputs", "shared_memory"] - before["outputs", "shared_memory"] > load.count / 2


async def test_slow_readers_over_http2_get_the_bytes_of_their_own_call(shared: Gateway) -> None:
    with load_on(shared, clients=3, batch=BATCH) as load:
        async with connect_http2(shared.url) as client:
            client.reads = False
            client.open_window(2**30)
            streams = [
                await start_upload(client, pattern(number, BATCH), part=1)
                for number in range(READERS)
            ]
            replies = [client.replies[stream] for stream in streams]
            await client.until(lambda: all(reply.body for reply in replies))
            load.until_calls(20)
            assert memory_of(shared)["in_use"] > READERS * SIZE * BATCH
            total = int(replies[0].get("content-length") or 0)
            # First the windows are what stops the gateway, then the connection.
            for stream in streams:
                client.open_window(total, stream)
            while not all(reply.ended for reply in replies):
                before = received(replies)
                await client.until(lambda before=before: received(replies) != before)
                load.until_calls(2)  # in which the event loop of the client reads nothing
            for number, reply in enumerate(replies):
                check_reply(reply, pattern(number, BATCH))
    assert (load.statuses, load.lost) == ({200}, 0)


def received(replies: Sequence[Http2Reply]) -> tuple[int, int]:
    return sum(len(reply.body) for reply in replies), sum(reply.ended for reply in replies)


def test_uploads_that_hold_all_memory_let_others_take_the_socket(shared: Gateway) -> None:
    uploads, images = 30, 4  # together they would take more than there is
    before = calls_by_lane(shared)
    with load_on(shared) as load, ExitStack() as stack:
        slow = [stack.enter_context(open_socket(shared)) for _ in range(uploads)]
        messages = [message(pattern(number, images)) for number in range(uploads)]
        for each, data in zip(slow, messages, strict=True):
            each.sendall(data[:10_000])
        load.until_calls(50)
        memory = memory_of(shared)
        assert memory["in_use"] > 0.75 * memory["size"]
        for start, end in pairwise(range(10_000, 110_000, 20_000)):
            for each, data in zip(slow, messages, strict=True):
                each.sendall(data[start:end])
            load.until_calls(5)
        for number, (each, data) in enumerate(zip(slow, messages, strict=True)):
            each.sendall(data[90_000:])
            response = read_head(each)
            check_values(whole(response, response.read()), pattern(number, images))
    assert (load.statuses, load.lost) == ({200}, 0)
    assert calls_by_lane(shared)["inputs", "full"] > before["inputs", "full"]


# ----------------------------------------------------------------------------- hostile clients


@pytest.mark.parametrize("more", [1, SIZE])
def test_length_that_is_more_than_what_comes_harms_no_other(shared: Gateway, more: int) -> None:
    with load_on(shared) as load:
        for number in range(20):
            with open_socket(shared) as lying:
                lying.sendall(message(pattern(number), more))
                lying.shutdown(socket.SHUT_WR)
                response = lying.recv(1000)
                assert response == b"" or b" 400 " in response
        load.until_calls(10)
    assert (load.statuses, load.lost) == ({200}, 0)


@pytest.mark.parametrize("sent", [SIZE - 4, SIZE, SIZE + 4, 2 * SIZE])
@pytest.mark.parametrize("size", [-1, 0, 1, SIZE - 4, SIZE + 4, 2 * SIZE, 2**40, 2**64])
def test_size_of_a_tensor_that_lies_is_refused(shared: Gateway, size: int, sent: int) -> None:
    body, headers = with_header(pattern(size % 1000), size)
    length = int(headers[HEADER_LENGTH]) + sent
    with Client(shared.host, shared.port) as client:
        response = client.infer(IMAGE, (body + bytes(SIZE))[:length], headers)
        assert response.status == 400, response.body[:200]
