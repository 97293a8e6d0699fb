"""Declared models: requests must match them, and they replace missing metadata."""

import json
from typing import Any

import pytest

from tests.support.gateway import gateway_client
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, binary_response, infer_raw
from tests.support.servers.scripted_server import Connection, ReceivedRequest, ScriptedServer

MODELS = {
    "m": {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 2]}]},
    "batched": {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [2]}],
        "max_batch_size": 3,
    },
}
SILENT = b'{"name":"m","inputs":[],"outputs":[]}'


class Server:
    """A server whose model metadata the test sets."""

    def __init__(self, metadata: bytes = SILENT, status: str = "200 OK") -> None:
        self._metadata = http_response(metadata, status=status)
        self.asked: list[ReceivedRequest] = []

    async def play(self, connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.target.endswith("/infer"):
                self.asked.append(received)
                await connection.send(binary_response(b"abcd"))
            elif received.head.target.endswith("/config"):
                await connection.send(http_response(status="404 Not Found"))
            else:
                await connection.send(self._metadata)

    @property
    def header(self) -> Any:
        """The JSON part of the last infer request."""
        last = self.asked[-1]
        return json.loads(last.body[: int(last.head.get(HEADER_LENGTH) or 0)])


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        (SILENT, "200 OK"),
        (b'{"error":"unknown"}', "404 Not Found"),
        (b'{"error":"no"}', "400 Bad Request"),
    ],
)
async def test_raw_binary_request_uses_the_declared_metadata(metadata: bytes, status: str) -> None:
    server = Server(metadata, status)
    async with (
        ScriptedServer(server.play) as running,
        gateway_client(running.url, models=MODELS) as client,
    ):
        for model, shape in (("m", [1, 2]), ("batched", [1, 2])):
            data = request("POST", f"/v2/models/{model}/infer", bytes(8), {HEADER_LENGTH: "0"})
            assert (await client.ask(data)).status == 200
            (entry,) = server.header["inputs"]
            assert (entry["name"], entry["shape"], entry["datatype"]) == ("IN", shape, "FP32")
            assert server.asked[-1].body.endswith(bytes(8))
        assert (await client.ask(infer_raw(bytes(9)))).status == 400
        assert len(server.asked) == 2


async def test_failing_server_is_not_replaced_by_the_declaration() -> None:
    server = Server(b'{"error":"still loading"}', "503 Service Unavailable")
    async with (
        ScriptedServer(server.play) as running,
        gateway_client(running.url, models=MODELS) as client,
    ):
        reply = await client.ask(infer_raw(bytes(8)))
        assert (reply.status, reply.error) == (503, "still loading")
        assert not server.asked


async def test_missing_metadata_is_an_error() -> None:
    server = Server()
    async with ScriptedServer(server.play) as running, gateway_client(running.url) as client:
        reply = await client.ask(infer_raw(bytes(8)))
        assert reply.status == 400
        assert "declare the model in the settings" in reply.error


def _entry(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _json(entry: dict[str, Any]) -> bytes:
    data = [1] * (entry["shape"][0] * entry["shape"][-1])
    return request("POST", INFER, json.dumps({"inputs": [{**entry, "data": data}]}).encode())


def _binary(entry: dict[str, Any]) -> bytes:
    size = (4 if entry["datatype"] == "FP32" else 8) * entry["shape"][0] * entry["shape"][-1]
    fields = {"inputs": [{**entry, "parameters": {"binary_data_size": size}}]}
    header = json.dumps(fields).encode()
    return request("POST", INFER, header + bytes(size), {HEADER_LENGTH: str(len(header))})


def _shared(entry: dict[str, Any]) -> bytes:
    fields = {"inputs": [{**entry, "parameters": {"shared_memory_region": "r"}}]}
    return request("POST", INFER, json.dumps(fields).encode())


FORMS = {"json": _json, "binary": _binary, "shared memory": _shared}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_request_must_match_the_declaration(form: Any) -> None:
    server = Server()
    wrong = {
        "model 'm' has no input 'X'; declared: 'IN'": _entry("X", "FP32", 3, 2),
        "input 'IN' of model 'm' is declared as FP32 [-1, 2], got FP64 [3, 2]": _entry(
            "IN", "FP64", 3, 2
        ),
        "input 'IN' of model 'm' is declared as FP32 [-1, 2], got FP32 [3, 3]": _entry(
            "IN", "FP32", 3, 3
        ),
    }
    async with (
        ScriptedServer(server.play) as running,
        gateway_client(running.url, models=MODELS) as client,
    ):
        for _ in range(2):
            assert (await client.ask(form(_entry("IN", "FP32", 3, 2)))).status == 200
            for message, entry in wrong.items():
                reply = await client.ask(form(entry))
                assert (reply.status, reply.error) == (400, message)
        # The declaration is enough: nothing else is fetched from the server.
        assert len(running.requests) == len(server.asked) == 2


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], [{"IN": [1, 2]}, {"IN": [3, 4]}]])
async def test_predict_request_must_match_the_declaration(rows: list[Any]) -> None:
    """The server's own metadata decides the datatypes."""
    server = Server(b'{"name":"m","inputs":[{"name":"IN","datatype":"FP32","shape":[-1,-1]}]}')
    declared = {
        "m": {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2, 2]}]},
        "other": {"inputs": [{"name": "OTHER", "datatype": "FP32", "shape": [-1, -1]}]},
    }
    wrong = {
        "m": "input 'IN' of model 'm' is declared as FP32 [2, 2], got FP32 [3, 2]",
        "other": "model 'other' has no input 'IN'; declared: 'OTHER'",
    }
    async with (
        ScriptedServer(server.play) as running,
        gateway_client(running.url, models=declared) as client,
    ):
        good = json.dumps({"instances": rows}).encode()
        assert (await client.ask(request("POST", "/v1/models/m:predict", good))).status == 200
        for model, message in wrong.items():
            body = json.dumps({"instances": [*rows, rows[0]]}).encode()
            reply = await client.ask(request("POST", f"/v1/models/{model}:predict", body))
            assert (reply.status, reply.error) == (400, message)
        assert len(server.asked) == 1


async def test_valid_request_takes_the_fast_path(fast_path_requests: list[str]) -> None:
    server = Server()
    async with (
        ScriptedServer(server.play) as running,
        gateway_client(running.url, models=MODELS) as client,
    ):
        for rows in (1, 1, 2):
            assert (await client.ask(_json(_entry("IN", "FP32", rows, 2)))).status == 200
        assert (await client.ask(_json(_entry("IN", "FP32", 2, 9)))).status == 400
        assert fast_path_requests == [INFER] * 3


async def test_model_is_declared_by_its_name_at_the_server() -> None:
    server = Server()
    route = {"rewrite": {"model": "batched"}}
    async with (
        ScriptedServer(server.play) as running,
        gateway_client(running.url, models=MODELS, route=route) as client,
    ):
        for rows, status in ((3, 200), (4, 400)):
            assert (await client.ask(_json(_entry("IN", "FP32", rows, 2)))).status == status
        assert [each.head.target for each in server.asked] == ["/v2/models/batched/infer"]
