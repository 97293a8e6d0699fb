"""Servers whose dialect is detected, and what their clients get."""

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.app.build import upstreams
from tests.support.gateway import RunningGateway, running_gateway, served, until
from tests.support.http_messages import http_response
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_response,
    infer_json,
    infer_raw,
    metadata,
)
from tests.support.servers.scripted_server import Connection, ScriptedServer

AUTO = {"dialect": "auto"}
TRITON = {
    "name": "triton",
    "version": "2.51.0",
    "extensions": ["binary_tensor_data", "model_configuration", "schedule_policy", "sequence"],
}
KSERVE = {"name": "kserve", "version": "0.15.0", "extensions": ["model_repository_extension"]}
OLD_KSERVE = {**KSERVE, "version": "0.13.1"}
JSON_ANSWER = b'{"model_name":"m","outputs":[]}'
OUTPUT = b'{"name": "OUT0", "datatype": "FP32", "shape": [-1]}'
VERSIONED = "/v2/models/m/versions/1"


class _Server:
    """Identifies itself, and responds to infer requests in their own encoding."""

    def __init__(self, itself: dict[str, Any]) -> None:
        self._itself = http_response(json.dumps(itself).encode())
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, connection: Connection) -> None:
        while True:
            received = await connection.request()
            target = received.head.target
            if target == "/v2":
                await self.go_on.wait()
                await connection.send(self._itself)
            elif target == "/v2/models/m":
                described = metadata(-1).replace(b'"outputs": []', b'"outputs": [%b]' % OUTPUT)
                await connection.send(http_response(described))
            elif target.endswith("/infer") and received.head.get(HEADER_LENGTH):
                await connection.send(binary_response(FLOATS.tobytes()))
            elif target.endswith("/infer"):
                await connection.send(http_response(JSON_ANSWER))
            else:
                await connection.send(http_response(b"{}"))


def _received(server: ScriptedServer) -> list[str]:
    return [received.head.target for received in server.requests]


def _dialect(gateway: RunningGateway) -> str | None:
    (upstream,) = gateway.gateway.active_config.upstreams.values()
    dialect = upstream.dialect_state.dialect
    return None if dialect is None else dialect.name


@pytest.mark.parametrize(
    ("itself", "name", "in_binary"),
    [(TRITON, "triton", True), (KSERVE, "kserve", True), (OLD_KSERVE, "kserve", False)],
)
async def test_detected_dialect_is_used(itself: dict[str, Any], name: str, in_binary: bool) -> None:
    async with served(_Server(itself), upstream=AUTO) as (server, gateway, client):
        for _ in range(3):
            reply = await client.ask(infer_json())
            assert reply.status == 200
            assert ("data" in reply.json["outputs"][0]) if in_binary else reply.body == JSON_ANSWER
        assert _dialect(gateway) == name
        infers = [each for each in server.requests if each.head.target == INFER]
        assert [each.head.get(HEADER_LENGTH) is not None for each in infers] == [in_binary] * 3
        expected_type = "application/octet-stream" if in_binary else "application/json"
        assert {each.head.get("Content-Type") for each in infers} == {expected_type}
        assert _received(server).count("/v2") == 1


async def test_requests_wait_for_the_dialect_and_then_take_the_fast_path(
    fast_path_requests: list[str],
) -> None:
    script = _Server(TRITON)
    script.go_on.clear()
    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url, upstream=AUTO) as gateway,
        gateway.client() as one,
        gateway.client() as two,
    ):
        await one.send(infer_json())
        await two.send(infer_raw(FLOATS.tobytes()))
        await until(lambda: gateway.gateway.listener.requests == 2)
        await until(lambda: _received(server) == ["/v2"])
        # A request that needs no dialect does not wait for it.
        async with gateway.client() as other:
            assert (await other.call("GET", "/v2/models/m")).status == 200
        script.go_on.set()
        assert (await one.read_response()).status == (await two.read_response()).status == 200
        assert fast_path_requests == ["/v2/models/m"]
        assert (await one.ask(infer_json())).status == 200
        assert fast_path_requests == ["/v2/models/m", INFER]
        assert _received(server).count("/v2") == 1


async def test_replaced_server_is_detected_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fast_path_requests: list[str]
) -> None:
    """Plans made for the previous server are not used for the next one."""
    monkeypatch.setattr(upstreams, "DIALECT_RETRY_INTERVAL", 0.01)
    caplog.set_level(logging.INFO)
    generate = f"{VERSIONED}/generate"
    async with AsyncExitStack() as stack, AsyncExitStack() as first:
        server = await first.enter_async_context(ScriptedServer(_Server(TRITON)))
        gateway = await stack.enter_async_context(running_gateway(server.url, upstream=AUTO))
        client = await stack.enter_async_context(gateway.client())
        for _ in range(2):
            assert (await client.ask(infer_json())).status == 200
            assert (await client.call("POST", generate, b"{}")).status == 200
        assert fast_path_requests[-2:] == [INFER, generate]
        fast_path_requests.clear()
        await first.aclose()
        assert (await client.ask(infer_json())).status == 503
        other = await stack.enter_async_context(ScriptedServer(_Server(KSERVE), port=server.port))
        await until(lambda: _dialect(gateway) == "kserve")
        assert (await client.call("POST", generate, b"{}")).status == 501
        assert (await client.call("POST", "/v2/models/m/generate", b"{}")).status == 200
        assert other.requests[-1].head.get("Content-Type") == "application/json"
        assert fast_path_requests == [INFER]
        assert (await client.ask(infer_json())).status == 200
        assert fast_path_requests == [INFER] * 2
    told = [message for message in caplog.messages if ": dialect " in message]
    assert [message.split()[3] for message in told] == ["triton:", "kserve:"]
