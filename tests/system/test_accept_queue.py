import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.listener.sockets import open_tcp_sockets, open_unix_socket
from gateway.system.accept_queue import (
    drain_accept_queue,
    drop_new_connections,
    has_pending_handshakes,
)
from tests.support.servers.stalled_handshakes import stall_handshakes


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
