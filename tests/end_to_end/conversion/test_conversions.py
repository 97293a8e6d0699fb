"""Clients of V2 and V1 get their own numbers back, whatever form their server speaks."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from gateway.app.build import upstreams
from gateway.demo.server.server import DemoServer
from tests.support.gateway import (
    RunningGateway,
    gateway_before,
    gateway_client,
    running_gateway,
    served,
    until,
)
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.servers.model_scripts import echo_json, echo_tensors, infer_floats, model_script
from tests.support.servers.scripted_server import Connection, ScriptedServer

JSON_ONLY = {"dialect": "json"}
TEXT = [b"", "é".encode(), b'"\\']
SIZES = {"small": 3, "large": 20_000}


def _tensors(count: int) -> dict[str, tuple[str, bytes, list[Any]]]:
    """Return inputs by name: their datatypes, bytes and elements in JSON."""
    rng = np.random.default_rng(count)
    floats = rng.standard_normal(count).astype("<f4")
    integers = rng.integers(-(2**63), 2**63 - 1, count).astype("<i8")
    truths = rng.integers(0, 2, count).astype("?")
    texts = (TEXT * count)[:count]
    packed = b"".join(len(x).to_bytes(4, "little") + x for x in texts)
    return {
        "IN0": ("FP32", floats.tobytes(), [float(str(x)) for x in floats]),
        "IN1": ("INT64", integers.tobytes(), integers.tolist()),
        "IN2": ("BYTES", packed, [x.decode() for x in texts]),
        "IN3": ("BOOL", truths.tobytes(), truths.tolist()),
    }


def _request(count: int, binary: set[str], wanted: dict[str, bool], *, by: int = 0) -> bytes:
    """Return a request with some binary inputs; ``by`` is the size of its chunks, if any."""
    inputs, tail = [], b""
    for name, (datatype, data, elements) in _tensors(count).items():
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [count]}
        if name in binary:
            entry["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            entry["data"] = elements
        inputs.append(entry)
    outputs = [{"name": name, "parameters": {"binary_data": it}} for name, it in wanted.items()]
    header = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    headers = {HEADER_LENGTH: str(len(header))} if binary else {}
    body = header + tail
    if not by:
        return request("POST", INFER, body, headers)
    pieces = chunked(*(body[i : i + by] for i in range(0, len(body), by)))
    head = {**headers, "Host": "x", "Transfer-Encoding": "chunked"}
    return message(f"POST {INFER} HTTP/1.1", head, pieces)


IN = {"json": set[str](), "binary": {"IN0", "IN1", "IN2", "IN3"}, "mixed": {"IN1", "IN2"}}
NAMES = ("OUT0", "OUT1", "OUT2", "OUT3")
ALL, NONE = dict.fromkeys(NAMES, True), dict.fromkeys(NAMES, False)
SOME = {**NONE, "OUT0": True, "OUT2": True}
ROUND_TRIPS = [
    *((inputs, wanted, "small") for inputs in IN for wanted in (ALL, SOME)),
    *(("json", ALL, "large"), ("binary", NONE, "large"), ("mixed", SOME, "large")),
]


@pytest.mark.parametrize(("inputs", "wanted", "size"), ROUND_TRIPS)
async def test_every_encoding_round_trips(inputs: str, wanted: dict[str, bool], size: str) -> None:
    count = SIZES[size]
    async with served(echo_json, upstream=JSON_ONLY) as (server, _, client):
        for by in (0, 50_000):
            reply = await client.ask(_request(count, IN[inputs], wanted, by=by))
            assert reply.status == 200, reply.body
            end = int(reply.head.get(HEADER_LENGTH) or len(reply.body))
            tail = reply.body[end:]
            for entry in json.loads(reply.body[:end])["outputs"]:
                _, data, elements = _tensors(count)[entry["name"].replace("OUT", "IN")]
                if wanted[entry["name"]]:
                    assert "data" not in entry
                    assert tail.startswith(data)
                    tail = tail[len(data) :]
                else:
                    assert entry["data"] == elements
            assert not tail
        # Large requests are never buffered as text, so that their length is unknown.
        (first, second) = server.requests
        assert first.body == second.body
        assert (first.head.get("Transfer-Encoding") == "chunked") is (size == "large")


CLIENTS = 24
ROUNDS = 8


async def test_every_client_gets_its_own_numbers_back() -> None:
    async with gateway_before(echo_tensors) as (_, gateway), asyncio.TaskGroup() as tasks:

        async def run(number: int) -> None:
            rng = np.random.default_rng(number)
            async with gateway.client() as client:
                for step in range(ROUNDS):
                    size = int(rng.integers(1, 20)) * 10 ** int(rng.integers(0, 4))
                    values = rng.random(size, dtype="<f4")
                    if (number + step) % 2:
                        reply = await client.ask(infer_json(json_request(*values.tolist())))
                        got = np.array(reply.json["outputs"][0]["data"], "<f4")
                    else:
                        header = binary_header(values.nbytes, binary_output=True)
                        reply = await client.ask(infer_binary(header, values.tobytes()))
                        end = int(reply.head.get(HEADER_LENGTH) or 0)
                        got = np.frombuffer(reply.body[end:], "<f4")
                    assert np.array_equal(got, values)

        for number in range(CLIENTS):
            tasks.create_task(run(number))


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
