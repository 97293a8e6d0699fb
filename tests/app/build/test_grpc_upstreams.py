from __future__ import annotations

from pathlib import Path

import pytest

from gateway.upstream.http2.endpoint import Http2Endpoint
from tests.support.certificates import ca_file
from tests.support.gateway import no_leaks, running_gateway
from tests.support.http_messages import request
from tests.support.servers.http2_server import answering, http2_tls
from tests.support.servers.scripted_server import ScriptedServer


@pytest.mark.parametrize("with_tls", [False, True])
async def test_upstream_with_grpc_endpoints_speaks_http2(tmp_path: Path, with_tls: bool) -> None:
    """It counts as a Triton without being asked: the only request is the client's."""
    upstream = {"dialect": "auto", "tls": {"ca": ca_file(tmp_path)} if with_tls else None}
    server = ScriptedServer(answering(b"{}"), ssl=http2_tls() if with_tls else None)
    async with no_leaks(), server:
        url = server.url.replace("http", "grpc")
        async with running_gateway(url, upstream=upstream) as running, running.client() as client:
            upstreams = running.gateway.upstreams["servers"]
            (endpoint,) = upstreams.pool.endpoints
            assert isinstance(endpoint, Http2Endpoint)
            assert upstreams.dialect.name == "triton"
            response = await client.ask(request("GET", "/v2/models/m/stats"))
            assert (response.status, response.body) == (200, b"{}")
        assert len(server.connections) == 1


async def test_grpc_upstream_follows_its_host_name() -> None:
    async with no_leaks(), ScriptedServer(answering(b"{}")) as server:
        upstream = {"dialect": "auto", "dns_refresh": "10s"}
        url = f"grpc://localhost:{server.port}"
        async with running_gateway(url, upstream=upstream) as running, running.client() as client:
            urls = [each.url for each in running.gateway.upstreams["servers"].pool.endpoints]
            assert f"{url} (127.0.0.1)" in urls
            assert (await client.ask(request("GET", "/v2/models/m/stats"))).status == 200
