"""V1 clients of a V2 server: their responses, their errors and their routes."""

from __future__ import annotations

import json

import numpy as np

from gateway.demo.server.server import DemoServer
from tests.support.gateway import gateway_client, served
from tests.support.http_messages import message, request
from tests.support.inference_messages import FLOATS
from tests.support.servers.model_scripts import infer_floats, model_script

PREDICT = "/v1/models/m:predict"
BODY = json.dumps({"instances": FLOATS.tolist()}).encode()


async def test_every_v1_format_is_converted() -> None:
    rows = {"instances": [{"INPUT0": 1, "INPUT1": 5}, {"INPUT1": 7, "INPUT0": 2}]}
    values = (np.arange(50_000, dtype="<f4") / 8).tolist()
    async with DemoServer() as server, gateway_client(server.url) as client:
        for name, body, told in (
            ("add", rows, {"predictions": [6, 9]}),
            ("add", {"inputs": {"INPUT0": [1, 2], "INPUT1": [5, 7]}}, {"outputs": [6, 9]}),
            ("half", {"instances": [1, 3]}, {"predictions": [0.5, 1.5]}),
            ("add/versions/1", rows, {"predictions": [6, 9]}),
            ("identity_fp32", {"instances": values}, {"predictions": values}),
        ):
            target = f"/v1/models/{name}:predict"
            reply = await client.call("POST", target, json.dumps(body).encode())
            assert (reply.status, reply.json) == (200, told)
            assert reply.head.get("Content-Type") == "application/json"
        ready = await client.call("GET", "/v1/models/add")
        assert ready.json == {"name": "add", "ready": True}
        models = (await client.call("GET", "/v1/models")).json["models"]
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


async def test_response_without_a_body_has_no_length() -> None:
    """RFC 9110, section 8.6."""

    empty = model_script(infer=message("HTTP/1.1 304 Not Modified"))
    async with served(empty) as (_, _, client):
        await client.send(request("POST", PREDICT, BODY))
        head = await client.head()
        assert head.status == 304
        assert head.get("Content-Length") is None
