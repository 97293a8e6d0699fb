"""V1 clients of a V2 server: their responses, their errors and their routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from gateway.demo.server.server import DemoServer
from tests.support.gateway import gateway_client, running_gateway, until
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_response,
    binary_response_header,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer

PREDICT = "/v1/models/m:predict"
BODY = json.dumps({"instances": FLOATS.tolist()}).encode()
TOLD = b'{"predictions":[1.5,-2.0,3e+30]}'


async def model(connection: Connection) -> None:
    """Respond as a server with a model m."""
    while True:
        target = (await connection.request()).head.target
        if target == INFER:
            await connection.send(binary_response(FLOATS.tobytes()))
        elif target == "/v2/models/m":
            await connection.send(http_response(metadata(-1)))
        else:
            await connection.send(http_response(b'{"error":"no"}', status="404 Not Found"))


@pytest.fixture
async def demo() -> AsyncIterator[RawClient]:
    """A client of a gateway in front of the demo server."""
    async with DemoServer() as server, gateway_client(server.url) as client:
        yield client


async def predict(client: RawClient, name: str, body: Any) -> Any:
    """Send a valid prediction."""
    reply = await client.call("POST", f"/v1/models/{name}:predict", json.dumps(body).encode())
    assert reply.status == 200, reply.body
    assert reply.head.get("Content-Type") == "application/json"
    return reply.json


async def test_every_v1_format_is_converted(demo: RawClient) -> None:
    rows = [{"INPUT0": 1, "INPUT1": 5}, {"INPUT1": 7, "INPUT0": 2}]
    assert await predict(demo, "add", {"instances": rows}) == {"predictions": [6, 9]}
    columns = {"INPUT0": [1, 2], "INPUT1": [5, 7]}
    assert await predict(demo, "add", {"inputs": columns}) == {"outputs": [6, 9]}
    assert await predict(demo, "half", {"instances": [1, 3]}) == {"predictions": [0.5, 1.5]}
    assert await predict(demo, "add/versions/1", {"instances": rows}) == {"predictions": [6, 9]}


async def test_base64_bytes_round_trip(demo: RawClient) -> None:
    elements = [{"b64": "aGVsbG8="}, "é"]
    told = await predict(demo, "identity_bytes", {"instances": elements})
    assert told == {"predictions": ["hello", "é"]}
    target = "/v1/models/identity_bytes:predict"
    reply = await demo.call("POST", target, b'{"inputs":[{"b64":"/w=="}]}')
    assert reply.status == 406
    assert "element 0 is not UTF-8" in reply.error


async def test_several_outputs_of_a_batching_model(demo: RawClient) -> None:
    images = np.arange(2 * 3 * 224 * 224, dtype="<f4").reshape(2, 3, 224, 224) % 7 / 8
    told = await predict(demo, "image", {"instances": images.tolist()})
    rows = told["predictions"]
    assert [list(row) for row in rows] == [["MEAN", "INVERTED"]] * 2
    inverted = np.array([row["INVERTED"] for row in rows], "<f4")
    np.testing.assert_array_equal(inverted, 1 - images)
    columns = (await predict(demo, "image", {"inputs": {"INPUT": images.tolist()}}))["outputs"]
    assert columns == {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("form", ["instances", "inputs"])
async def test_large_request_and_large_response(demo: RawClient, form: str) -> None:
    values = (np.arange(50_000, dtype="<f4") / 8).tolist()
    told = await predict(demo, "identity_fp32", {form: values})
    assert told == {{"instances": "predictions", "inputs": "outputs"}[form]: values}


async def test_request_in_tiny_pieces() -> None:
    async with ScriptedServer(model) as server, gateway_client(server.url) as client:
        await client.send(request("POST", PREDICT, None, {"Content-Length": str(len(BODY))}))
        for byte in BODY:
            await client.send(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await client.read_response()).body == TOLD
    sent = server.requests[-1]
    assert sent.head.target == INFER
    assert sent.body.endswith(FLOATS.tobytes())


BAD_BODIES = {
    "syntax": b"{",
    "datatype": b'{"instances":["x"]}',
    "shape": b'{"instances":[[1],[2]]}',
    "name": b'{"inputs":{"OTHER":[1]}}',
    "too large": b'{"instances":[%b1]}' % (b"1," * 40_000),
}


async def test_bad_bodies_do_not_have_metadata_fetched_again() -> None:
    async with (
        ScriptedServer(model) as server,
        running_gateway(server.url, max_request_bytes=64 * 1024) as gateway,
        gateway.client() as innocent,
    ):
        assert (await innocent.call("POST", PREDICT, BODY)).body == TOLD
        for body in BAD_BODIES.values():
            for _ in range(10):
                async with gateway.client() as client:
                    reply = await client.call("POST", PREDICT, body)
                    assert reply.status in (400, 413)
            assert (await innocent.call("POST", PREDICT, BODY)).body == TOLD
        for _ in range(10):  # a body that ends early
            async with gateway.client() as client:
                await client.send(request("POST", PREDICT, None, {"Content-Length": "99"}) + b"{")
        await gateway.until_idle()
        assert (await innocent.call("POST", PREDICT, BODY)).body == TOLD
    targets = [each.head.target for each in server.requests]
    assert targets.count("/v2/models/m") <= 3  # those of wrong shapes may ask once in 5 s


async def test_model_list_and_readiness(demo: RawClient) -> None:
    assert (await demo.call("GET", "/v1/models/add")).json == {"name": "add", "ready": True}
    models = (await demo.call("GET", "/v1/models")).json["models"]
    assert {"add", "half", "image"} <= set(models)


UNKNOWN = ["/v1/models/none:predict", "/v1/models/none"]


@pytest.mark.parametrize("target", UNKNOWN)
async def test_unknown_model_is_a_404(demo: RawClient, target: str) -> None:
    body = BODY if target.endswith("predict") else None
    reply = await demo.call("POST" if body else "GET", target, body)
    assert reply.status == 404
    assert "none" in reply.error


BAD = {
    "no JSON": b"no",
    "ragged": b'{"instances":[[1,2],[3]]}',
    "a name": b'{"inputs":{"OUT":[1]}}',
    "deep": b'{"instances":' + b"[" * 100_000,
    "an infer request": b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_invalid_request_never_reaches_the_model(body: bytes) -> None:
    async with ScriptedServer(model) as server, gateway_client(server.url) as client:
        reply = await client.call("POST", PREDICT, body)
        assert reply.status == 400
        assert reply.error
        assert (await client.call("POST", PREDICT, BODY)).body == TOLD
    targets = [received.head.target for received in server.requests]
    assert targets.count(INFER) == 1


async def test_rules_match_models_and_versions_of_v1() -> None:
    route = {
        "match": {"model": "alias", "version": "7", "operations": ["infer"]},
        "rewrite": {"model": "m"},
    }
    async with ScriptedServer(model) as server, gateway_client(server.url, route=route) as client:
        target = "/v1/models/alias/versions/7:predict"
        assert (await client.call("POST", "/v1/models/alias:predict", BODY)).status == 404
        assert (await client.call("GET", "/v1/models/alias/versions/7")).status == 404
        await client.call("POST", target, BODY)
    assert server.requests[0].head.target == "/v2/models/m/versions/7"


@pytest.mark.parametrize(
    ("word", "method", "target"),
    [
        ("infer", "POST", PREDICT),
        ("infer", "POST", "/v1/models/m%3Apredict"),  # servers may decode it
        ("health", "GET", "/v1/models/m"),
        ("repository", "GET", "/v1/models"),
        ("other", "POST", "/v1/models/m:explain"),
    ],
)
async def test_denied_operation_is_a_403(word: str, method: str, target: str) -> None:
    async with (
        ScriptedServer(model) as server,
        gateway_client(server.url, route={"deny_operations": [word]}) as client,
    ):
        reply = await client.call(method, target, BODY if method == "POST" else None)
        assert reply.status == 403
        assert f"'{word}'" in reply.error
    assert not server.requests


async def test_other_v1_path_passes_untouched() -> None:
    async def v1(connection: Connection) -> None:
        while True:
            received = await connection.request()
            await connection.send(http_response(received.body))

    async with ScriptedServer(v1) as server, gateway_client(server.url) as client:
        assert (await client.call("POST", "/v1/models/m:explain", BODY)).body == BODY
        assert (await client.call("POST", "/v1/chat/completions", BODY)).body == BODY
    assert [received.head.target for received in server.requests] == [
        "/v1/models/m:explain",
        "/v1/chat/completions",
    ]


@pytest.mark.parametrize("target", ["/v1/models", "/v1/models/m"])
async def test_model_list_waits_for_the_dialect(target: str) -> None:
    go_on = asyncio.Event()

    async def triton(connection: Connection) -> None:
        while True:
            asked = (await connection.request()).head.target
            if asked == "/v2":
                await go_on.wait()
            body = b"[]" if asked == "/v2/repository/index" else b'{"name":"triton"}'
            await connection.send(http_response(body))

    async with (
        ScriptedServer(triton) as server,
        running_gateway(server.url, upstream={"dialect": "auto"}) as gateway,
        gateway.client() as client,
    ):
        await client.send(request("GET", target))
        await until(lambda: gateway.gateway.listener.requests == 1)
        go_on.set()
        assert (await client.read_response()).status == 200


async def test_openai_server_lists_its_models_itself() -> None:
    models = b'{"object":"list","data":[{"id":"m"}]}'

    async def openai(connection: Connection) -> None:
        while True:
            if (await connection.request()).head.target == "/v1/models":
                await connection.send(http_response(models))
            else:
                await connection.send(
                    http_response(b'{"detail":"Not Found"}', status="404 Not Found")
                )

    upstream = {"dialect": "auto"}
    async with (
        ScriptedServer(openai) as server,
        gateway_client(server.url, upstream=upstream) as client,
    ):
        for _ in range(2):
            reply = await client.call("GET", "/v1/models")
            assert (reply.status, reply.body) == (200, models)


async def test_kserve_server_gets_requests_that_cannot_be_converted() -> None:
    async def kserve(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target == PREDICT:
                await connection.send(http_response(b'{"predictions":[7]}'))
            elif target == "/v2/models/m":
                await connection.send(http_response(b'{"name":"m","inputs":[],"outputs":[]}'))
            else:
                await connection.send(http_response(b"{}", status="404 Not Found"))

    upstream = {"dialect": "kserve"}
    async with (
        ScriptedServer(kserve) as server,
        gateway_client(server.url, upstream=upstream) as client,
    ):
        assert (await client.call("POST", PREDICT, BODY)).body == b'{"predictions":[7]}'
    assert server.requests[-1].body == BODY


@pytest.mark.parametrize("status", ["304 Not Modified"])
async def test_response_without_a_body_has_no_length(status: str) -> None:
    """RFC 9110, section 8.6."""

    async def empty(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target == INFER:
                await connection.send(message(f"HTTP/1.1 {status}"))
            else:
                await connection.send(http_response(metadata(-1)))

    async with ScriptedServer(empty) as server, gateway_client(server.url) as client:
        await client.send(request("POST", PREDICT, BODY))
        head = await client.head()
        assert head.first == f"HTTP/1.1 {status}"
        assert head.get("Content-Length") is None


async def test_truncated_response_is_never_finished() -> None:
    async def breaks_off(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target != INFER:
                body = metadata(-1) if target == "/v2/models/m" else b"{}"
                status = "200 OK" if target == "/v2/models/m" else "404 Not Found"
                await connection.send(http_response(body, status=status))
                continue
            header = binary_response_header(400_000)
            head = {HEADER_LENGTH: str(len(header)), "Content-Length": str(len(header) + 400_000)}
            await connection.send(http_response(b"", head), header + bytes(200_000))
            return

    async with ScriptedServer(breaks_off) as server, gateway_client(server.url) as client:
        await client.send(request("POST", PREDICT, BODY))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.read_response()
