"""Size limits of a call: a 413 that names the limit, as early as possible."""

import asyncio
import json

import pytest

from tests.support.gateway import UPSTREAM, gateway_client
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_response,
    binary_response_header,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

KIB = 1024
TARGETS = {"infer": INFER, "forward": "/v2/x"}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
async def test_request_bytes_are_refused_before_they_arrive(target: str) -> None:
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_request_bytes=KIB) as client,
    ):
        await client.send(request("POST", target, headers={"Content-Length": str(KIB + 1)}))
        reply = await client.read_response()
        assert reply.status == 413
        assert "1024 bytes (limits.max_request_bytes)" in reply.error
        assert not server.connections


@pytest.mark.parametrize("headers", [{}, {HEADER_LENGTH: "0"}, {"Content-Encoding": "gzip"}])
async def test_request_bytes_of_every_form_are_refused(headers: dict[str, str]) -> None:
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_request_bytes=KIB) as client,
    ):
        headers = {"Content-Length": "9999", **headers}
        await client.send(request("POST", INFER, headers=headers))
        assert (await client.read_response()).status == 413
        assert not server.connections


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
async def test_request_bytes_of_a_chunked_body_are_counted(target: str) -> None:
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_request_bytes=KIB) as client,
    ):
        head = {"Host": "x", "Transfer-Encoding": "chunked"}
        await client.send(message(f"POST {target} HTTP/1.1", head, chunk(b" " * KIB)))
        await asyncio.sleep(0.02)
        await client.send(chunk(b"x"))
        reply = await client.read_response()
        assert reply.status == 413
        assert "limits.max_request_bytes" in reply.error
        assert server.requests == []


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
async def test_request_bytes_may_be_used_up(target: str) -> None:
    body = json_request().ljust(KIB)
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_request_bytes=KIB) as client,
    ):
        assert (await client.call("POST", target, body)).status == 200
        head = {"Host": "x", "Transfer-Encoding": "chunked"}
        data = message(f"POST {target} HTTP/1.1", head, chunk(body) + chunk(b""))
        assert (await client.ask(data)).status == 200
        assert len(server.requests) == 2


def _padded(size: int) -> bytes:
    """Return a request whose JSON around the data has about this size."""
    return json_request()[:-1] + b',"parameters":{"x":"%s"}}' % (b"x" * size)


@pytest.mark.parametrize("size", [KIB, 200_000])
async def test_header_bytes_of_a_request_are_capped(size: int) -> None:
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_inference_header_bytes=KIB) as client,
    ):
        for data in (infer_json(_padded(size)), infer_binary(_padded(size), b"")):
            reply = await client.ask(data)
            assert reply.status == 413
            assert "1024 bytes (limits.max_inference_header_bytes)" in reply.error
        assert server.requests == []


async def test_data_does_not_count_as_header_bytes() -> None:
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_inference_header_bytes=KIB) as client,
    ):
        reply = await client.ask(infer_json(json_request(*range(100_000))))
        assert reply.status == 200
        assert len(server.requests[0].body) > 400_000


@pytest.mark.parametrize("size", [KIB, 20 * KIB])
async def test_header_bytes_of_a_response_are_capped(size: int) -> None:
    header = binary_response_header(8)[:-1] + b',"x":"%s"}' % (b"x" * size)
    data = http_response(header + bytes(8), {HEADER_LENGTH: str(len(header))})
    async with (
        ScriptedServer(always_respond(data)) as server,
        gateway_client(server.url, max_inference_header_bytes=KIB) as client,
    ):
        reply = await client.ask(infer_json())
        assert reply.status == 502
        assert "limits.max_inference_header_bytes" in reply.error
        assert UPSTREAM in reply.error


async def test_response_without_tensors_passes_at_any_size() -> None:
    body = json.dumps({"outputs": [], "x": "x" * 300_000}).encode()
    async with (
        ScriptedServer(always_respond(http_response(body))) as server,
        gateway_client(server.url, max_inference_header_bytes=KIB) as client,
    ):
        reply = await client.ask(infer_json())
        assert reply.status == 200
        assert reply.body == body


async def _knows_a_model(connection: Connection) -> None:
    while True:
        received = await connection.request()
        if received.head.target == INFER:
            await connection.send(binary_response(bytes(8)))
        else:
            await connection.send(http_response(metadata(-1)))


def _raw_chunks(size: int) -> bytes:
    head = {"Host": "x", "Transfer-Encoding": "chunked", HEADER_LENGTH: "0"}
    return message(f"POST {INFER} HTTP/1.1", head, chunk(bytes(size)) + chunk(b""))


async def test_spool_bytes_cap_a_raw_binary_request_without_length() -> None:
    async with (
        ScriptedServer(_knows_a_model) as server,
        gateway_client(server.url, max_buffered_body_bytes=KIB) as client,
    ):
        assert (await client.ask(_raw_chunks(KIB))).status == 200
        reply = await client.ask(_raw_chunks(KIB + 4))
        assert reply.status == 413
        assert "limits.max_buffered_body_bytes" in reply.error
        assert "Content-Length" in reply.error
        assert len([r for r in server.requests if r.head.target == INFER]) == 1


async def test_spool_bytes_do_not_cap_a_raw_binary_request_with_length() -> None:
    async with (
        ScriptedServer(_knows_a_model) as server,
        gateway_client(server.url, max_buffered_body_bytes=KIB) as client,
    ):
        assert (await client.ask(infer_raw(bytes(100 * KIB)))).status == 200


MIXED_OUTPUTS = json_request()[:-1] + (
    b',"outputs":[{"name":"OUT0","parameters":{"binary_data":true}},{"name":"OUT1"}]}'
)


@pytest.mark.parametrize("sizes", [(4 * KIB, 8), (8, 4 * KIB)], ids=["binary", "json"])
async def test_spool_bytes_cap_a_mixed_response(sizes: tuple[int, int]) -> None:
    data = binary_response(*map(bytes, sizes))
    async with (
        ScriptedServer(always_respond(data)) as server,
        gateway_client(server.url, max_buffered_body_bytes=KIB) as client,
    ):
        reply = await client.ask(infer_json(MIXED_OUTPUTS))
        assert reply.status == 502
        assert "limits.max_buffered_body_bytes" in reply.error
        assert UPSTREAM in reply.error


def _nested(depth: int) -> bytes:
    return (
        b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":'
        + b"[" * depth
        + b"1"
        + b"]" * depth
        + b"}]}"
    )


async def test_json_depth_caps_nested_data() -> None:
    async with ScriptedServer() as server, gateway_client(server.url, max_json_depth=10) as client:
        assert (await client.ask(infer_json(_nested(10)))).status == 200
        reply = await client.ask(infer_json(_nested(11)))
        assert reply.status == 400
        assert "'IN'" in reply.error
        assert "deeper than 10" in reply.error
        assert len(server.requests) == 1


async def test_json_depth_caps_the_header() -> None:
    deep = b'{"inputs":[],"x":' + b"[" * 10 + b"]" * 10 + b"}"
    async with ScriptedServer() as server, gateway_client(server.url, max_json_depth=10) as client:
        for data in (infer_json(deep), infer_binary(deep, b"")):
            reply = await client.ask(data)
            assert reply.status == 400
            assert "deeper than 10" in reply.error
        assert server.requests == []


@pytest.mark.parametrize("depth", [5_000, 500_000])
async def test_json_of_any_depth_is_refused_without_a_crash(depth: int) -> None:
    async with ScriptedServer() as server, gateway_client(server.url) as client:
        for text in (b"[" * depth, b'{"a":' * depth, _nested(depth), b'{"x":' + b"[" * depth):
            reply = await client.ask(infer_json(text))
            assert reply.status in (400, 413)
            assert reply.error
        assert server.requests == []


async def test_max_tensors_are_refused_in_every_form() -> None:
    async with ScriptedServer() as server, gateway_client(server.url, max_tensors=2) as client:
        for count, status in ((2, 200), (3, 400)):
            data = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}] * count
            padded = json.dumps({"inputs": data, "id": "a" * 200 * KIB}).encode()
            size = {"parameters": {"binary_data_size": 4}}
            binary = [{"name": "x", "datatype": "FP32", "shape": [1], **size}] * count
            header = json.dumps({"inputs": binary}).encode()
            for asked in (
                infer_json(json.dumps({"inputs": data}).encode()),
                infer_json(padded),
                infer_binary(header, bytes(4 * count)),
            ):
                reply = await client.ask(asked)
                assert reply.status == status
                if status == 400:
                    assert reply.error == "the request has more than 2 inputs (limits.max_tensors)"
        assert len(server.requests) == 3
