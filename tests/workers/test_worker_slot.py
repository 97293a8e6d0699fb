import socket
from collections.abc import Iterator
from signal import SIGKILL

import pytest

from gateway.workers.ipc import ADMIN, CLIENT, DRAIN, DRAINED, EXIT, READY
from gateway.workers.seat import PendingConnection, WorkerProcess, WorkerSlot, exit_text


@pytest.fixture
def closed() -> memoryview:
    return memoryview(bytearray(8)).cast("Q")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def test_workers_that_end_early_are_replaced_after_growing_pauses(closed: memoryview) -> None:
    seat = WorkerSlot(closed)
    pauses = [seat.vacate(began=100.0, now=101.0) for _ in range(8)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert seat.due == 106.0
    for _ in range(5000):
        assert seat.vacate(began=100.0, now=100.0) == 5.0


def test_one_that_has_lasted_is_replaced_at_once(closed: memoryview) -> None:
    seat = WorkerSlot(closed)
    assert seat.vacate(began=0.0, now=1.0) == 0.1
    assert seat.vacate(began=1.0, now=11.0) == 0.0
    assert seat.due == 11.0
    assert seat.vacate(began=11.0, now=12.0) == 0.1


def test_open_connections_are_those_given_and_not_closed(
    closed: memoryview, pair: tuple[socket.socket, socket.socket]
) -> None:
    seat = WorkerSlot(closed)
    assert seat.open == 0
    ours, theirs = pair
    seat.worker = WorkerProcess(1, ours, 0.0)
    for _ in range(3):
        with socket.socket() as connection:
            assert seat.worker.give(PendingConnection(connection, CLIENT))
    assert seat.open == 3
    closed[0] += 2
    assert seat.open == 1
    _, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
    socket.socket(fileno=numbers[0]).close()


def test_a_worker_is_told_who_connects(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    worker = WorkerProcess(1, ours, 0.0)
    for word in (CLIENT, ADMIN):
        with socket.socket() as connection:
            assert worker.give(PendingConnection(connection, word))
        told, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
        socket.socket(fileno=numbers[0]).close()
        assert told == word


def test_a_worker_that_is_full_can_be_asked_again(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    worker = WorkerProcess(1, ours, 0.0, taking=True)
    with socket.socket() as connection:
        while worker.give(PendingConnection(connection, CLIENT)):
            pass
        assert worker.taking
        assert worker.given == len(worker.on_the_way) > 100
        for _ in range(worker.given):
            _, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
            socket.socket(fileno=numbers[0]).close()
        assert worker.give(PendingConnection(connection, CLIENT))


def test_a_worker_that_is_full_is_stopped_later(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    worker = WorkerProcess(1, ours, 0.0, taking=True)
    with socket.socket() as connection:
        while worker.give(PendingConnection(connection, CLIENT)):
            pass
    assert not worker.stop()
    for _ in range(worker.given):
        _, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
        socket.socket(fileno=numbers[0]).close()
    for _ in range(2):
        assert worker.stop()
    assert theirs.recv(9) == DRAIN


def test_a_worker_that_drains_takes_operators_alone_until_it_ends(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    worker = WorkerProcess(1, ours, 0.0)
    worker.hear(READY)
    assert worker.stop()
    assert (worker.takes(CLIENT), worker.takes(ADMIN)) == (False, True)
    with socket.socket() as connection:
        assert not worker.give(PendingConnection(connection, CLIENT))
        assert worker.give(PendingConnection(connection, ADMIN))
    worker.hear(DRAINED)
    for _ in range(2):
        assert worker.end()
    assert not worker.takes(ADMIN)
    with socket.socket() as connection:
        assert not worker.give(PendingConnection(connection, ADMIN))
    words = [socket.recv_fds(theirs, 1, 1)[0] for _ in range(4)]
    assert words == [DRAIN, ADMIN, EXIT, b""]


def test_what_is_on_its_way_is_kept_until_the_worker_has_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    worker = WorkerProcess(1, ours, 0.0)
    connections = [socket.socket() for _ in range(3)]
    for connection in connections:
        worker.give(PendingConnection(connection, CLIENT))
    worker.hear(b".++")
    assert worker.taking
    assert [connection.fileno() < 0 for connection in connections] == [True, True, False]
    assert [arrival.connection for arrival in worker.on_the_way] == connections[2:]
    connections[2].close()
    for _ in range(3):
        _, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
        socket.socket(fileno=numbers[0]).close()


@pytest.mark.parametrize("gone", [False, True], ids=["stopped", "gone"])
def test_a_worker_that_has_ended_is_asked_no_more(
    pair: tuple[socket.socket, socket.socket], gone: bool
) -> None:
    ours, theirs = pair
    worker = WorkerProcess(1, ours, 0.0, taking=True)
    if gone:
        theirs.close()
    for _ in range(2):
        assert worker.stop()
    with socket.socket() as connection:
        assert not worker.give(PendingConnection(connection, CLIENT))
    assert not worker.taking
    assert worker.given == 0


@pytest.mark.parametrize(
    ("words", "dropped"),
    [((), 0), ((b".",), 0), ((b".", b"0"), 0), ((b".", b"12"), 12), ((b".7",), 7)],
)
def test_a_worker_says_that_it_is_up_and_what_it_dropped(
    pair: tuple[socket.socket, socket.socket], words: tuple[bytes, ...], dropped: int
) -> None:
    worker = WorkerProcess(1, pair[0], 0.0)
    for word in words:
        worker.hear(word)
        assert worker.up
        assert worker.taking
    assert worker.dropped == dropped
    assert not worker.leaving


def test_a_worker_that_wants_to_leave_takes_what_comes_until_it_is_stopped(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    worker = WorkerProcess(1, pair[0], 0.0)
    worker.hear(b".-12")
    assert (worker.taking, worker.leaving, worker.dropped) == (True, True, 12)


def test_how_it_ended() -> None:
    assert exit_text(3) == "ended with status 3"
    assert exit_text(-SIGKILL) == "was killed by SIGKILL"
    assert exit_text(-40) == "was killed by signal 40"
