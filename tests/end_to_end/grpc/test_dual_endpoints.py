"""Servers with two addresses: inference takes the faster protocol, all else HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.certificates import ca_file, server_certificate, server_context
from tests.support.checks.fast_path import fast_path_requests as fast_path_requests
from tests.support.gateway import RunningGateway, gateway_client, running_gateway, until
from tests.support.grpc.client import GrpcClient, grpc_client
from tests.support.grpc.proto_file import infer_request
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import FLOATS, binary_response, infer_json, metadata
from tests.support.raw_client import RawClient
from tests.support.servers.grpc_server import GrpcServer, grpc_server
from tests.support.servers.scripted_server import Connection, ScriptedServer

SERVER = b'{"name": "kserve", "version": "0.15.0", "extensions": []}'


async def _http_side(connection: Connection) -> None:
    """Respond as a server with one model m, in binary form."""
    while True:
        head = (await connection.request()).head
        bodies = {"/v2": SERVER, "/v2/models/m": metadata(-1), "/v2/health/ready": b""}
        if head.target == "/v2/models/m/infer":
            await connection.send(binary_response(FLOATS.tobytes()))
        elif head.target in bodies:
            await connection.send(http_response(bodies[head.target]))
        else:
            error = b'{"error":"not known over HTTP"}'
            await connection.send(http_response(error, status="404 Not Found"))


@asynccontextmanager
async def _running(
    over_grpc: GrpcServer, dialect: str = "kserve", **upstream: Any
) -> AsyncIterator[tuple[ScriptedServer, RunningGateway, RawClient, GrpcClient]]:
    """Run a gateway in front of a server with both addresses, and connect to it."""
    async with ScriptedServer(_http_side) as http:
        endpoints = [{"http": http.url, "grpc": over_grpc.url}]
        settings = {"endpoints": endpoints, "dialect": dialect, **upstream}
        async with (
            running_gateway(upstream=settings) as gateway,
            gateway.client() as client,
            grpc_client(gateway.url) as calls,
        ):
            yield http, gateway, client, calls


def _targets(server: ScriptedServer) -> list[str]:
    return [each.head.target for each in server.requests]


def _methods(server: GrpcServer) -> list[str]:
    return [path.rpartition("/")[2] for path in server.paths]


@pytest.mark.parametrize(
    ("dialect", "setting", "over_grpc"),
    [("triton", "auto", False), ("kserve", "auto", True), ("triton", "grpc", True)],
)
async def test_inference_takes_the_faster_protocol_of_the_dialect_unless_it_is_set(
    server: GrpcServer,
    dialect: str,
    setting: str,
    over_grpc: bool,
    fast_path_requests: list[str],
) -> None:
    get = request("GET", "/v2/models/m")
    async with _running(server, dialect, inference_protocol=setting) as (http, gateway, client, _):
        for _ in range(2):
            response = await client.ask(infer_json())
            assert response.json["outputs"][0]["data"] == pytest.approx(FLOATS.tolist())
            assert (await client.ask(get)).status == 200
        (upstream,) = gateway.gateway.status()["upstreams"].values()
    assert upstream["inference_protocol"]["name"] == ("grpc" if over_grpc else "http")
    assert _methods(server) == ["ModelInfer"] * 2 * over_grpc
    infer = "/v2/models/m/infer"
    assert _targets(http).count(infer) == 2 * (not over_grpc)
    # The fast path declines only inference over gRPC.
    assert fast_path_requests.count(infer) == 2 * (not over_grpc)
    assert "/v2/models/m" in fast_path_requests


async def test_dialect_is_detected_over_http_and_the_choice_is_told(
    server: GrpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorgate.upstream")
    async with _running(server, dialect="auto") as (http, gateway, client, _):
        assert (await client.ask(infer_json())).status == 200
        (upstream,) = gateway.gateway.status()["upstreams"].values()
    assert (_targets(http), _methods(server)) == (["/v2"], ["ModelInfer"])
    why = "dialect kserve is faster over gRPC"
    assert upstream["inference_protocol"] == {"name": "grpc", "reason": why}
    (endpoint,) = upstream["endpoints"]
    assert (endpoint.url, endpoint.grpc_url) == (http.url, server.url)
    (line,) = (message for message in caplog.messages if "dialect" in message)
    assert line.startswith("upstream servers: dialect kserve: ")
    assert line.endswith(f"; inference over gRPC: {why}")


async def test_calls_of_grpc_clients_pass_through_whatever_the_setting(server: GrpcServer) -> None:
    async with _running(server, "triton", inference_protocol="http") as (http, _, _, client):
        sent = infer_request(typed=True)
        unary = await client.call("ModelInfer", sent)
        stream = await client.call("ModelStreamInfer", sent, sent)
        ready = await client.call("ServerReady", b"")
    assert (unary.code, len(stream.messages)) == (grpc.StatusCode.OK, 2)
    assert _methods(server) == ["ModelInfer", "ModelStreamInfer"]
    # An operation of all servers goes over HTTP.
    assert ready.code is grpc.StatusCode.OK
    assert _targets(http) == ["/v2/health/ready"]


async def test_all_else_goes_over_http_even_where_only_grpc_would_know_it(
    server: GrpcServer,
) -> None:
    async with _running(server, "triton", inference_protocol="grpc") as (http, _, client, _):
        for target in ("/v2/models/m/generate", "/v2/repository/index"):
            await client.call("POST", target, b"{}")
    assert len(http.requests) == 2
    assert not server.paths


async def test_health_checks_and_discovery_go_over_http(server: GrpcServer) -> None:
    settings: dict[str, Any] = {"health_check": {"interval": "10ms"}, "model_discovery": True}
    async with _running(server, **settings) as (http, gateway, _, _):
        await until(lambda: gateway.pool.any_healthy)
        await until(lambda: "/v2/repository/index" in _targets(http))
    assert not server.paths


async def test_late_server_is_named_by_its_grpc_address(server: GrpcServer) -> None:
    def hang(data: bytes, context: grpc.ServicerContext) -> bytes:
        server.cancelled.wait(5)
        return b""

    server.unary["ModelInfer"] = hang
    async with ScriptedServer(_http_side) as http:
        upstream = {"endpoints": [{"http": http.url, "grpc": server.url}], "dialect": "kserve"}
        async with (
            running_gateway(upstream=upstream, request_timeout=0.2) as gateway,
            gateway.client() as client,
        ):
            response = await client.ask(infer_json())
            (state,) = gateway.pool.snapshot()
        server.cancelled.set()
    assert response.status == 504
    assert server.url in (state.last_error or "")


async def test_both_addresses_may_use_tls(server: GrpcServer, tmp_path: Path) -> None:
    leaf = server_certificate()
    pair = (leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials([pair])
    with grpc_server(credentials=credentials) as secure:
        context = server_context()
        context.set_alpn_protocols(["h2", "http/1.1"])  # it would take HTTP/2
        async with ScriptedServer(_http_side, ssl=context) as http:
            upstream = {
                "endpoints": [{"http": http.url, "grpc": secure.url}],
                "dialect": "kserve",
                "tls": {"ca": str(ca_file(tmp_path))},
            }
            async with gateway_client(upstream=upstream) as client:
                assert (await client.ask(request("GET", "/v2/models/m"))).status == 200
                assert (await client.ask(infer_json())).status == 200
    assert _targets(http) == ["/v2/models/m"]
    assert _methods(secure) == ["ModelInfer"]
