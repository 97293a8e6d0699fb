"""Other proxies of gRPC in front of the gateway, and between it and a server."""

from __future__ import annotations

from functools import partial
from urllib.parse import urlsplit

import pytest

from benchmarks.servers.proxies import envoy_before, haproxy_grpc_before, nginx_grpc_before
from tests.interop.grpc.peer_server import calls_by_grpcio, peer_server
from tests.interop.proxy_before import Proxy, before
from tests.support.gateway import running_gateway

ENVOY = partial(envoy_before, http2=True)
in_front_of_each_proxy = pytest.mark.parametrize(
    "proxy", [ENVOY, haproxy_grpc_before, nginx_grpc_before], ids=["envoy", "haproxy", "nginx"]
)


@in_front_of_each_proxy
async def test_clients_of_a_proxy_before_the_gateway(proxy: Proxy) -> None:
    async with peer_server() as server, running_gateway(server.url) as gateway:
        with before(proxy, gateway.url) as url:
            await server.check(await calls_by_grpcio(url))


@in_front_of_each_proxy
async def test_clients_of_the_gateway_before_a_proxy(proxy: Proxy) -> None:
    async with peer_server() as server:
        with before(proxy, server.url) as url:
            async with running_gateway(f"grpc://{urlsplit(url).netloc}") as gateway:
                await server.check(await calls_by_grpcio(gateway.url))
