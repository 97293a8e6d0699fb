"""Declared models: requests must match them, and they replace missing metadata."""

import json
from typing import Any

import pytest

from tests.support.http_messages import http_response, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, binary_response, infer_raw
from tests.support.servers.scripted_server import Connection, ReceivedRequest
from tests.support.servers.served import served

MODELS = {
    "m": {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 2]}]},
    "batched": {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2]}], "max_batch_size": 3},
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
    ("metadata", "status"), [(SILENT, "200 OK"), (b'{"error":"unknown"}', "404 Not Found")]
)
async def test_raw_binary_request_uses_the_declared_metadata(metadata: bytes, status: str) -> None:
    server = Server(metadata, status)
    async with served(server.play, models=MODELS) as (_running, _, client):
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
    async with served(server.play, models=MODELS) as (_running, _, client):
        reply = await client.ask(infer_raw(bytes(8)))
        assert (reply.status, reply.error) == (503, "still loading")
        assert not server.asked


def _entry(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _json(entry: dict[str, Any]) -> bytes:
    data = [1] * (entry["shape"][0] * entry["shape"][-1])
    return request("POST", INFER, json.dumps({"inputs": [{**entry, "data": data}]}).encode())


def _shared(entry: dict[str, Any]) -> bytes:
    fields = {"inputs": [{**entry, "parameters": {"shared_memory_region": "r"}}]}
    return request("POST", INFER, json.dumps(fields).encode())


FORMS = {"json": _json, "shared memory": _shared}


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
    async with served(server.play, models=MODELS) as (running, _, client):
        for _ in range(2):
            assert (await client.ask(form(_entry("IN", "FP32", 3, 2)))).status == 200
            for message, entry in wrong.items():
                reply = await client.ask(form(entry))
                assert (reply.status, reply.error) == (400, message)
        # The declaration is enough: nothing else is fetched from the server.
        assert len(running.requests) == len(server.asked) == 2


async def test_valid_request_takes_the_fast_path(fast_path_requests: list[str]) -> None:
    server = Server()
    async with served(server.play, models=MODELS) as (_running, _, client):
        for rows in (1, 1, 2):
            assert (await client.ask(_json(_entry("IN", "FP32", rows, 2)))).status == 200
        assert (await client.ask(_json(_entry("IN", "FP32", 2, 9)))).status == 400
        assert fast_path_requests == [INFER] * 3
