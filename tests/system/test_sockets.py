"""Sockets whose peers close, and listening ones that are to be closed."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.listener.sockets import open_tcp_sockets, open_unix_socket
from gateway.system.accept_queue import (
    drain_accept_queue,
    drop_new_connections,
    has_pending_handshakes,
)
from gateway.system.hangups import HangupWatch
from gateway.upstream.http.connection import ServerConnection
from tests.support.checks.descriptors import no_descriptors
from tests.support.doubles.iterations import iterations
from tests.support.doubles.streaming import SERVER
from tests.support.gateway import until
from tests.support.servers.stalled_handshakes import stall_handshakes

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
async def hangups() -> AsyncIterator[HangupWatch]:
    watch = HangupWatch()
    yield watch
    watch.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected sockets: that which is watched, and its peer."""
    ours, peer = socket.socketpair()
    with ours, peer:
        yield ours, peer


class Note:
    """What is called when a peer is gone, and fails if it ``fails``."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: int = 0
        self._fails = fails

    def __call__(self) -> None:
        self.calls += 1
        if self._fails:
            raise ZeroDivisionError


async def test_peer_that_closes_after_unread_bytes_is_noticed(
    hangups: HangupWatch, pair: Pair
) -> None:
    ours, peer = pair
    gone = Note()
    hangups.watch(ours.fileno(), gone)
    peer.send(b"unread")
    await iterations(5)
    assert gone.calls == 0
    peer.close()
    await until(lambda: gone.calls)
    await iterations(5)
    assert gone.calls == 1


async def test_unwatched_peer_is_not_reported(hangups: HangupWatch, pair: Pair) -> None:
    ours, peer = pair
    gone = Note()
    hangups.watch(ours.fileno(), gone)
    hangups.unwatch(ours.fileno(), gone)
    peer.close()
    await iterations(5)
    assert gone.calls == 0


async def test_reused_descriptor_reports_to_its_new_watcher(
    hangups: HangupWatch, pair: Pair
) -> None:
    descriptor = pair[0].detach()
    old_is_gone, new_is_gone = Note(), Note()
    hangups.watch(descriptor, old_is_gone)
    os.close(descriptor)  # without unwatch
    new, new_peer = socket.socketpair()
    with new:
        assert new.fileno() == descriptor
        hangups.watch(descriptor, new_is_gone)
        hangups.unwatch(descriptor, old_is_gone)  # too late
        new_peer.close()
        await until(lambda: new_is_gone.calls)
    assert not old_is_gone.calls


async def test_peers_are_not_watched_without_descriptors(hangups: HangupWatch, pair: Pair) -> None:
    ours, peer = pair
    gone = Note()
    with no_descriptors():
        hangups.watch(ours.fileno(), gone)
    hangups.unwatch(ours.fileno(), gone)
    hangups.watch(ours.fileno(), gone)
    peer.shutdown(socket.SHUT_WR)  # the sending side alone
    await until(lambda: gone.calls)


async def test_callback_that_fails_keeps_no_other_from_being_called(hangups: HangupWatch) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, peer in pairs:
        hangups.watch(ours.fileno(), Note(fails=True))
        peer.close()
    await until(lambda: len(errors) == 3)
    for ours, _ in pairs:
        ours.close()


def _listen(host: str) -> socket.socket:
    try:
        (sock,) = open_tcp_sockets(host, 0)
    except OSError:
        pytest.skip(f"there is no {host} here")
    sock.setblocking(False)
    return sock


@pytest.fixture(params=["127.0.0.1", "::1"])
def over_tcp(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A non-blocking listening socket."""
    with _listen(request.param) as sock:
        yield sock


@pytest.fixture(params=["127.0.0.1", "::1", "unix"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """A listening socket over TCP or Unix."""
    is_unix = request.param == "unix"
    with open_unix_socket(str(tmp_path / "s")) if is_unix else _listen(request.param) as sock:
        sock.setblocking(False)
        yield sock


def _connect(listening: socket.socket) -> socket.socket:
    client = socket.socket(listening.family)
    client.settimeout(5)
    client.connect(listening.getsockname())
    return client


def test_drain_yields_all_queued_connections(listening: socket.socket) -> None:
    clients = [_connect(listening) for _ in range(3)]
    for number, client in enumerate(clients):
        client.sendall(b"%d" % number)
    accepted = list(drain_accept_queue(listening))
    assert len(accepted) == 3
    listening.close()
    for number, (client, connection) in enumerate(zip(clients, accepted, strict=True)):
        with client, connection:
            assert connection.recv(9) == b"%d" % number
            connection.sendall(b"yes")
            connection.shutdown(socket.SHUT_WR)
            assert client.recv(9) == b"yes"
            assert client.recv(9) == b""


def test_new_connections_are_dropped(listening: socket.socket) -> None:
    with _connect(listening), socket.socket(listening.family) as late:
        drop_new_connections(listening)
        assert not has_pending_handshakes(listening)
        (first,) = drain_accept_queue(listening)
        late.setblocking(False)
        # Over TCP the kernel goes on trying, as it got no response.
        failed = late.connect_ex(listening.getsockname())
        is_unix = listening.family == socket.AF_UNIX
        assert failed == (errno.ECONNREFUSED if is_unix else errno.EINPROGRESS)
        assert not has_pending_handshakes(listening)
        assert list(drain_accept_queue(listening)) == []
        first.close()


def test_pending_handshake_is_seen_and_completes(over_tcp: socket.socket) -> None:
    assert not has_pending_handshakes(over_tcp)
    stall_handshakes(over_tcp)
    with _connect(over_tcp) as client:
        assert has_pending_handshakes(over_tcp)
        assert list(drain_accept_queue(over_tcp)) == []
        drop_new_connections(over_tcp)
        client.sendall(b"0")
        end = time.monotonic() + 10
        while has_pending_handshakes(over_tcp):
            assert time.monotonic() < end
            time.sleep(0.005)
        (connection,) = drain_accept_queue(over_tcp)
        over_tcp.close()
        with connection:
            assert connection.recv(9) == b"0"


def test_without_sock_diag_handshakes_are_taken_for_pending(
    over_tcp: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gateway.system.accept_queue._NETLINK_SOCK_DIAG", 31
    )  # no such netlink protocol
    assert has_pending_handshakes(over_tcp)


async def test_memory_of_what_was_written_may_change_once_it_is_sent(pair: Pair) -> None:
    ours, peer = pair
    ours.setblocking(False)
    filled = 0
    with suppress(BlockingIOError):
        while True:
            filled += ours.send(bytes(4096))
    loop, connection, memory = (
        asyncio.get_running_loop(),
        ServerConnection(SERVER),
        bytearray(b"x" * 40_000),
    )
    await loop.create_connection(lambda: connection, sock=ours)
    try:
        connection.write((b"", memoryview(memory)))
        assert not connection.write_blocked  # so few bytes are never waited for
        waiting = asyncio.create_task(connection.wait_until_sent())
        await iterations(5)
        assert not waiting.done()
        received = b""
        peer.setblocking(False)
        while not waiting.done():
            received += await loop.sock_recv(peer, 4096)
        memory[:] = bytes(len(memory))
        while len(received) < filled + len(memory):
            received += await loop.sock_recv(peer, 2**20)
        assert received[filled:] == b"x" * len(memory)
    finally:
        connection.transport.abort()
