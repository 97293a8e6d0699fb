"""aiohttp's connections, held against servers that do not keep to HTTP."""

from __future__ import annotations

from functools import partial
from typing import cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.tracing import Trace


class Connector(aiohttp.TCPConnector):
    """Keeps connections for ``keep_alive`` seconds, as many as are needed.

    One on which a server has said more than it was asked for is not used again: what it said
    would be taken for the answer to the next request.
    """

    def __init__(self, keep_alive: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keep_alive)
        self._factory = cast("partial[ResponseHandler]", partial(_Connection, loop=self._loop))

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        while (connection := await super()._get(key, traces)) is not None:
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()
        return None


class _Connection(ResponseHandler):
    def data_received(self, data: bytes) -> None:
        """Leave out the body that some servers send in answer to HEAD, Triton for one."""
        if self._skip_payload and not data.startswith(b"HTTP/1.1 1"):
            head, end, body = data.partition(b"\r\n\r\n")
            if body:
                data = head + end
                self.force_close()
        super().data_received(data)

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """Let whoever reads a body know, too, that the connection is broken."""
        super().set_exception(exc, exc_cause or exc)
        if self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(aiohttp.ClientPayloadError(str(exc)), exc)
