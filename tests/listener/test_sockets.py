import os
import socket
from pathlib import Path

import pytest

from gateway.listener.sockets import tcp_sockets, unix_socket
from tests.support.addresses import HOST, free_port


def test_one_address() -> None:
    (sock,) = tcp_sockets("127.0.0.1", 0)
    with sock:
        host, port = sock.getsockname()
        assert host == "127.0.0.1"
        assert port > 0


def test_a_port_of_ones_own_choice() -> None:
    port = free_port()
    (sock,) = tcp_sockets(HOST, port)
    with sock:
        assert sock.getsockname()[1] == port


def test_every_address_of_a_host_gets_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 0)) for n in (1, 2, 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    sockets = tcp_sockets("somewhere", 0)
    names = [sock.getsockname() for sock in sockets]
    for sock in sockets:
        sock.close()
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({name[1] for name in names}) == 1


def test_ipv6() -> None:
    try:
        (sock,) = tcp_sockets("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with sock:
        assert sock.getsockname()[0] == "::1"
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            tcp_sockets("127.0.0.1", taken.getsockname()[1])


def test_none_is_kept_where_one_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
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
        tcp_sockets("somewhere", 0)
    assert [sock.fileno() for sock in made] == [-1, -1]


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(OSError, match=r".") as caught:
        tcp_sockets("no-such-host.invalid", 0)
    assert caught.value.strerror


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with unix_socket(path) as sock:
        assert sock.getsockname() == path


def test_one_that_a_process_left_behind_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    unix_socket(path).close()
    assert os.path.exists(path)
    with unix_socket(path) as sock:
        sock.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_one_in_use_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with unix_socket(path) as sock:
        sock.listen()
        with pytest.raises(OSError, match=f"{path} is in use by another process"):
            unix_socket(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
    with pytest.raises(OSError, match="exists and is no socket"):
        unix_socket(str(path))
    assert path.exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unix_socket(str(tmp_path / "none" / "s"))
