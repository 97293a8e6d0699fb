"""Requests that are invalid, would crash a server, or look like its failure: a 400 that says why.

No server sees them. The unit tests of the codec and of tests/protocol have all that is invalid.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.support.gateway import gateway_client, running_gateway, served, until
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_part,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
)
from tests.support.servers.model_scripts import model_script
from tests.support.servers.scripted_server import Connection, ScriptedServer

TWO = binary_header(8)
GENERATE, LOAD = "/v2/models/m/generate", "/v2/repository/models/m/load"


def _chunked(target: str, *parts: bytes, length: int | None = None) -> bytes:
    headers = {"Host": "x", "Transfer-Encoding": "chunked"}
    if length is not None:
        headers[HEADER_LENGTH] = str(length)
    return message(f"POST {target} HTTP/1.1", headers, chunked(*filter(None, parts)))


BAD = {
    "does not fit": (infer_json(json_request().replace(b"-2.0", b'"x"')), "element 1"),
    "length beyond the body": (
        request("POST", INFER, TWO + bytes(8), {HEADER_LENGTH: str(len(TWO) + 9)}),
        f"{len(TWO) + 9}",
    ),
    "tensors too short": (infer_binary(TWO, bytes(7)), "add up to 8"),
    "tensors too long": (infer_binary(TWO, bytes(9)), "9 bytes follow"),
    "tensors too long, in one chunk more": (
        _chunked(INFER, TWO, bytes(8), bytes(1), length=len(TWO)),
        "longer than its inference header",
    ),
    "header too long for servers": (infer_json(headers={"X": "x" * 9000}), "header X has 9000"),
}


@pytest.mark.parametrize(("data", "culprit"), BAD.values(), ids=BAD)
async def test_invalid_request_is_a_400_that_names_the_element(data: bytes, culprit: str) -> None:
    async with served() as (server, _, client):
        for _ in range(2):
            reply = await client.ask(data)
            assert reply.status == 400
            assert culprit in reply.error
        # The connection can still be used.
        assert (await client.ask(infer_json(headers={"X": "x" * 8000}))).status == 200
        assert len(server.requests) == 1


async def test_request_shorter_than_its_length_reaches_no_server() -> None:
    for data in (infer_json(), infer_binary(TWO, bytes(8)), request("POST", "/v2/x", bytes(99))):
        async with served() as (server, gateway, client):
            await client.send(data[:-1])
            await until(lambda: gateway.gateway.listener.requests)
            await client.close()
            await gateway.until_idle()
        assert server.requests == []


# -------------------------------------------------------------- parameters, and the model's outputs


def _described(*outputs: dict[str, Any]) -> bytes:
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [-1]}]
    return http_response(json.dumps({"name": "m", "inputs": inputs, "outputs": outputs}).encode())


OUTPUTS: tuple[dict[str, Any], ...] = (
    {"name": "LABELS", "datatype": "BYTES", "shape": [-1]},
    {"name": "SCORES", "datatype": "FP32", "shape": [-1]},
)


def _asking(form: str, *outputs: tuple[str, int], shape: int = 1, **parameters: object) -> bytes:
    """Write a request that wants outputs with so many classes."""
    tensor = {**binary_part(4 * shape), "shape": [shape]}
    if form == "JSON":
        tensor |= {"parameters": {}, "data": [1.5] * shape}
    listed = [{"name": name, "parameters": {"classification": n}} for name, n in outputs]
    fields = {"inputs": [tensor], "outputs": listed, "parameters": parameters}
    text = json.dumps(fields).encode()
    return infer_json(text) if form == "JSON" else infer_binary(text, bytes(4 * shape))


@pytest.mark.parametrize("form", ["JSON", "binary"])
async def test_what_the_server_cannot_do_is_refused(form: str) -> None:
    async with served(model_script(described=_described(*OUTPUTS))) as (server, _, client):
        for data, error in (
            (
                _asking(form, ("SCORES", 2), ("LABELS", 2**63)),
                "output 'LABELS' of model 'm' is BYTES, which cannot be classified",
            ),
            (
                _asking(form, ("SCORES", 1), shape=0),
                "output 'SCORES': classification needs elements, and input 'IN' of shape [0] has"
                " none",
            ),
            (
                _asking(form, priority=-1),
                "the request: priority must be an integer of 0 or more, got -1",
            ),
        ):
            reply = await client.ask(data)
            assert (reply.status, reply.error) == (400, error)
        # The server refuses outputs that the model lacks; 0 requests no classes.
        for outputs in ([("SCORES", 2), ("NONE", 1)], [("LABELS", 0)]):
            assert (await client.ask(_asking(form, *outputs, mine=-1))).status == 200
        # Metadata is fetched once for all of them.
        targets = [each.head.target for each in server.requests]
        assert (targets.count("/v2/models/m"), targets.count(INFER)) == (1, 2)
    async with served(model_script(described=_described())) as (server, _, client):
        reply = await client.ask(_asking(form, ("LABELS", 1)))
        assert reply.status == 501
        assert "does not say what outputs model 'm' has" in reply.error
        assert INFER not in [each.head.target for each in server.requests]


# ---------------------------------------------------------------------------------- declared models

MODELS = {
    "m": {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 2]}]},
    "batched": {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2]}], "max_batch_size": 3},
}


async def test_raw_binary_request_uses_the_declared_metadata() -> None:
    silent = http_response(b'{"name":"m","inputs":[],"outputs":[]}')
    async with served(model_script(described=silent), models=MODELS) as (server, _, client):
        for model in MODELS:
            raw = infer_raw(bytes(8)).replace(b"models/m/", f"models/{model}/".encode())
            assert (await client.ask(raw)).status == 200
            body = server.requests[-1].body
            (entry,) = json.loads(body[:-8])["inputs"]
            assert (entry["name"], entry["shape"], entry["datatype"]) == ("IN", [1, 2], "FP32")
        assert (await client.ask(infer_raw(bytes(9)))).status == 400
    loading = http_response(b'{"error":"still loading"}', status="503 Service Unavailable")
    async with served(model_script(described=loading), models=MODELS) as (_, _, client):
        reply = await client.ask(infer_raw(bytes(8)))
        assert (reply.status, reply.error) == (503, "still loading")


def _data(name: str, *shape: int) -> bytes:
    tensor = {"name": name, "datatype": "FP32", "shape": shape, "data": [1] * shape[0] * shape[1]}
    return infer_json(json.dumps({"inputs": [tensor]}).encode())


def _shared(name: str, *shape: int) -> bytes:
    region = {"shared_memory_region": "r"}
    tensor = {"name": name, "datatype": "FP32", "shape": shape, "parameters": region}
    return infer_json(json.dumps({"inputs": [tensor]}).encode())


@pytest.mark.parametrize("form", [_data, _shared], ids=["JSON", "shared memory"])
async def test_request_must_match_the_declaration(
    form: Callable[..., bytes], fast_path_requests: list[str]
) -> None:
    declared = "input 'IN' of model 'm' is declared as FP32 [-1, 2], got FP32 [3, 3]"
    async with served(model_script(), models=MODELS) as (server, _, client):
        for _ in range(2):
            assert (await client.ask(form("IN", 3, 2))).status == 200
            for data, error in (
                (form("X", 3, 2), "model 'm' has no input 'X'; declared: 'IN'"),
                (form("IN", 3, 3), declared),
            ):
                reply = await client.ask(data)
                assert (reply.status, reply.error) == (400, error)
        # The declaration is enough: nothing else is fetched from the server.
        assert len(server.requests) == len(fast_path_requests) == 2


# -------------------------------------------------------------------------- nesting of other bodies

TOO_DEEP = "the request's JSON is nested deeper than 64"
DEEP = b'{"a":' + b"[" * 64 + b"]" * 64 + b"}"
FLAT = b'{"a":"' + b"[" * 99 + b'","b":[' + b"[]," * 99 + b"0]}"


@pytest.mark.parametrize("target", [GENERATE, LOAD, "/v3/models/m:ask"])
async def test_passthrough_json_nested_too_deep_is_refused(target: str) -> None:
    async with served() as (server, _, client):
        for data in (request("POST", target, DEEP), _chunked(target, DEEP)):
            reply = await client.ask(data)
            assert (reply.status, reply.error) == (400, TOO_DEEP)
        bodies = (FLAT, b"", b"x" + DEEP)
        for body in bodies:
            for data in (request("POST", target, body), _chunked(target, body)):
                assert (await client.ask(data)).status == 200
        assert {each.body for each in server.requests} == {*bodies}


async def test_large_body_is_cut_before_it_nests_too_deep() -> None:
    body = b'{"a":' * 60_000
    begun = b'{"text_input":"' + b"x" * 300_000 + b'",'
    got = bytearray()

    async def read(connection: Connection) -> None:
        await connection.head()
        with suppress(ConnectionError):
            while part := await connection.reader.read(65536):
                got.extend(part)
        connection.left.set()

    async with ScriptedServer(read) as server, running_gateway(server.url) as gateway:
        async with gateway.client() as client:
            size = {"Content-Length": str(len(begun) + len(body))}
            await client.send(request("POST", GENERATE, headers=size) + begun)
            await until(lambda: len(got) == len(begun))
            await client.send(body)
            reply = await client.read_response()
        assert (reply.status, reply.error) == (400, TOO_DEEP)
        await (await server.connection()).left.wait()
        assert bytes(got) == begun


async def test_broadcast_nested_too_deep_reaches_no_server() -> None:
    async with ScriptedServer() as one, ScriptedServer() as two:
        async with gateway_client(one.url, two.url) as client:
            reply = await client.call("POST", LOAD, DEEP)
        assert (reply.status, reply.error) == (400, TOO_DEEP)
        assert not one.requests + two.requests
