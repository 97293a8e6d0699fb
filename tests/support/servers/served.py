"""Runs a scripted server, a gateway before it, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.gateway import RunningGateway, gateway_before
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Script, ScriptedServer


@asynccontextmanager
async def served(
    *scripts: Script, **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, RunningGateway, RawClient]]:
    """Run a server with these scripts, a ``running_gateway`` before it, and a client of that."""
    async with (
        gateway_before(*scripts, **settings) as (server, gateway),
        gateway.client() as client,
    ):
        yield server, gateway, client
