"""A server whose responses wait until the test lets them go."""

from __future__ import annotations

import asyncio

from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection


class GatedResponse:
    """The script of a server that responds to each request once ``may_respond`` is set."""

    def __init__(self, body: bytes = b"") -> None:
        self.may_respond = asyncio.Event()
        self._response = http_response(body)

    async def __call__(self, connection: Connection) -> None:
        while True:
            await connection.request()
            await self.may_respond.wait()
            await connection.send(self._response)
