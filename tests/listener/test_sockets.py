import os
import socket
from pathlib import Path

import pytest

from gateway.listener.sockets import open_tcp_sockets, open_unix_socket


def test_all_addresses_of_a_host_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 0)) for n in (1, 2, 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    sockets = open_tcp_sockets("somewhere", 0)
    names = [sock.getsockname() for sock in sockets]
    for sock in sockets:
        sock.close()
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({name[1] for name in names}) == 1


def test_tcp_socket_listens_on_ipv6() -> None:
    try:
        (sock,) = open_tcp_sockets("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with sock:
        assert sock.getsockname()[0] == "::1"
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def test_port_in_use_raises() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            open_tcp_sockets("127.0.0.1", taken.getsockname()[1])


def test_sockets_are_closed_if_one_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class _Socket(socket.socket):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            made.append(self)

    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.1", "8.8.8.8")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", _Socket)
    with pytest.raises(OSError, match="assign"):
        open_tcp_sockets("somewhere", 0)
    assert [sock.fileno() for sock in made] == [-1, -1]


def test_only_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    open_unix_socket(path).close()
    assert os.path.exists(path)
    with open_unix_socket(path) as sock:
        sock.listen()
        with pytest.raises(OSError, match=f"{path} is in use by another process"):
            open_unix_socket(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    (tmp_path / "file").write_text("precious")
    for other in (tmp_path / "file", tmp_path):
        with pytest.raises(OSError, match="exists and is not a socket"):
            open_unix_socket(str(other))
        assert other.exists()
