"""Requests that would crash a server, or look like its failure, are a 400 of the gateway."""

import json
from contextlib import suppress
from typing import Any

import pytest

from tests.support.gateway import gateway_client, running_gateway, until
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, binary_response, infer_json
from tests.support.servers.scripted_server import Connection, ReceivedRequest, ScriptedServer
from tests.support.servers.served import served

OUTPUTS = [
    {"name": "LABELS", "datatype": "BYTES", "shape": [-1]},
    {"name": "SCORES", "datatype": "FP32", "shape": [-1]},
]
OTHERS = {
    "generate": "/v2/models/m/generate",
    "load": "/v2/repository/models/m/load",
    "other": "/v3/models/m:ask",
}
DEEP = b'{"a":' + b"[" * 64 + b"]" * 64 + b"}"
FLAT = b'{"a":"' + b"[" * 99 + b'","b":[' + b"[]," * 99 + b"0]}"


class Server:
    """A server of one model, whose metadata the test sets."""

    def __init__(self, metadata: bytes) -> None:
        self._metadata = http_response(metadata)
        self.asked: list[ReceivedRequest] = []

    async def play(self, connection: Connection) -> None:
        while True:
            received = await connection.request()
            match received.head.target:
                case "/v2/models/m":
                    await connection.send(self._metadata)
                case "/v2/models/m/config":
                    await connection.send(http_response(status="404 Not Found"))
                case _:
                    self.asked.append(received)
                    await connection.send(binary_response(b"abcd"))


def metadata(outputs: object = OUTPUTS) -> bytes:
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [-1]}]
    return json.dumps({"name": "m", "inputs": inputs, "outputs": outputs}).encode()


def _fields(*outputs: tuple[str, object], shape: int = 1, **parameters: object) -> dict[str, Any]:
    entry = {"name": "IN", "datatype": "FP32", "shape": [shape]}
    listed = [{"name": name, "parameters": {"classification": n}} for name, n in outputs]
    return {"inputs": [entry], "outputs": listed, "parameters": parameters}


def _json(fields: dict[str, Any]) -> bytes:
    entry = fields["inputs"][0]
    inputs = [{**entry, "data": [1.5] * entry["shape"][0]}]
    return request("POST", INFER, json.dumps({**fields, "inputs": inputs}).encode())


def _binary(fields: dict[str, Any]) -> bytes:
    entry = fields["inputs"][0]
    size = 4 * entry["shape"][0]
    sizes = {"parameters": {"binary_data_size": size}}
    header = json.dumps({**fields, "inputs": [{**entry, **sizes}]}).encode()
    return request("POST", INFER, header + bytes(size), {HEADER_LENGTH: str(len(header))})


@pytest.mark.parametrize("form", [_json, _binary], ids=["JSON", "binary"])
async def test_classification_that_the_server_cannot_do_is_refused(form: Any) -> None:
    server = Server(metadata())
    async with ScriptedServer(server.play) as running, gateway_client(running.url) as client:
        for fields, error in (
            (
                _fields(("SCORES", 2), ("LABELS", 2**63)),
                "output 'LABELS' of model 'm' is BYTES, which cannot be classified",
            ),
            (
                _fields(("SCORES", 1), shape=0),
                "output 'SCORES': classification needs elements, and input 'IN' of shape [0] has"
                " none",
            ),
            (
                _fields(priority=-1),
                "the request: priority must be an integer of 0 or more, got -1",
            ),
        ):
            reply = await client.ask(form(fields))
            assert (reply.status, reply.error) == (400, error)
        assert not server.asked
        # The server refuses outputs that the model lacks; 0 requests no classes.
        for outputs in ([("SCORES", 2), ("NONE", 1)], [("LABELS", 0)]):
            assert (await client.ask(form(_fields(*outputs, mine=-1)))).status == 200
        # Fetched once for all of them.
        assert [each.head.target for each in running.requests].count("/v2/models/m") == 1


async def test_classification_of_unknown_outputs_is_refused() -> None:
    server = Server(metadata(None))
    async with ScriptedServer(server.play) as running, gateway_client(running.url) as client:
        reply = await client.ask(_json(_fields(("LABELS", 1))))
        assert reply.status == 501
        assert "does not say what outputs model 'm' has" in reply.error
        assert not server.asked


TOO_DEEP = "the request's JSON is nested deeper than 64"


def _chunked(target: str, *parts: bytes) -> bytes:
    head = {"Host": "x", "Transfer-Encoding": "chunked"}
    return message(f"POST {target} HTTP/1.1", head, chunked(*filter(None, parts)))


@pytest.mark.parametrize("target", OTHERS.values(), ids=OTHERS)
async def test_passthrough_json_nested_too_deep_is_refused(target: str) -> None:
    server = Server(metadata())
    async with ScriptedServer(server.play) as running, gateway_client(running.url) as client:
        for data in (request("POST", target, DEEP), _chunked(target, DEEP)):
            reply = await client.ask(data)
            assert (reply.status, reply.error) == (400, TOO_DEEP)
        for body in (FLAT, b"", b"{", b"x" + DEEP):
            for data in (request("POST", target, body), _chunked(target, body)):
                assert (await client.ask(data)).status == 200
        assert {each.body for each in server.asked} == {FLAT, b"", b"{", b"x" + DEEP}


async def test_large_body_is_cut_before_it_nests_too_deep() -> None:
    body = b'{"a":' * 60_000
    begun = b'{"text_input":"' + b"x" * 300_000 + b'",'

    async def read(connection: Connection) -> None:
        await connection.head()
        with suppress(ConnectionError):
            while part := await connection.reader.read(65536):
                got.extend(part)
        connection.left.set()

    got = bytearray()
    async with ScriptedServer(read) as running, running_gateway(running.url) as gateway:
        async with gateway.client() as client:
            size = {"Content-Length": str(len(begun) + len(body))}
            await client.send(request("POST", OTHERS["generate"], headers=size) + begun)
            await until(lambda: len(got) == len(begun))
            await client.send(body)
            reply = await client.read_response()
        assert (reply.status, reply.error) == (400, TOO_DEEP)
        await (await running.connection()).left.wait()
        assert bytes(got) == begun


async def test_broadcast_nested_too_deep_reaches_no_server() -> None:
    server = Server(metadata())
    async with ScriptedServer(server.play) as one, ScriptedServer(server.play) as two:
        # An endpoint for each, so that all of them are queried.
        async with gateway_client(one.url, two.url, upstream={"model_discovery": True}) as client:
            reply = await client.call("POST", OTHERS["load"], DEEP)
        assert (reply.status, reply.error) == (400, TOO_DEEP)
        assert not [each for each in server.asked if each.body == DEEP]


async def test_head_too_long_for_the_server_is_refused() -> None:
    async with served() as (server, _, client):
        for data, part in (
            (request("GET", "/v2?" + "x" * 8190), "the path and query has 8194 bytes"),
            (infer_json(headers={"X": "x" * 9000}), "header X has 9000 bytes"),
            (
                request("POST", OTHERS["load"], b"", {"X" * 9000: "x"}),
                "the name of a header has 9000",
            ),
        ):
            reply = await client.ask(data)
            assert (reply.status, reply.error[: len(part)]) == (400, part)
        assert not server.requests
        assert (await client.ask(infer_json(headers={"X": "x" * 8000}))).status == 200
