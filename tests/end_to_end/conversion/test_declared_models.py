"""Declared models: requests must match them, and they replace missing metadata."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    binary_response,
    infer_json,
    infer_raw,
)
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


async def test_raw_binary_request_uses_the_declared_metadata() -> None:
    server = Server()
    async with served(server.play, models=MODELS) as (_running, _, client):
        for model in MODELS:
            data = request("POST", f"/v2/models/{model}/infer", bytes(8), {HEADER_LENGTH: "0"})
            assert (await client.ask(data)).status == 200
            (entry,) = server.header["inputs"]
            assert (entry["name"], entry["shape"], entry["datatype"]) == ("IN", [1, 2], "FP32")
        assert (await client.ask(infer_raw(bytes(9)))).status == 400
        assert len(server.asked) == 2


async def test_failing_server_is_not_replaced_by_the_declaration() -> None:
    server = Server(b'{"error":"still loading"}', "503 Service Unavailable")
    async with served(server.play, models=MODELS) as (_running, _, client):
        reply = await client.ask(infer_raw(bytes(8)))
        assert (reply.status, reply.error) == (503, "still loading")
        assert not server.asked


def _data(name: str, datatype: str, *shape: int) -> bytes:
    tensor = {"name": name, "datatype": datatype, "shape": shape, "data": [1] * shape[0] * shape[1]}
    return infer_json(json.dumps({"inputs": [tensor]}).encode())


def _shared(name: str, datatype: str, *shape: int) -> bytes:
    region = {"shared_memory_region": "r"}
    tensor = {"name": name, "datatype": datatype, "shape": shape, "parameters": region}
    return infer_json(json.dumps({"inputs": [tensor]}).encode())


@pytest.mark.parametrize("form", [_data, _shared], ids=["JSON", "shared memory"])
async def test_request_must_match_the_declaration(
    form: Callable[..., bytes], fast_path_requests: list[str]
) -> None:
    server = Server()
    async with served(server.play, models=MODELS) as (running, _, client):
        for _ in range(2):
            assert (await client.ask(form("IN", "FP32", 3, 2))).status == 200
            for data, error in (
                (form("X", "FP32", 3, 2), "model 'm' has no input 'X'; declared: 'IN'"),
                (
                    form("IN", "FP32", 3, 3),
                    "input 'IN' of model 'm' is declared as FP32 [-1, 2], got FP32 [3, 3]",
                ),
            ):
                reply = await client.ask(data)
                assert (reply.status, reply.error) == (400, error)
        # The declaration is enough: nothing else is fetched from the server.
        assert len(running.requests) == len(server.asked) == 2
        assert len(fast_path_requests) == 2
