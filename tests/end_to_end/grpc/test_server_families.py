"""What server families do in their own way over gRPC, also beside an HTTP address."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.certificates import ca_file, server_certificate, server_context
from tests.support.checks.fast_path import fast_path_requests as fast_path_requests
from tests.support.gateway import UPSTREAM, RunningGateway, gateway_client, running_gateway, until
from tests.support.grpc.client import GrpcClient, grpc_client, grpc_client_of
from tests.support.grpc.proto_file import infer_request, message_class
from tests.support.http_messages import http_response, request, with_long_head
from tests.support.inference_messages import FLOATS, binary_response, infer_json, metadata
from tests.support.raw_client import RawClient
from tests.support.servers.grpc_server import GrpcServer, grpc_server, infer_identity, respond
from tests.support.servers.scripted_server import Connection, ScriptedServer

TORCHSERVE = "/org.pytorch.serve.grpc.openinference.GRPCInferenceService"

MLSERVER = respond("ServerMetadataResponse", name="mlserver", version="1.7.1")
KSERVE = respond("ServerMetadataResponse", name="kserve", version="0.21.0")


def stream_bare(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
    """Respond to a stream as MLServer does."""
    for message in requests:
        yield infer_identity(message, context)


async def test_stream_of_mlserver_has_the_messages_of_triton() -> None:
    values = np.arange(250_000, dtype="<f4").tobytes()
    sent = infer_request(values=values), infer_request()
    mlserver = {"ServerMetadata": MLSERVER}
    with grpc_server(unary=mlserver, streams={"ModelStreamInfer": stream_bare}) as server:
        async with grpc_client_of(server.url, upstream={"dialect": "auto"}) as client:
            response = await client.call(
                "ModelStreamInfer", *sent, compression=grpc.Compression.Gzip
            )
    assert response.code is grpc.StatusCode.OK, response.text
    read = map(message_class("ModelStreamInferResponse").FromString, response.messages)
    tensors = [each.infer_response.raw_output_contents for each in read]
    assert tensors == [[values], [FLOATS.tobytes()]]


@pytest.mark.parametrize("rpc", ["RepositoryModelLoad", "RepositoryModelUnload"])
async def test_kserve_gets_the_model_to_load_in_its_own_field(rpc: str) -> None:
    sent: list[bytes] = []

    def load(data: bytes, _context: grpc.ServicerContext) -> bytes:
        sent.append(data)
        return b"\n\x01m\x10\x01"

    with grpc_server(unary={"ServerMetadata": KSERVE, rpc: load}) as server:
        async with (
            running_gateway(server.url, upstream={"dialect": "auto"}) as gateway,
            grpc_client(gateway.url) as client,
            gateway.client() as http_client,
        ):
            loading = message_class(f"{rpc}Request")(model_name="m").SerializeToString()
            response = await client.call(rpc, loading)
            action = rpc.removeprefix("RepositoryModel").lower()
            over_http = await http_client.ask(
                request("POST", f"/v2/repository/models/m/{action}", b"{}")
            )
    assert response.code is grpc.StatusCode.OK, response.text
    assert sent == [b"\n\x01m"] * 2
    assert json.loads(over_http.body) == {"name": "m", action: True}


_READY = respond("ServerReadyResponse", ready=True)


async def test_torchserve_has_a_service_of_its_own_and_gets_typed_contents() -> None:
    methods = {f"{TORCHSERVE}/ModelInfer": infer_identity, f"{TORCHSERVE}/ServerReady": _READY}
    with grpc_server(unary=methods) as server:
        async with (
            running_gateway(server.url, upstream={"dialect": "torchserve"}) as gateway,
            grpc_client(gateway.url) as client,
            gateway.client() as http_client,
        ):
            response = await client.call("ModelInfer", infer_request())
            entry = {"name": "IN", "datatype": "FP32", "shape": [3], "data": [1.5, -2.0, 3e30]}
            body = json.dumps({"inputs": [entry]}).encode()
            over_http = await http_client.ask(infer_json(body))
            ready = await http_client.ask(request("GET", "/v2/models/m/ready"))
    assert {path.rpartition("/")[0] for path in server.paths} == {TORCHSERVE}
    requests = [message_class("ModelInferRequest").FromString(each) for each in server.requests[:2]]
    assert [list(each.inputs[0].contents.fp32_contents) for each in requests] == [
        FLOATS.tolist(),
        FLOATS.tolist(),
    ]
    assert not any(each.raw_input_contents for each in requests)
    read = message_class("ModelInferResponse").FromString(response.message)
    assert read.raw_output_contents == [FLOATS.tobytes()]
    assert json.loads(over_http.body)["outputs"] == [{**entry, "name": "OUT"}]
    assert ready.status == 501


TRITON = respond(
    "ServerMetadataResponse",
    name="triton",
    version="2.51.0",
    extensions=["binary_tensor_data", "trace", "logging"],
)


class Settings:
    """The trace and log settings of a server."""

    def __init__(self) -> None:
        self.trace = {"trace_rate": ["1000"], "trace_level": ["TIMESTAMPS"]}
        self.log_verbose_level = 0

    def trace_setting(self, data: bytes, _context: grpc.ServicerContext) -> bytes:
        asked = message_class("TraceSettingRequest").FromString(data)
        self.trace |= {name: list(value.value) for name, value in asked.settings.items()}
        response = message_class("TraceSettingResponse")()
        for name, values in self.trace.items():
            response.settings[name].value.extend(values)
        return bytes(response.SerializeToString(deterministic=True))

    def log_settings(self, data: bytes, _context: grpc.ServicerContext) -> bytes:
        asked = message_class("LogSettingsRequest").FromString(data)
        if "log_verbose_level" in asked.settings:
            self.log_verbose_level = asked.settings["log_verbose_level"].uint32_param
        response = message_class("LogSettingsResponse")()
        response.settings["log_verbose_level"].uint32_param = self.log_verbose_level
        return bytes(response.SerializeToString())


@contextmanager
def settings_server() -> Iterator[tuple[GrpcServer, Settings]]:
    settings = Settings()
    methods = {
        "ServerMetadata": TRITON,
        "TraceSetting": settings.trace_setting,
        "LogSettings": settings.log_settings,
    }
    with grpc_server(unary=methods) as server:
        yield server, settings


async def test_change_reaches_all_servers() -> None:
    """From a client over HTTP, and then from one over gRPC."""
    asked = message_class("TraceSettingRequest")(model_name="m")
    asked.settings["trace_rate"].value.append("8")
    log = message_class("LogSettingsRequest")()
    log.settings["log_verbose_level"].uint32_param = 2
    levels = {"trace_level": ["TIMESTAMPS"]}
    with settings_server() as (one, first), settings_server() as (two, second):
        async with (
            running_gateway(one.url, two.url, upstream={"dialect": "auto"}) as gateway,
            gateway.client() as http_client,
            grpc_client(gateway.url) as client,
        ):
            for path in ("/v2/trace", "/v2/models/m/trace"):
                changed = await http_client.call("POST", path, b'{"trace_rate": "7"}')
                assert changed.json == {"trace_rate": "7", **levels}
                assert (await http_client.call("GET", path)).json == changed.json
            level = b'{"log_verbose_level":1}'
            assert (await http_client.call("POST", "/v2/logging", level)).body == level
            assert first.trace == second.trace == {"trace_rate": ["7"], **levels}
            assert first.log_verbose_level == second.log_verbose_level == 1

            response = await client.call("TraceSetting", asked.SerializeToString())
            told = message_class("TraceSettingResponse").FromString(response.message)
            assert list(told.settings["trace_rate"].value) == ["8"]
            response = await client.call("LogSettings", log.SerializeToString())
            told = message_class("LogSettingsResponse").FromString(response.message)
            assert told.settings["log_verbose_level"].uint32_param == 2
    assert first.trace == second.trace == {"trace_rate": ["8"], **levels}
    assert first.log_verbose_level == second.log_verbose_level == 2


async def test_server_without_the_extension_is_named_by_its_upstream() -> None:
    kserve = respond("ServerMetadataResponse", name="kserve", version="0.21.0")
    with grpc_server(unary={"ServerMetadata": kserve}) as server:
        async with (
            running_gateway(server.url, upstream={"dialect": "auto"}) as gateway,
            grpc_client(gateway.url) as client,
            gateway.client() as http_client,
        ):
            lacking = "upstream 'servers' (kserve) lacks the trace extension"
            for rpc, path, text in (
                ("TraceSetting", "/v2/trace", lacking),
                ("LogSettings", "/v2/logging", "upstream 'servers' does not serve LogSettings"),
            ):
                called = await client.call(rpc, b"")
                over_http = await http_client.call("GET", path)
                assert called.code is grpc.StatusCode.UNIMPLEMENTED
                assert (over_http.status, over_http.error) == (501, called.text)
                assert text in called.text


ONLY_HTTP2 = (
    f"{UPSTREAM} responded in HTTP/2 to a request in HTTP/1.1; the address of a gRPC server "
    "begins with grpc://"
)
ONLY_HTTP1 = (
    f"cannot connect to {UPSTREAM}: it responded in HTTP/1.1; the address of a server that speaks "
    "HTTP/1.1 begins with http:// or https://"
)


@pytest.mark.parametrize("path", [bytes, with_long_head], ids=["fast", "streaming"])
async def test_grpc_server_at_an_http_address(path: type[bytes], server: GrpcServer) -> None:
    url = server.url.replace("grpc:", "http:")
    async with gateway_client(url) as client:
        for _ in range(3):
            response = await client.ask(path(request("GET", "/v2/models/m")))
            assert (response.status, response.error) == (502, ONLY_HTTP2)


async def says_http1(connection: Connection) -> None:
    """Respond to the preface of HTTP/2 as a server of HTTP/1.1."""
    await connection.head()
    await connection.send(http_response(status="400 Bad Request"))


async def test_http_server_at_a_grpc_address() -> None:
    async with (
        ScriptedServer(says_http1) as server,
        running_gateway(server.url.replace("http:", "grpc:")) as gateway,
        grpc_client(gateway.url) as client,
        gateway.client() as http_client,
    ):
        called = await client.call("ModelInfer", b"\n\1m")
        response = await http_client.ask(request("GET", "/v2/models/m"))
    assert (called.code, called.text) == (grpc.StatusCode.UNAVAILABLE, ONLY_HTTP1)
    assert (response.status, response.error) == (503, ONLY_HTTP1)


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
