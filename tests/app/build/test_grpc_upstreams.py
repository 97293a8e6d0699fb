from __future__ import annotations

from pathlib import Path

import pytest

from gateway.upstream.grpc.endpoint import GrpcEndpoint
from tests.support.certificates import ca_file
from tests.support.gateway import no_leaks, running_gateway
from tests.support.http_messages import request
from tests.support.servers.grpc_server import grpc_server, model_metadata
from tests.support.servers.http2_server import answering, http2_tls
from tests.support.servers.scripted_server import ScriptedServer


@pytest.mark.parametrize("with_tls", [False, True])
async def test_upstream_with_grpc_endpoints_speaks_grpc(tmp_path: Path, with_tls: bool) -> None:
    """The server responds over HTTP/2, with TLS or without, but not in gRPC."""
    upstream = {"dialect": "triton", "tls": {"ca": ca_file(tmp_path)} if with_tls else None}
    server = ScriptedServer(answering(b"{}"), ssl=http2_tls() if with_tls else None)
    async with no_leaks(), server:
        url = server.url.replace("http", "grpc")
        async with running_gateway(url, upstream=upstream) as running, running.client() as client:
            (endpoint,) = running.pool.endpoints
            assert isinstance(endpoint, GrpcEndpoint)
            response = await client.ask(request("GET", "/v2/models/m"))
            assert response.status == 502
            assert b"ended its response without grpc-status" in response.body


async def test_grpc_upstream_follows_its_host_name() -> None:
    with grpc_server(unary={"ModelMetadata": model_metadata("FP32")}) as server:
        upstream = {"dialect": "triton", "dns_refresh": "10s"}
        url = server.url.replace("127.0.0.1", "localhost")
        async with running_gateway(url, upstream=upstream) as running, running.client() as client:
            urls = [each.url for each in running.pool.endpoints]
            assert f"{url} (127.0.0.1)" in urls
            assert (await client.ask(request("GET", "/v2/models/m"))).status == 200
