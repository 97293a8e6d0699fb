"""Whatever a gRPC server sends, each client gets an end, and nothing is left of it.

Other upstreams are served meanwhile, and a server that behaves again is, too.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest

from gateway.protocol.grpc.framing import frame
from tests.fuzz.http2.malicious_server import MaliciousPlay
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import Headers, connect_http2
from tests.support.http_messages import request
from tests.support.inference_messages import infer_json
from tests.support.scale import fuzz_seconds
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import Connection, ScriptedServer

pytestmark = pytest.mark.usefixtures("clean")

GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
_LONG = ("x-long", "l" * 3000)
_CLIENTS = 6


def _body(model: bytes) -> bytes:
    message = field(1, model)
    return frame(len(message)) + message


async def _serve(peer: Http2Peer) -> None:
    for number in itertools.count():
        stream = await peer.request(number)
        head = [("content-type", "application/grpc")]
        await peer.respond(stream, frame(0), head, [("grpc-status", "0")])


async def _grpc(gateway: RunningGateway, method: str, model: bytes, headers: Headers) -> str:
    """Make a call; return its status, which must be one that all clients read alike."""
    async with connect_http2(gateway.url) as client:
        path = f"/{SERVICE}/{method}"
        reply = await client.call("POST", path, _body(model), [*GRPC, *headers])
    if reply.reset is not None:
        return "reset"
    if reply.status != 200:
        return f"HTTP {reply.status}"
    fields = [*reply.headers, *reply.trailers]
    statuses = [value for name, value in fields if name == "grpc-status"]
    assert statuses, reply
    assert all(str(int(status)) == status for status in statuses), reply
    return statuses[-1]


async def _http(gateway: RunningGateway, data: bytes) -> str:
    async with gateway.client() as client:
        return f"HTTP {(await client.ask(data)).status}"


async def _ask(gateway: RunningGateway, chance: random.Random) -> str:
    match chance.randrange(7):
        case 0 | 1:
            return await _grpc(gateway, "ModelInfer", b"m", ())
        case 2:
            return await _grpc(gateway, "ModelInfer", b"m", (_LONG,))
        case 3:
            return await _grpc(gateway, "ModelStreamInfer", b"m", ())
        case 4:
            deadline = ("grpc-timeout", f"{chance.choice([1, 20, 200])}m")
            return await _grpc(gateway, "ModelInfer", b"m", (deadline,))
        case 5:
            return await _http(gateway, infer_json())
        case _:
            return await _http(gateway, request("GET", "/v2/models/m/ready"))


async def test_whatever_a_grpc_server_sends_ends_its_calls_and_leaves_nothing() -> None:
    end = time.monotonic() + fuzz_seconds(4)
    seeds = itertools.count()
    is_malicious = True
    ends: list[str] = []

    async def script(connection: Connection) -> None:
        if is_malicious:
            await MaliciousPlay(connection, random.Random(next(seeds))).run()
        else:
            await http2_script(_serve)(connection)

    async with (
        ScriptedServer(script) as server,
        ScriptedServer(http2_script(_serve)) as innocent,
        running_gateway(
            server.url.replace("http://", "grpc://"),
            upstream={"outlier_detection": {"consecutive_failures": 0}},
            others={
                "innocent": {
                    "endpoints": [innocent.url.replace("http://", "grpc://")],
                    "dialect": "triton",
                }
            },
            general={
                "routes": [
                    {"match": {"model": "innocent"}, "upstream": "innocent"},
                    {"upstream": "servers", "limits": {"request_timeout": 0.3}},
                ]
            },
        ) as gateway,
    ):

        async def ask(seed: int) -> None:
            chance = random.Random(f"client {seed}")
            while time.monotonic() < end:
                ends.append(await _ask(gateway, chance))
                assert await _grpc(gateway, "ModelInfer", b"innocent", ()) == "0"

        await asyncio.gather(*(ask(seed) for seed in range(_CLIENTS)))
        is_malicious = False
        await gateway.until_idle()
        await until(lambda: gateway.gateway.buffered_bytes == 0)
        # What is left of malicious connections is replaced.
        for _ in range(40):
            if await _grpc(gateway, "ModelInfer", b"m", ()) == "0":
                break
        else:
            raise AssertionError("a server that behaves again got no calls")
        await gateway.until_idle()
        assert gateway.gateway.buffered_bytes == 0
    assert len(ends) > _CLIENTS
