import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.accept_queue import last_connections
from gateway.listener.sockets import tcp_sockets, unix_socket


@pytest.fixture(params=["127.0.0.1", "::1", "unix"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """A socket that listens, and does not block."""
    if request.param == "unix":
        sock = unix_socket(str(tmp_path / "s"))
    else:
        try:
            (sock,) = tcp_sockets(request.param, 0)
        except OSError:
            pytest.skip(f"there is no {request.param} here")
    with sock:
        sock.setblocking(False)
        yield sock


def _connect(listening: socket.socket) -> socket.socket:
    client = socket.socket(listening.family)
    client.settimeout(5)
    client.connect(listening.getsockname())
    return client


def test_all_that_wait_are_given(listening: socket.socket) -> None:
    clients = [_connect(listening) for _ in range(3)]
    for number, client in enumerate(clients):
        client.sendall(b"%d" % number)
    accepted = list(last_connections(listening))
    assert len(accepted) == 3
    listening.close()
    for number, (client, connection) in enumerate(zip(clients, accepted, strict=True)):
        with client, connection:
            assert connection.recv(9) == b"%d" % number
            connection.sendall(b"yes")
            connection.shutdown(socket.SHUT_WR)
            assert client.recv(9) == b"yes"
            assert client.recv(9) == b""


def test_there_may_be_none(listening: socket.socket) -> None:
    assert list(last_connections(listening)) == []


def test_nobody_can_connect_from_then_on(listening: socket.socket) -> None:
    with _connect(listening), socket.socket(listening.family) as late:
        (first,) = last_connections(listening)
        late.setblocking(False)
        # Over TCP, the system goes on trying: it has had no answer.
        failed = late.connect_ex(listening.getsockname())
        is_unix = listening.family == socket.AF_UNIX
        assert failed == (errno.ECONNREFUSED if is_unix else errno.EINPROGRESS)
        assert list(last_connections(listening)) == []
        first.close()
