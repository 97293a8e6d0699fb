"""A server that runs a script on each connection, down to single bytes and closes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.support.http_messages import Head, http_response, read_body, read_head
from tests.support.peer import Peer

_TURNS = 10
"""Of the event loop, in which a connection that was just accepted comes to its script."""

_LEFT = (asyncio.IncompleteReadError, ConnectionError)


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request, whole."""

    head: Head
    body: bytes


class Connection(Peer):
    """One connection to the server, for its script to play on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.requests: list[ReceivedRequest] = []
        self.left = asyncio.Event()
        """The other side has closed, or reset, the connection."""

    async def head(self) -> Head:
        """Read a request up to its body."""
        return await read_head(self.reader)

    async def request(self) -> ReceivedRequest:
        """Read a whole request."""
        head = await self.head()
        received = ReceivedRequest(head, await read_body(self.reader, head))
        self.requests.append(received)
        return received

    async def send(self, *parts: bytes) -> None:
        """Send bytes, each part on its own; raises ConnectionError if the other side has left."""
        for part in parts:
            if self._writer.is_closing():  # else uvloop raises RuntimeError if the close came first
                raise ConnectionResetError
            self._writer.write(part)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def wait_for_close(self) -> None:
        """Wait until the other side closes; what it still sends is read and forgotten."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.left.set()


Script = Callable[[Connection], Awaitable[None]]


async def never_respond(connection: Connection) -> None:
    """Read and never answer, until the other side leaves."""
    await connection.wait_for_close()


def respond_in_turn(*answers: bytes) -> Script:
    """Make the script that answers the requests of a connection with these, then closes it."""

    async def script(connection: Connection) -> None:
        for data in answers:
            await connection.request()
            await connection.send(data)

    return script


def always_respond(data: bytes) -> Script:
    """Make the script that answers every request with this."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(data)

    return script


class ScriptedServer:
    """Plays the first script on its first connection, and so on; the last on all that follow.

    Without a script, it responds to each request as one that infers, without outputs.
    A connection is closed where its script ends. A script that fails makes the test fail. It
    listens on a port of its own, if none is given, over TLS where ``ssl`` is given, or on the Unix
    socket ``path``.
    """

    def __init__(
        self,
        *scripts: Script,
        ssl: ssl.SSLContext | None = None,
        path: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._scripts = scripts or (always_respond(http_response(b'{"outputs":[]}')),)
        self._ssl = ssl
        self._path = path
        self._host = host
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._changed = asyncio.Condition()
        self.connections: list[Connection] = []
        self.url = ""
        """Its address as http://host:port, https://host:port or unix:/path."""

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        return int(self.url.rpartition(":")[2])

    @property
    def requests(self) -> list[ReceivedRequest]:
        """Return all whole requests, connection by connection."""
        return [received for each in self.connections for received in each.requests]

    async def connection(self, number: int = 0) -> Connection:
        """Wait for a connection, by its number."""
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(lambda: len(self.connections) > number)
        return self.connections[number]

    async def __aenter__(self) -> Self:
        if self._path is not None:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
            self.url = f"unix:{self._path}"
            return self
        # How long a client that was told of the end, and does not answer, is waited for.
        patience = {"ssl_shutdown_timeout": 5} if self._ssl else {}
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, ssl=self._ssl, **patience
        )
        scheme = "https" if self._ssl else "http"
        self.url = "{}://{}:{}".format(scheme, *self._server.sockets[0].getsockname())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        if self._fault is not None:
            raise self._fault

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        script = self._scripts[min(len(self.connections), len(self._scripts) - 1)]
        task = asyncio.create_task(self._play(script, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections.append(connection)

    async def _play(self, script: Script, connection: Connection) -> None:
        try:
            async with self._changed:
                self._changed.notify_all()
            await script(connection)
        except _LEFT:
            connection.left.set()
        except Exception as error:
            self._fault = error
        finally:
            await connection.close()
