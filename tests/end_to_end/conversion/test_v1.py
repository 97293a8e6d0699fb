"""V1 clients of a V2 server: their responses, their errors and their routes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from gateway.demo.server.server import DemoServer
from tests.support.gateway import gateway_client
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import FLOATS, INFER, metadata
from tests.support.raw_client import RawClient
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import Connection, ScriptedServer
from tests.support.servers.served import served

PREDICT = "/v1/models/m:predict"
BODY = json.dumps({"instances": FLOATS.tolist()}).encode()


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
    values = (np.arange(50_000, dtype="<f4") / 8).tolist()
    told = await predict(demo, "identity_fp32", {"instances": values})
    assert told == {"predictions": values}


async def test_model_list_and_readiness(demo: RawClient) -> None:
    assert (await demo.call("GET", "/v1/models/add")).json == {"name": "add", "ready": True}
    models = (await demo.call("GET", "/v1/models")).json["models"]
    assert {"add", "half", "image"} <= set(models)


async def test_rules_match_models_and_versions_of_v1() -> None:
    route = {
        "match": {"model": "alias", "version": "7", "operations": ["infer"]},
        "rewrite": {"model": "m"},
    }
    async with served(infer_floats, route=route) as (server, _, client):
        target = "/v1/models/alias/versions/7:predict"
        assert (await client.call("POST", "/v1/models/alias:predict", BODY)).status == 404
        assert (await client.call("GET", "/v1/models/alias/versions/7")).status == 404
        await client.call("POST", target, BODY)
    assert server.requests[0].head.target == "/v2/models/m/versions/7"


async def test_denied_operation_is_a_403() -> None:
    denied = {
        "infer": ("POST", "/v1/models/m%3Apredict"),  # servers may decode it
        "repository": ("GET", "/v1/models"),
        "other": ("POST", "/v1/models/m:explain"),
    }
    for word, (method, target) in denied.items():
        async with served(route={"deny_operations": [word]}) as (server, _, client):
            reply = await client.call(method, target, BODY if method == "POST" else None)
        assert reply.status == 403
        assert f"'{word}'" in reply.error
        assert not server.requests


async def test_response_without_a_body_has_no_length() -> None:
    """RFC 9110, section 8.6."""

    async def empty(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target == INFER:
                await connection.send(message("HTTP/1.1 304 Not Modified"))
            else:
                await connection.send(http_response(metadata(-1)))

    async with ScriptedServer(empty) as server, gateway_client(server.url) as client:
        await client.send(request("POST", PREDICT, BODY))
        head = await client.head()
        assert head.status == 304
        assert head.get("Content-Length") is None
