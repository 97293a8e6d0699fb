"""Gateways whose settings are replaced while clients are connected."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.app.standalone import StandaloneGateway
from gateway.settings.schema import Settings
from tests.support.addresses import HOST
from tests.support.gateway import LIMITS, checked_gateway, no_leaks
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import ScriptedServer, always_respond

NOWHERE = "http://127.0.0.1:1"


def settings_for(*urls: str, **more: Any) -> Settings:
    limits = {**LIMITS, **more.pop("limits", {})}
    return Settings.model_validate(
        {
            "listen": f"{HOST}:0",
            "offload": 0,
            "upstreams": {"u": {"endpoints": list(urls) or [NOWHERE], "dialect": "triton"}},
            "limits": limits,
            **more,
        }
    )


@asynccontextmanager
async def running_gateway(settings: Settings) -> AsyncIterator[tuple[StandaloneGateway, str]]:
    async with no_leaks(), checked_gateway(settings) as running:
        yield running.gateway, running.url


def server_named(name: str) -> ScriptedServer:
    return ScriptedServer(always_respond(http_response(name.encode())))
