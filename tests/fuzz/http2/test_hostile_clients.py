"""Whatever HTTP/2 clients send, nothing is left of them in the gateway, and others are served."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuzz.broken_bytes import rounds
from tests.fuzz.http2.hostile_clients import HostileClient, hostile_client
from tests.support.certificates import certificate_files, client_context, server_certificate
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection

pytestmark = pytest.mark.usefixtures("clean")

_CLIENTS = 8
"""Hostile clients at a time."""
_READING = 0.02
"""Seconds for which a client reads what comes."""
_INNOCENT = "/v2/innocent"
_NO_RESPONSE, _LARGE_RESPONSE = "/v2/models/m/infer", "/v2/x"


async def _serve(connection: Connection) -> None:
    """Respond to the innocent; let others wait, or give them more than they may read."""
    while True:
        target = (await connection.request()).head.target
        connection.requests.clear()
        if target == _NO_RESPONSE:
            await connection.wait_for_close()
            return
        await connection.send(http_response(b"x" * (300_000 if target == _LARGE_RESPONSE else 10)))


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_nothing_is_left_of_hostile_clients(scheme: str, tmp_path: Path) -> None:
    tls = None
    if scheme == "https":
        certificate, key = certificate_files(tmp_path, server_certificate())
        tls = {"certificate": certificate, "key": key}
    async with gateway_before(_serve, tls=tls, max_buffered_bytes="2MiB") as (_, gateway):
        for chance in rounds(6):
            clients = [hostile_client(chance) for _ in range(_CLIENTS)]
            await asyncio.gather(*(_run(gateway, each) for each in clients))
            await gateway.remains.until_nothing()
            if not chance.randrange(8):
                await _call_as_innocent(gateway)
        await _call_as_innocent(gateway)


async def _run(gateway: RunningGateway, hostile: HostileClient) -> None:
    """Connect, send all, perhaps read, and leave."""
    tls = client_context()
    tls.set_alpn_protocols(["h2"])
    async with connect(gateway.url, tls) as client:
        with suppress(ConnectionError):  # the gateway may have had enough
            for piece in hostile.pieces:
                await client.send(piece)
            if hostile.reads:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_READING):
                        while await client.reader.read(2**16):
                            pass
        if hostile.resets:
            client.reset()


async def _call_as_innocent(gateway: RunningGateway) -> None:
    async with connect(gateway.url) as client:
        assert (await client.call("GET", _INNOCENT)).status == 200
    async with connect_http2(gateway.url) as http2_client:
        assert (await http2_client.call("GET", _INNOCENT)).status == 200
