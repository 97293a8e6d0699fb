"""Hostile TLS clients take a turn's work at a time, and what is held for them is counted."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.listener.client_shares import ClientShares
from gateway.listener.tls import ReloadingTlsContext, TlsFiles
from gateway.listener.tls_transport import ClientTlsTransport
from gateway.system.buffers import BufferAccount
from gateway.system.sockets.connection import Connection
from tests.http1.fake_transport import FakeTransport
from tests.support.certificates import certificate_files, client_context, server_certificate
from tests.support.compiled import needs_source
from tests.support.doubles.iterations import iterations

pytestmark = needs_source

MAX_RECORD = 5 + 2**14 + 256
"""Bytes of a record on the wire: RFC 8446, section 5.2."""
TURN_BYTES = 200
"""In a turn, at most so many records are decrypted."""


class _Recorder(Connection):
    """Records what it receives."""

    def __init__(self, account: BufferAccount) -> None:
        super().__init__(account)
        self.received: list[bytes] = []
        self.pauses = False
        """Whether it pauses reading when it has received something."""

    def data_received(self, data: bytes | memoryview) -> None:
        self.received.append(bytes(data))
        if self.pauses:
            self.read_flow.pause("test")


class _Peer:
    """A TLS client in memory, and the transport that it talks to over a fake socket."""

    def __init__(self, files: TlsFiles) -> None:
        self.account = BufferAccount()
        self.connection = _Recorder(self.account)
        self.handshakes = ClientShares[ClientTlsTransport](10)
        context = ReloadingTlsContext(files).context
        self.transport = ClientTlsTransport(
            context, self.connection, self.handshakes, 60, lambda: None
        )
        self.socket = FakeTransport()
        self.transport.connection_made(self.socket)
        self._to_client, self._to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client_context().wrap_bio(
            self._to_client, self._to_server, server_hostname="127.0.0.1"
        )

    def do_handshake(self) -> None:
        """Complete the handshake."""
        while not self.is_connected():
            self.send(self._to_server.read())

    def is_connected(self) -> bool:
        """Go on with the handshake as far as the gateway's part of it has come."""
        self._to_client.write(b"".join(self.socket.writes))
        self.socket.writes.clear()
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.send(self._to_server.read())
            return True
        return False

    def encrypt(self, *pieces: bytes) -> bytes:
        """Return a record for each piece."""
        for piece in pieces:
            self._tls.write(piece)
        return self._to_server.read()

    def send(self, data: bytes) -> None:
        """Have the gateway read data from the socket, as much as it takes in one read."""
        space = self.transport.get_buffer(-1)
        assert len(data) <= len(space)
        space[: len(data)] = data
        self.transport.buffer_updated(len(data))

    def close(self) -> None:
        """End the connection."""
        self.transport.abort()
        self.transport.connection_lost(None)
        assert (self.account.buffered, self.account.streams) == (0, 0)


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(*certificate_files(tmp_path, server_certificate()))


async def test_records_of_one_byte_are_decrypted_in_many_turns(files: TlsFiles) -> None:
    peer = _Peer(files)
    peer.do_handshake()
    body = bytes(range(250)) * 40
    peer.send(peer.encrypt(*[body[index : index + 1] for index in range(len(body))]))
    received = peer.connection.received
    turns = 0
    while sum(map(len, received)) < len(body):
        assert sum(map(len, received)) <= (turns + 1) * TURN_BYTES
        assert peer.socket.calls[-1] == "pause"  # nothing is read between the turns
        turns += 1
        await iterations(1)
        assert turns < len(body)
    assert b"".join(received) == body
    assert turns >= len(body) // TURN_BYTES
    await iterations(2)
    assert peer.socket.calls[-1] == "resume"
    peer.close()


async def test_turns_of_one_connection_do_not_delay_those_of_others(files: TlsFiles) -> None:
    flooding, other = _Peer(files), _Peer(files)
    for peer in (flooding, other):
        peer.do_handshake()
    flooding.send(flooding.encrypt(*[b"x"] * 10_000))
    other.send(other.encrypt(*[b"x"] * 300))
    await iterations(8)
    assert sum(map(len, other.connection.received)) == 300
    assert sum(map(len, flooding.connection.received)) < 2000
    for peer in (flooding, other):
        peer.close()


async def test_connection_that_pauses_in_a_turn_gets_the_rest_later(files: TlsFiles) -> None:
    peer = _Peer(files)
    peer.do_handshake()
    peer.connection.pauses = True
    peer.send(peer.encrypt(*[b"x"] * 1000))
    await iterations(20)
    assert sum(map(len, peer.connection.received)) <= TURN_BYTES
    assert peer.socket.calls[-1] == "pause"
    peer.connection.pauses = False
    peer.connection.read_flow.resume("test")
    await iterations(20)
    assert sum(map(len, peer.connection.received)) == 1000
    assert peer.socket.calls[-1] == "resume"
    peer.close()


async def test_connection_that_ends_between_its_turns_leaves_nothing(files: TlsFiles) -> None:
    peer = _Peer(files)
    peer.do_handshake()
    peer.send(peer.encrypt(*[b"x"] * 10_000))
    before = sum(map(len, peer.connection.received))
    peer.close()
    await iterations(20)
    assert sum(map(len, peer.connection.received)) == before
    assert peer.socket.calls[-1] == "abort"


# What is held


async def test_bytes_that_wait_to_be_decrypted_are_counted(files: TlsFiles) -> None:
    peer = _Peer(files)
    peer.do_handshake()
    peer.connection.pauses = True
    sent = peer.encrypt(*[b"x"] * 10_000)
    peer.send(sent)
    assert len(sent) - MAX_RECORD - TURN_BYTES * 23 < peer.account.buffered < len(sent)
    peer.connection.pauses = False
    peer.connection.read_flow.resume("test")
    counted = []
    while sum(map(len, peer.connection.received)) < 10_000:
        counted.append(peer.account.buffered)
        await iterations(1)
        assert len(counted) < 1000
    assert counted == sorted(counted, reverse=True)
    assert peer.account.buffered == 0
    peer.close()


async def test_record_whose_rest_is_yet_to_come_is_held_alone(files: TlsFiles) -> None:
    """One for each connection is not counted, like the state of its TLS."""
    peer = _Peer(files)
    peer.do_handshake()
    record = peer.encrypt(bytes(2**14))
    assert len(record) <= MAX_RECORD
    for _ in range(3):
        peer.send(record[:-1])
        assert peer.connection.received == []
        assert peer.account.buffered == 0
        peer.send(record[-1:])
        assert b"".join(peer.connection.received) == bytes(2**14)
        peer.connection.received.clear()
        record = peer.encrypt(bytes(2**14))
    peer.close()


async def test_failed_handshake_leaves_no_counted_bytes(files: TlsFiles) -> None:
    peer = _Peer(files)
    peer.send(b"\x16\x03\x01\x00\x01\x01" * 400)
    await iterations(20)
    peer.close()
    assert len(peer.handshakes) == 0
