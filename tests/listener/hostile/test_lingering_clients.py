"""What refused clients still send is read in turns, and no way of closing leaves a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import bad_request
from gateway.http2.frames import PREFACE
from gateway.listener.connection import ClientConnection
from gateway.listener.server import HttpListener
from gateway.listener.tls import ReloadingTlsContext, TlsFiles
from gateway.listener.tls_transport import ClientTlsTransport
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.http1.fake_transport import FakeTransport
from tests.listener.running_listener import read_body
from tests.support.certificates import certificate_files, server_certificate
from tests.support.gateway import until
from tests.support.http_messages import request

UPLOAD = request("POST", "/", bytes(10_000_000))
HEAD = UPLOAD[:200]


class _Socket(FakeTransport):
    """The transport of a socket that can close its sending side, if it has no ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.protocol: Any = None
        """The connection that it serves."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append("write_eof")

    def close(self) -> None:
        self.calls.append("close")

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read."""
        flow = [call for call in self.calls if call in ("pause", "resume")]
        return bool(flow) and flow[-1] == "pause"


async def _refuse(_: ClientRequest, __: ClientResponse) -> None:
    raise bad_request("not wanted")


async def _wait(client: ClientRequest, _: ClientResponse) -> None:
    await read_body(client)


def _connect(listener: HttpListener, socket: _Socket) -> None:
    connection = socket.protocol = ClientConnection(listener)
    connection.connection_made(socket)


def _receive(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """Read data from the socket."""
    space = protocol.get_buffer(-1)
    assert isinstance(space, memoryview)
    size = min(len(space), len(data))
    space[:size] = data[:size]
    protocol.buffer_updated(size)


async def _read_in_turns(sockets: list[_Socket], receive: Callable[[int], None]) -> None:
    """Check that sockets that always have data are read from in turns."""
    for number in range(len(sockets)):
        receive(number)
    assert all(socket.is_paused for socket in sockets)
    for _ in range(3 * len(sockets)):
        await asyncio.sleep(0)
        readable = [number for number, socket in enumerate(sockets) if not socket.is_paused]
        assert len(readable) <= 1
        for number in readable:
            receive(number)
    reads = [socket.calls.count("resume") for socket in sockets]
    assert max(reads) - min(reads) <= 1
    assert min(reads) >= 2


REFUSED: dict[str, tuple[Any, bytes]] = {
    "an early response": (_refuse, HEAD),
    "an early response that is the last": (
        _refuse,
        HEAD.replace(b"\r\n", b"\r\nConnection: close\r\n", 1),
    ),
    "a head that is malformed": (_wait, b"GET / HTTP/1.1\r\n: x\r\n\r\n"),
    "a connection that breaks HTTP/2": (_wait, PREFACE + bytes(9)),
}


@pytest.mark.parametrize(("handle", "start"), REFUSED.values(), ids=REFUSED)
async def test_rest_of_what_refused_clients_send_is_read_in_turns(
    handle: Any, start: bytes
) -> None:
    listener = HttpListener(handle, ())
    sockets = [_Socket() for _ in range(4)]
    for socket in sockets:
        _connect(listener, socket)
        _receive(socket.protocol, start)
    await until(lambda: all(socket.writes for socket in sockets) and not listener._active_calls)
    await _read_in_turns(sockets, lambda number: _receive(sockets[number].protocol, bytes(100_000)))
    for socket in sockets:
        socket.protocol.connection_lost(None)
    assert listener.connections == 0
    await listener.drain(0)


async def test_rest_of_what_refused_clients_send_over_tls_is_read_in_turns(tmp_path: Any) -> None:
    files = TlsFiles(*certificate_files(tmp_path, server_certificate()))
    listener = HttpListener(_wait, ())
    listener.tls = ReloadingTlsContext(files)
    sockets = [_Socket() for _ in range(4)]
    transports = []
    for socket in sockets:
        transport = listener._make_protocol(False, ReloadingTlsContext(files))
        assert isinstance(transport, ClientTlsTransport)
        transport.connection_made(socket)
        _receive(transport, b"GET / HTTP/1.1\r\n\r\n")  # it must speak TLS
        assert socket.calls[-1] == "close"
        transports.append(transport)
    await _read_in_turns(sockets, lambda number: _receive(transports[number], bytes(100_000)))
    for transport in transports:
        transport.connection_lost(None)
    await listener.drain(0)


ERRORS = {
    "a client that is gone": ConnectionResetError(),
    "a handle that is closed": RuntimeError("unable to perform operation; the handler is closed"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("start", [HEAD.replace(b"10000000", b"x"), PREFACE + bytes(9)])
async def test_connection_that_cannot_close_its_sending_side_is_aborted(
    error: Exception, start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    listener = HttpListener(_refuse, ())
    socket = _Socket(error)
    _connect(listener, socket)
    _receive(socket.protocol, start)
    await until(lambda: "abort" in socket.calls)
    socket.protocol.connection_lost(None)
    assert listener.connections == 0
    assert not caplog.messages
    await listener.drain(0)
