"""Many calls at once, in every encoding: each client gets its own response."""

import asyncio
import json

import numpy as np

from gateway.demo.server.server import DemoServer
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import HEADER_LENGTH
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.scripted_server import Connection, ScriptedServer

CLIENTS = 24
ROUNDS = 8
IDENTITY = "/v2/models/identity_fp32/infer"


def _entry(values: np.ndarray, **more: object) -> dict[str, object]:
    return {"name": "INPUT0", "datatype": "FP32", "shape": list(values.shape), **more}


async def _json(client: RawClient, values: np.ndarray) -> np.ndarray:
    body = json.dumps({"inputs": [_entry(values, data=values.tolist())]}).encode()
    reply = await client.call("POST", IDENTITY, body)
    return np.array(reply.json["outputs"][0]["data"], "<f4")


async def _binary(client: RawClient, values: np.ndarray) -> np.ndarray:
    entry = _entry(values, parameters={"binary_data_size": values.nbytes})
    fields = {"inputs": [entry], "parameters": {"binary_data_output": True}}
    header = json.dumps(fields).encode()
    body = header + values.tobytes()
    return _tensor(await client.call("POST", IDENTITY, body, {HEADER_LENGTH: str(len(header))}))


async def _json_for_binary(client: RawClient, values: np.ndarray) -> np.ndarray:
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    fields = {"inputs": [_entry(values, data=values.tolist())], "outputs": outputs}
    return _tensor(await client.call("POST", IDENTITY, json.dumps(fields).encode()))


async def _raw(client: RawClient, values: np.ndarray) -> np.ndarray:
    return _tensor(await client.call("POST", IDENTITY, values.tobytes(), {HEADER_LENGTH: "0"}))


def _tensor(reply: ReceivedResponse) -> np.ndarray:
    size = int(reply.head.get(HEADER_LENGTH) or 0)
    assert size
    return np.frombuffer(reply.body[size:], "<f4")


async def test_every_client_gets_its_own_numbers_back() -> None:
    ways = (_json, _binary, _json_for_binary, _raw)

    async def run(number: int) -> None:
        rng = np.random.default_rng(number)
        async with gateway.client() as client:
            for step in range(ROUNDS):
                size = int(rng.integers(1, 20)) * 10 ** int(rng.integers(0, 4))
                values = rng.random(size, dtype="<f4")
                got = await ways[(number + step) % len(ways)](client, values)
                assert np.array_equal(got, values)

    async with DemoServer() as server, running_gateway(server.url) as gateway:
        await asyncio.gather(*map(run, range(CLIENTS)))
        assert gateway.outstanding == 0


async def _keep_connection(gateway: RunningGateway, number: int) -> None:
    async with gateway.client() as client:
        for step in range(ROUNDS):
            reply = await client.call("GET", f"/v2/stay/{number}/{step}")
            assert reply.body == f"/v2/stay/{number}/{step}".encode()


async def _fail(gateway: RunningGateway, number: int) -> None:
    async with gateway.client() as client:
        for _ in range(ROUNDS):
            reply = await client.call("POST", f"/v2/fail/{number}", b"x")
            assert reply.status == 502


async def _leave(gateway: RunningGateway, number: int) -> None:
    for step in range(ROUNDS):
        async with gateway.client() as client:
            await client.send(request("POST", f"/v2/leave/{number}", b"xyz")[: -(step % 3)])
            if step % 2:
                client.reset()


async def test_failing_and_disconnecting_clients_disturb_nobody() -> None:
    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            if "fail" in received.head.target:
                return
            await asyncio.sleep(0.001)
            await connection.send(http_response(received.head.target.encode()))

    async with ScriptedServer(script) as server, running_gateway(server.url) as gateway:
        some = range(CLIENTS // 3)
        await asyncio.gather(
            *(_keep_connection(gateway, number) for number in some),
            *(_fail(gateway, number) for number in some),
            *(_leave(gateway, number) for number in some),
        )
