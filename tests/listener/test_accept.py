"""Listening sockets, batches of waiting connections, and what happens when accepting fails."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from gateway.listener import accept
from gateway.listener.accept import AcceptingSockets
from gateway.listener.sockets import open_tcp_sockets, open_unix_socket
from tests.support.addresses import HOST
from tests.support.checks.descriptors import no_descriptors
from tests.support.doubles.iterations import iterations
from tests.support.gateway import no_leaks, until

PATIENCE = 5
ERROR = "cannot accept a connection: Too many open files"


class _Batches:
    """Counts the connections that are accepted in each time slice of the event loop."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.accepted = 0
        self._in_slice = False

    def add(self, connection: socket.socket) -> None:
        connection.close()
        self.accepted += 1
        if not self._in_slice:
            self._in_slice = True
            self.sizes.append(0)
            # The callbacks of others run before the next batch, as this one does.
            asyncio.get_running_loop().call_soon(self._end_slice)
        self.sizes[-1] += 1

    def _end_slice(self) -> None:
        self._in_slice = False


@asynccontextmanager
async def _accepting(batches: _Batches, sock: socket.socket) -> AsyncIterator[None]:
    accepting = AcceptingSockets(batches.add)
    accepting.listen(sock)
    async with asyncio.timeout(PATIENCE):
        yield
    accepting.close_sockets([sock])


@contextmanager
def _waiting(sock: socket.socket, count: int) -> Iterator[None]:
    """Have clients wait in the accept queue."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(sock.getsockname()))
        yield


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    (sock,) = open_tcp_sockets(HOST, 0)
    with sock:
        yield sock


async def test_batch_is_bounded(sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "MAX_BATCH", 5)
    batches = _Batches()
    async with _accepting(batches, sock):
        with _waiting(sock, 12):
            await until(lambda: batches.accepted == 12)
        assert batches.sizes == [5, 5, 2]
        monkeypatch.setattr(accept, "MAX_BATCH", 100)
        with _waiting(sock, 30):
            await until(lambda: batches.accepted == 42)
    assert batches.sizes == [5, 5, 2, 30]


async def test_lack_of_descriptors_pauses_accepting(
    sock: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "ERROR_DELAY", 0.2)
    batches = _Batches()
    with _waiting(sock, 3):
        with no_descriptors():
            accepting = AcceptingSockets(batches.add)
            accepting.listen(sock)
            await until(lambda: caplog.messages)
            await iterations(50)
            # A loop that tries again at once would have logged thousands of errors.
            assert caplog.messages == [ERROR]
        async with asyncio.timeout(PATIENCE):
            await until(lambda: batches.accepted == 3)
        accepting.close_sockets([sock])
    assert caplog.messages == [ERROR]


async def test_accepting_goes_on_soon_where_others_make_room(
    sock: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "ERROR_DELAY", 1000.0)
    batches, rooms = _Batches(), [0]

    def make_room() -> bool:
        rooms[0] += 1
        return True

    with _waiting(sock, 3):
        with no_descriptors():
            accepting = AcceptingSockets(batches.add, make_room)
            accepting.listen(sock)
            await until(lambda: rooms[0] == 2)
        async with asyncio.timeout(PATIENCE):
            await until(lambda: batches.accepted == 3)
        accepting.close_sockets([sock])
    assert caplog.messages == []


async def test_socket_can_be_closed_while_accepting_pauses(
    sock: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "ERROR_DELAY", 1000.0)
    batches = _Batches()
    with _waiting(sock, 1):
        with no_descriptors():
            accepting = AcceptingSockets(batches.add)
            accepting.listen(sock)
            await until(lambda: caplog.messages)
        pause = accepting._sockets[sock]
        accepting.close_sockets([sock])
        assert pause is not None
        assert pause.cancelled()
    assert batches.accepted == 0
    assert caplog.messages == [ERROR]


def _is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return True
    return False


async def test_one_socket_stops_and_the_others_go_on() -> None:
    batches = _Batches()
    sockets = AcceptingSockets(batches.add)
    (leaving,), (staying,) = open_tcp_sockets(HOST, 0), open_tcp_sockets(HOST, 0)
    gone, here = leaving.getsockname(), staying.getsockname()
    async with no_leaks():
        for count, (sock, address) in enumerate(((leaving, gone), (staying, here)), 1):
            sockets.listen(sock)
            socket.create_connection(address).close()
            await until(lambda count=count: batches.accepted == count)  # type: ignore[misc]
        await sockets.stop_listening([leaving])
        assert _is_refused(gone)
        socket.create_connection(here).close()
        await until(lambda: batches.accepted == 3)
        sockets.close_sockets([staying, leaving])
        assert _is_refused(here)


async def test_connections_in_the_queue_of_a_socket_that_stops_are_served() -> None:
    batches = _Batches()
    sockets = AcceptingSockets(batches.add)
    (sock,) = open_tcp_sockets(HOST, 0)
    with _waiting(sock, 20):
        sockets.listen(sock)
        await sockets.stop_all(0.0)
    assert batches.accepted == 20
    assert sock.fileno() == -1


async def test_socket_that_is_closed_at_once_leaves_its_queue_to_a_duplicate() -> None:
    batches = _Batches()
    sockets = AcceptingSockets(batches.add)
    (sock,) = open_tcp_sockets(HOST, 0)
    with sock.dup() as other, _waiting(sock, 3):
        sockets.listen(sock)
        sockets.close_sockets([sock])
        await asyncio.sleep(0)
        for _ in range(3):
            other.accept()[0].close()
    assert batches.accepted == 0


async def test_unix_socket_stops_too(tmp_path: Path) -> None:
    batches = _Batches()
    sockets = AcceptingSockets(batches.add)
    path = str(tmp_path / "s")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    sock.listen()
    sockets.listen(sock)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        await sockets.stop_all(0.5)
    assert batches.accepted == 1


# ---------------------------------------------------------------------------------- sockets


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
