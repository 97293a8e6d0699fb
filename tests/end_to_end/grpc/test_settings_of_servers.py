"""Trace and log settings reach every server over gRPC, from clients over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from tests.support.gateway import running_gateway
from tests.support.grpc.client import grpc_client
from tests.support.grpc.proto_file import message_class
from tests.support.servers.grpc_server import GrpcServer, grpc_server, respond

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
