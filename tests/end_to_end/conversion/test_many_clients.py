"""Many calls at once: each client gets its own response, and those that fail disturb nobody."""

import asyncio

import numpy as np

from tests.support.gateway import RunningGateway, gateway_before
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    binary_header,
    infer_binary,
    infer_json,
    json_request,
)
from tests.support.servers.model_scripts import echo_tensors
from tests.support.servers.scripted_server import Connection

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


async def _stay(gateway: RunningGateway, number: int) -> None:
    async with gateway.client() as client:
        for step in range(ROUNDS):
            target = f"/v2/stay/{number}/{step}"
            assert (await client.call("GET", target)).body == target.encode()


async def _fail(gateway: RunningGateway) -> None:
    async with gateway.client() as client:
        for _ in range(ROUNDS):
            assert (await client.call("POST", "/v2/fail", b"x")).status == 502


async def _leave(gateway: RunningGateway) -> None:
    for step in range(ROUNDS):
        async with gateway.client() as client:
            await client.send(request("POST", "/v2/leave", b"xyz")[: -(step % 3)])
            if step % 2:
                client.reset()


async def test_failing_and_disconnecting_clients_disturb_nobody() -> None:
    async def script(connection: Connection) -> None:
        while "fail" not in (target := (await connection.request()).head.target):
            await asyncio.sleep(0.001)
            await connection.send(http_response(target.encode()))

    async with gateway_before(script) as (_, gateway), asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS // 3):
            for each in (_stay(gateway, number), _fail(gateway), _leave(gateway)):
                tasks.create_task(each)
