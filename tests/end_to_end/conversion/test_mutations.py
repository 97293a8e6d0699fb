"""Valid messages with random mutations: the gateway never fails."""

import asyncio
import random

import pytest

from tests.support.gateway import RunningGateway, running_gateway
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    metadata,
)
from tests.support.servers.scripted_server import Connection, ScriptedServer

SEEDS = 40

# On one loop only: these tests wait.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

REQUESTS = [
    infer_json(),
    infer_json(b'{"inputs":[{"name":"B","shape":[2],"datatype":"BYTES","data":["a","\\u00e4"]}]}'),
    infer_binary(binary_header(12), FLOATS.tobytes()),
    infer_raw(bytes(8)),
    message(
        f"POST {INFER} HTTP/1.1",
        {"Host": "x", "Transfer-Encoding": "chunked", HEADER_LENGTH: str(len(binary_header(12)))},
        chunked(binary_header(12), FLOATS.tobytes()),
    ),
    request("GET", "/v2"),
    request("POST", "/v2/models/m/trace", b"{}"),
]
ANSWERS = [
    binary_response(FLOATS.tobytes()),
    binary_response(FLOATS.tobytes(), FLOATS.tobytes()),
    message(
        "HTTP/1.1 200 OK",
        {"Transfer-Encoding": "chunked"},
        chunk(b'{"outputs":[]}') + chunk(b""),
    ),
    http_response(b'{"name":"triton","outputs":[]}'),
]


def _broken(chance: random.Random, data: bytes) -> bytes:
    """Change, drop, repeat or insert some bytes."""
    mutated = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(mutated))
        end = min(len(mutated), at + chance.choice((1, 1, 2, 10)))
        odd = bytes(chance.choices(b'\r\n\0":{}[],.-09a\xff ', k=chance.choice((1, 2))))
        mutated[at:end] = chance.choice((odd, b"", mutated[at:end] * 2, odd + mutated[at:end]))
    return bytes(mutated)


async def _statuses(gateway: RunningGateway, data: bytes) -> list[int]:
    """Send a request; return the statuses of the responses."""
    async with gateway.client() as client:
        client.send_nowait(data)
        statuses = []
        try:
            async with asyncio.timeout(0.3):
                while True:
                    statuses.append((await client.read_response()).status)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionResetError):
            return statuses


async def _script(connection: Connection) -> None:
    while True:
        target = (await connection.request()).head.target
        if target.endswith("/infer"):
            await connection.send(binary_response(FLOATS.tobytes()))
        else:
            await connection.send(http_response(metadata(-1)))


@pytest.mark.parametrize("number", range(len(REQUESTS)))
async def test_mutated_request_breaks_nothing(number: int) -> None:
    chance = random.Random(number)
    broken = [_broken(chance, REQUESTS[number]) for _ in range(SEEDS)]
    async with (
        ScriptedServer(_script) as server,
        running_gateway(server.url, idle_timeout=0.1) as gateway,
    ):
        outcomes = await asyncio.gather(*(_statuses(gateway, data) for data in broken))
        for data, statuses in zip(broken, outcomes, strict=True):
            assert 500 not in statuses, data
        assert (await _statuses(gateway, REQUESTS[number]))[0] == 200


@pytest.mark.parametrize("number", range(len(ANSWERS)))
async def test_mutated_response_breaks_nothing(number: int) -> None:
    chance = random.Random(number)
    broken = [_broken(chance, ANSWERS[number]) for _ in range(SEEDS)]

    async def script(connection: Connection) -> None:
        target = (await connection.request()).head.target
        if target != "/v2" and not target.endswith("/infer"):
            await connection.send(http_response(metadata(-1)))
        elif broken:
            await connection.send(broken.pop())
        else:
            await connection.send(ANSWERS[number])

    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url, idle_timeout=0.1) as gateway,
    ):
        all_broken = tuple(broken)
        while broken:
            asked = [chance.choice((infer_json(), request("GET", "/v2"))) for _ in broken]
            outcomes = await asyncio.gather(*(_statuses(gateway, data) for data in asked))
            assert not [statuses for statuses in outcomes if 500 in statuses], all_broken
        assert (await _statuses(gateway, infer_json()))[0] == 200
