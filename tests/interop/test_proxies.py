"""Other proxies in front of the gateway, and between it and a server."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.servers.proxies import envoy_before, haproxy_before, nginx_before
from gateway.demo.server.server import DemoServer
from tests.interop.programs import Proxy, before
from tests.support.gateway import running_gateway
from tests.support.http_messages import chunked, message, request
from tests.support.inference_messages import HEADER_LENGTH, binary_part
from tests.support.raw_client import connect

TARGET = "/v2/models/identity_fp32/infer"
PROXIES = [envoy_before, haproxy_before, nginx_before]
in_front_of_each_proxy = pytest.mark.parametrize("proxy", PROXIES, ids=lambda run: run.__name__)


def json_body(count: int) -> bytes:
    data = ",".join(["0.5"] * count)
    return (
        f'{{"inputs":[{{"name":"INPUT0","datatype":"FP32","shape":[{count}],"data":[{data}]}}]}}'
    ).encode()


def binary_header(size: int) -> bytes:
    fields = {"inputs": [binary_part(size, "INPUT0")], "parameters": {"binary_data_output": True}}
    return json.dumps(fields).encode()


async def check_each_encoding(url: str) -> None:
    """Infer in each encoding, over one connection."""
    tensors = np.full(300_000, 0.5, "<f4").tobytes()
    header = binary_header(len(tensors))
    async with connect(url) as client:
        for count in (16, 100_000):
            reply = await client.call("POST", TARGET, json_body(count))
            assert reply.json["outputs"][0]["data"] == [0.5] * count
        length = {HEADER_LENGTH: str(len(header))}
        reply = await client.ask(request("POST", TARGET, header + tensors, length))
        assert reply.body.endswith(tensors)
        pieces = chunked(header, tensors[:1000], tensors[1000:])
        head = {"Host": "gateway", "Transfer-Encoding": "chunked", **length}
        reply = await client.ask(message(f"POST {TARGET} HTTP/1.1", head, pieces))
        assert reply.body.endswith(tensors)
        assert (await client.call("GET", "/v2/models/none")).status == 404


@in_front_of_each_proxy
async def test_clients_of_a_proxy_before_the_gateway_get_their_tensors(proxy: Proxy) -> None:
    async with DemoServer() as server, running_gateway(server.url) as gateway:
        with before(proxy, gateway.url) as url:
            await check_each_encoding(url)


@in_front_of_each_proxy
async def test_the_gateway_gets_its_tensors_through_a_proxy(proxy: Proxy) -> None:
    async with DemoServer() as server:
        with before(proxy, server.url) as url:
            async with running_gateway(url) as gateway:
                await check_each_encoding(gateway.url)
