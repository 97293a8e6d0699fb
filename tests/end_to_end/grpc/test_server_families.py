"""What server families do in their own way over gRPC, and servers that speak another protocol."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from tests.support.gateway import UPSTREAM, gateway_client, running_gateway
from tests.support.grpc.client import grpc_client, grpc_client_of
from tests.support.grpc.proto_file import infer_request, message_class
from tests.support.http_messages import http_response, request, with_long_head
from tests.support.inference_messages import FLOATS, infer_json
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
