"""Servers whose dialect is detected, and what their clients get."""

import asyncio
import json
import logging
from typing import Any

import pytest

from gateway.app.build import upstreams
from tests.support.addresses import HOST, free_port
from tests.support.gateway import UPSTREAM, RunningGateway, running_gateway, until
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_response,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer
from tests.support.servers.served import served

AUTO = {"dialect": "auto"}
TRITON = {
    "name": "triton",
    "version": "2.51.0",
    "extensions": ["binary_tensor_data", "model_configuration", "schedule_policy", "sequence"],
}
KSERVE = {"name": "kserve", "version": "0.15.0", "extensions": ["model_repository_extension"]}
OLD_KSERVE = {**KSERVE, "version": "0.13.1"}
OPENVINO = {"name": "OpenVINO Model Server", "version": "2024.5"}
JSON_ANSWER = b'{"model_name":"m","outputs":[]}'
VERSIONED = "/v2/models/m/versions/1"


class _Server:
    """Identifies itself, and responds to infer requests in their own encoding."""

    def __init__(self, itself: dict[str, Any] | None, status: str = "200 OK") -> None:
        self.itself = itself
        self.status = status
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, connection: Connection) -> None:
        while True:
            received = await connection.request()
            target = received.head.target
            if target == "/v2":
                await self.go_on.wait()
                await connection.send(
                    http_response(json.dumps(self.itself).encode(), status=self.status)
                )
            elif target == "/v2/models/m":
                outputs = [{"name": "OUT0", "datatype": "FP32", "shape": [-1]}]
                document = {**json.loads(metadata(-1)), "outputs": outputs}
                await connection.send(http_response(json.dumps(document).encode()))
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
    [
        (TRITON, "triton", True),
        (KSERVE, "kserve", True),
        (OLD_KSERVE, "kserve", False),
        (OPENVINO, "openvino", True),
        ({"name": "own", "extensions": ["binary_tensor_data"]}, "binary", True),
    ],
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


async def test_server_that_is_down_is_a_503_without_a_dialect_too() -> None:
    port = free_port()
    url = f"http://{HOST}:{port}"
    errors = set()
    for dialect in ("triton", "auto"):
        async with (
            running_gateway(url, upstream={"dialect": dialect}) as gateway,
            gateway.client() as client,
        ):
            for _ in range(2):
                reply = await client.ask(infer_json())
                errors.add((reply.status, reply.error))
            if dialect == "auto":
                # Once the server is there, the next request succeeds.
                async with ScriptedServer(_Server(TRITON), host=HOST, port=port):
                    assert (await client.ask(infer_json())).status == 200
    ((status, error),) = errors
    assert status == 503
    assert error == f"cannot connect to {UPSTREAM}: Connection refused"


async def test_replaced_server_is_detected_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fast_path_requests: list[str]
) -> None:
    """Plans made for the previous server are not used for the next one."""
    monkeypatch.setattr(upstreams, "_DIALECT_RETRY_INTERVAL", 0.01)
    caplog.set_level(logging.INFO)
    async with ScriptedServer(_Server(TRITON)) as server:
        port = server.port
        gateway_ = running_gateway(server.url, upstream=AUTO)
        gateway = await gateway_.__aenter__()
        async with gateway.client() as client:
            for _ in range(2):
                assert (await client.ask(infer_json())).status == 200
                assert (await client.call("POST", f"{VERSIONED}/generate", b"{}")).status == 200
            assert fast_path_requests[-2:] == [INFER, f"{VERSIONED}/generate"]
    fast_path = len(fast_path_requests)
    async with gateway.client() as client:
        assert (await client.ask(infer_json())).status == 503
        async with ScriptedServer(_Server(KSERVE), port=port) as other:
            await until(lambda: _dialect(gateway) == "kserve")
            assert (await client.call("POST", f"{VERSIONED}/generate", b"{}")).status == 501
            assert (await client.call("POST", "/v2/models/m/generate", b"{}")).status == 200
            assert other.requests[-1].head.get("Content-Type") == "application/json"
            assert fast_path_requests[fast_path:] == [INFER]
            assert (await client.ask(infer_json())).status == 200
            assert fast_path_requests[fast_path:] == [INFER] * 2
    await gateway_.__aexit__(None, None, None)
    told = [message for message in caplog.messages if ": dialect " in message]
    assert [message.split()[3] for message in told] == ["triton:", "kserve:"]


async def _refused(client: RawClient, method: str, path: str, body: bytes | None) -> str:
    reply = await client.call(method, VERSIONED + path, body)
    assert reply.status == 501
    return reply.error


async def test_version_is_refused_by_a_server_without_versions(
    fast_path_requests: list[str],
) -> None:
    async with served(_Server(KSERVE), upstream=AUTO) as (server, _gateway, client):
        for method, path, body in [
            ("POST", "/infer", json_request()),
            ("GET", "", None),
            ("GET", "/ready", None),
        ]:
            error = await _refused(client, method, path, body)
            assert error.startswith("upstream 'servers' (kserve) does not support model versions")
            assert error.endswith(f" /v2/models/m{path}")
            assert (await client.call(method, f"/v2/models/m{path}", body)).status == 200
        assert not [target for target in _received(server) if "versions" in target]
        assert (await client.ask(infer_json())).status == 200
        assert fast_path_requests[-1] == INFER
        assert not [target for target in fast_path_requests if "versions" in target]


@pytest.mark.parametrize(("dialect", "sent"), [("json", "application/json"), ("triton", None)])
async def test_body_without_a_content_type_gets_one(dialect: str, sent: str | None) -> None:
    load = "/v2/repository/models/m/load"
    async with served(_Server(None), upstream={"dialect": dialect}) as (server, _gateway, client):
        for data in (request("POST", load, b"{}"), request("POST", "/v2/models/m/generate", b"{}")):
            assert (await client.ask(data)).status == 200
            # The same in two writes, which never takes the fast path.
            await client.send(data[:-1])
            await asyncio.sleep(0)
            await client.send(data[-1:])
            assert (await client.read_response()).status == 200
        typed = request("POST", load, b"{}", {"Content-Type": "text/x"})
        assert (await client.ask(typed)).status == 200
        assert (await client.call("GET", "/v2/models/m/stats")).status == 200
        types = [received.head.get("Content-Type") for received in server.requests]
        assert types == [sent, sent, sent, sent, "text/x", None]
