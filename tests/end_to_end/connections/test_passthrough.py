"""What the gateway changes in requests and responses, and what passes, over any transport."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    server_certificate,
    server_context,
)
from tests.support.gateway import UPSTREAM, gateway_client, served
from tests.support.http_messages import chunked, http_response, message, request, with_long_head
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    json_request,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import ScriptedServer, always_respond

HOP_BY_HOP = (
    b"Connection: keep-alive, X-Hop\r\n"
    b"X-Hop: 1\r\n"
    b"Keep-Alive: timeout=5\r\n"
    b"Proxy-Connection: keep-alive\r\n"
    b"Proxy-Authorization: Basic eA==\r\n"
    b"Proxy-Authenticate: Basic\r\n"
    b"TE: trailers\r\n"
    b"Trailer: X-T\r\n"
    b"Upgrade: h2c\r\n"
)
END_TO_END = b"X-Two: a\r\nX-Two: b\r\nx-tenant: blue\r\nCookie: c=d\r\nAuthorization: Bearer t\r\n"
DROPPED = [line.split(b":")[0].decode() for line in HOP_BY_HOP.splitlines()]


def _with_headers(data: bytes, headers: bytes) -> bytes:
    first, _, rest = data.partition(b"\r\n")
    return first + b"\r\n" + headers + rest


@pytest.mark.parametrize(
    "data",
    [
        request("GET", "/v2/models/m/stats"),
        request("POST", "/v2/x", b"x"),
        infer_json(),
        infer_binary(binary_header(4), bytes(4)),
    ],
    ids=["GET", "POST", "json", "binary"],
)
async def test_end_to_end_request_headers_pass(data: bytes) -> None:
    async with served(always_respond(http_response(b'{"outputs":[]}'))) as (server, _, client):
        reply = await client.ask(_with_headers(data, HOP_BY_HOP + END_TO_END))
        assert reply.status == 200
        head = server.requests[0].head
        for name in DROPPED:
            assert head.all(name) == []
        assert head.all("X-Two") == ["a", "b"]
        assert head.get("x-tenant") == "blue"
        assert head.get("Cookie") == "c=d"
        assert head.get("Authorization") == "Bearer t"
        assert head.get("Host") == "localhost"
        for name in ("User-Agent", "Accept", "Accept-Encoding"):
            assert head.get(name) is None  # no Content-Type that the client did not send


async def test_end_to_end_response_headers_pass() -> None:
    data = _with_headers(
        http_response(b'{"outputs":[]}'),
        HOP_BY_HOP + b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: triton\r\nDate: then\r\n",
    )
    async with served(always_respond(data)) as (_, _, client):
        for query in (request("GET", "/v2/x"), infer_json()):
            head = (await client.ask(query)).head
            for name in DROPPED:
                assert head.all(name) == []
            assert head.all("Set-Cookie") == ["a=1", "b=2"]
            assert head.get("Server") == "triton"
            assert head.get("Date") == "then"


async def test_json_request_reaches_the_server_in_binary() -> None:
    async with served(always_respond(binary_response(FLOATS.tobytes()))) as (server, _, client):
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
        reply = await client.ask(infer_json(headers=headers))
        assert reply.status == 200
        assert reply.head.get("Content-Type") == "application/json"
        assert reply.head.get(HEADER_LENGTH) is None
        assert reply.json["outputs"][0]["data"] == [1.5, -2, 3e30]
        received = server.requests[0]
        size = int(received.head.get(HEADER_LENGTH) or 0)
        assert received.head.get("Content-Type") == "application/octet-stream"
        assert received.head.get("Content-Length") == str(len(received.body))
        assert received.head.get("Accept-Encoding") is None  # the gateway reads the response
        assert received.body[size:] == FLOATS.tobytes()
        fields = json.loads(received.body[:size])
        assert fields["parameters"] == {"binary_data_output": True}


async def test_binary_call_passes_byte_for_byte() -> None:
    header, tensors = binary_header(12, binary_output=True), FLOATS.tobytes()
    data = binary_response(FLOATS.tobytes(), headers={"Content-Encoding": "identity"})
    async with served(always_respond(data)) as (server, _, client):
        reply = await client.ask(infer_binary(header, tensors, {"Accept-Encoding": "gzip"}))
        assert reply.body == data.partition(b"\r\n\r\n")[2]
        assert reply.head.get(HEADER_LENGTH) == str(len(reply.body) - 12)
        received = server.requests[0]
        assert received.body == header + tensors
        assert received.head.get(HEADER_LENGTH) == str(len(header))
        assert received.head.get("Accept-Encoding") == "gzip"


async def test_binary_extension_is_added_to_server_metadata() -> None:
    fields = {"name": "triton", "version": "2", "extensions": ["statistics"]}
    head = {"Transfer-Encoding": "chunked", "X-Kept": "1"}
    data = message("HTTP/1.1 200 OK", head, chunked(json.dumps(fields).encode()))
    async with served(always_respond(data)) as (server, _, client):
        for target in ("/v2", "/v2/", "/v2?x"):
            reply = await client.call("GET", target, headers={"Accept-Encoding": "gzip"})
            assert reply.head.get("X-Kept") == "1"
            assert reply.json == {**fields, "extensions": ["statistics", "binary_tensor_data"]}
        assert server.requests[0].head.get("Accept-Encoding") is None


async def _infer_both_ways(client: RawClient, server: ScriptedServer, fast_path: list[str]) -> None:
    data = infer_json()
    for number, sent in enumerate((with_long_head(data), data)):
        assert fast_path == []
        reply = await client.ask(sent)
        assert reply.status == 200
        assert np.array(reply.json["outputs"][0]["data"], "<f4").tolist() == FLOATS.tolist()
        received = server.requests[number]
        assert received.body.endswith(FLOATS.tobytes())
        assert received.head.get(HEADER_LENGTH) is not None
    assert fast_path == [INFER]
    assert len(server.connections) == 1


async def _infer_large(client: RawClient, server: ScriptedServer) -> None:
    """Send a request that neither arrives nor leaves in one piece."""
    values = np.arange(100_000, dtype="<f4")
    reply = await client.ask(infer_json(json_request(*values.tolist())))
    assert reply.status == 200
    assert server.requests[-1].body.endswith(values.tobytes())


async def test_json_infer_over_https(tmp_path: Path, fast_path_requests: list[str]) -> None:
    certificate = server_certificate("triton.example")
    context = server_context(certificate, clients=authority())
    files = dict(zip(("certificate", "key"), certificate_files(tmp_path), strict=True))
    async with ScriptedServer(
        always_respond(binary_response(FLOATS.tobytes())), ssl=context
    ) as server:
        tls = {"ca": ca_file(tmp_path), "server_name": "triton.example", **files}
        async with gateway_client(server.url, upstream={"tls": tls}) as client:
            await _infer_both_ways(client, server, fast_path_requests)
            await _infer_large(client, server)
        # Without TLS settings, the certificates of the system are trusted.
        async with gateway_client(server.url) as client:
            reply = await client.ask(infer_json())
            assert reply.status == 503
            error = f"cannot connect to {UPSTREAM}: its certificate is not trusted ("
            assert reply.error.startswith(error)


async def test_json_infer_over_a_unix_socket(tmp_path: Path, fast_path_requests: list[str]) -> None:
    path = str(tmp_path / "server")
    async with (
        ScriptedServer(always_respond(binary_response(FLOATS.tobytes())), path=path) as server,
        gateway_client(f"unix:{path}") as client,
    ):
        await _infer_both_ways(client, server, fast_path_requests)
        await _infer_large(client, server)
    async with gateway_client(f"unix:{path}s") as client:
        reply = await client.ask(infer_json())
        assert reply.status == 503
        assert reply.error == f"cannot connect to {UPSTREAM}: No such file or directory"


async def test_certificates_are_not_verified_if_switched_off() -> None:
    context = server_context(server_certificate("triton.example"))
    async with (
        ScriptedServer(always_respond(binary_response(FLOATS.tobytes())), ssl=context) as server,
        gateway_client(server.url, upstream={"tls": {"verify": False}}) as client,
    ):
        assert (await client.ask(infer_json())).status == 200
