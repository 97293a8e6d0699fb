"""What the parent has workers do together, without processes: the test plays the workers."""

import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping

import pytest

from gateway.workers import reload_broadcast as orders
from gateway.workers.ipc import CONFIG_UPDATE
from gateway.workers.letters import ReceivedUpdate
from gateway.workers.reload_broadcast import ConfigUpdate, ReloadBroadcaster
from gateway.workers.seat import WorkerProcess


class _Superior:
    """Gives the orders of a list, one after the other."""

    def __init__(self, *letters: bytes | None) -> None:
        self.letters = list(letters)
        self.looks: list[bool] = []
        self.faults: list[Mapping[int, str]] = []

    def look(self, wished: bool) -> ConfigUpdate | None:
        self.looks.append(wished)
        letter = self.letters.pop(0) if self.letters else None
        return None if letter is None else ConfigUpdate(letter, {}, 1.0)

    def on_applied(self, faults: Mapping[int, str]) -> None:
        self.faults.append(faults)


class _Desk:
    """A desk, its workers, and what the parent is to execute."""

    def __init__(self, superior: _Superior, count: int = 2) -> None:
        self.superior = superior
        self.selector = selectors.PollSelector()
        pairs = [socket.socketpair() for _ in range(count)]
        for ours, _ in pairs:
            ours.setblocking(False)
        self.workers = [
            WorkerProcess(number + 1, pair[0], 0.0) for number, pair in enumerate(pairs)
        ]
        self.ends = [pair[1] for pair in pairs]
        self.executed: list[bytes] = []
        self.desk = ReloadBroadcaster(superior, self.selector)

    def turn(self) -> None:
        """Do what the parent does in one turn of its loop."""
        for key, _ in self.selector.select(0):
            key.data()
        self.desk.go_on(self.workers, lambda orders: self.executed.append(orders.letter))

    def receive(self, number: int) -> ReceivedUpdate:
        word, descriptors, _, _ = socket.recv_fds(self.ends[number], 1, 2)
        assert word == CONFIG_UPDATE
        return ReceivedUpdate(*descriptors)

    def answer(self, number: int, fault: str = "") -> bytes:
        with self.receive(number) as letter:
            letter.answer(fault)
            return letter.content

    def close(self) -> None:
        self.desk.close()
        self.selector.close()
        for sock in (*self.ends, *(worker.channel for worker in self.workers)):
            sock.close()


@pytest.fixture
def desks() -> Iterator[list[_Desk]]:
    """Desks, which are closed in the end, and have left nothing open by then."""
    before = os.listdir("/proc/self/fd")
    made: list[_Desk] = []
    yield made
    for desk in made:
        desk.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def _desk(desks: list[_Desk], *letters: bytes | None, count: int = 2) -> _Desk:
    desk = _Desk(_Superior(*letters), count)
    desks.append(desk)
    return desk


def test_orders_are_executed_when_every_worker_has_answered(desks: list[_Desk]) -> None:
    desk = _desk(desks, b"x" * 500_000)
    desk.turn()
    assert desk.superior.looks == []  # it is not time yet
    desk.desk.wish()
    desk.turn()
    assert desk.superior.looks == [True]
    assert desk.answer(0) == b"x" * 500_000
    desk.turn()
    assert desk.executed == []
    desk.answer(1)
    desk.turn()
    assert desk.executed == [b"x" * 500_000]
    assert desk.superior.faults == [{}]


def test_it_looks_every_few_seconds(desks: list[_Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "POLL_INTERVAL", 0.0)
    desk = _desk(desks, None, b"x", count=0)
    desk.turn()
    desk.turn()
    assert desk.superior.looks == [False, False]
    assert desk.executed == [b"x"]
    monkeypatch.undo()
    desk.turn()
    desk.turn()
    assert desk.superior.looks == [False, False, False]
    assert 1 < desk.desk.due - time.monotonic() < 3


def test_what_is_wished_meanwhile_comes_next_and_once(desks: list[_Desk]) -> None:
    desk = _desk(desks, b"one", b"two", b"three", count=1)
    desk.desk.wish()
    desk.turn()
    for _ in range(3):
        desk.desk.wish()
        desk.turn()
    assert desk.superior.looks == [True]
    assert desk.answer(0) == b"one"
    desk.turn()
    assert desk.desk.due == 0.0
    desk.turn()
    assert desk.answer(0) == b"two"
    for _ in range(3):
        desk.turn()
    assert desk.executed == [b"one", b"two"]


def test_workers_that_cannot_are_told_of(desks: list[_Desk]) -> None:
    desk = _desk(desks, b"x", count=3)
    desk.desk.wish()
    desk.turn()
    desk.answer(0, "no luck" + "k" * 10_000)
    desk.answer(1)
    with desk.receive(2):
        pass  # it ends, say
    desk.turn()
    ((fault,),) = [faults.values() for faults in desk.superior.faults]
    assert list(desk.superior.faults[0]) == [1]
    assert fault.startswith("no luckkk")
    assert len(fault) == 4000
    assert desk.executed == [b"x"]


def test_workers_that_are_gone_or_leave_are_not_waited_for(desks: list[_Desk]) -> None:
    desk = _desk(desks, b"x", count=3)
    desk.ends[0].close()
    desk.ends[1].shutdown(socket.SHUT_RD)
    desk.desk.wish()
    desk.turn()
    assert desk.executed == []
    desk.ends[2].close()  # with the letter unread
    desk.turn()
    assert desk.executed == [b"x"]
    assert desk.superior.faults == [{}]


def test_a_worker_with_a_full_channel_gets_it_later(desks: list[_Desk]) -> None:
    desk = _desk(desks, b"x", count=1)
    channel = desk.workers[0].channel
    sent = 0
    while True:
        try:
            sent += channel.send(bytes(4096))
        except BlockingIOError:
            break
    desk.desk.wish()
    desk.turn()
    assert desk.desk.due < time.monotonic() + 0.1
    while sent:
        sent -= len(desk.ends[0].recv(min(sent, 65536)))
    desk.turn()
    desk.answer(0)
    desk.turn()
    assert desk.executed == [b"x"]


def test_a_worker_that_ends_before_it_could_be_sent_it_is_not_waited_for(
    desks: list[_Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    desk = _desk(desks, b"x", count=1)
    desk.desk.wish()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", fail)
        desk.turn()
    desk.workers[0].channel.close()  # as the parent does when it buries it
    desk.turn()
    assert desk.executed == [b"x"]
    assert desk.superior.faults == [{}]


def test_who_does_not_answer_is_given_up(
    desks: list[_Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_PATIENCE", 0.0)
    desk = _desk(desks, b"x")
    desk.desk.wish()
    desk.turn()
    assert desk.superior.faults == [{1: "no answer within 0 s", 2: "no answer within 0 s"}]
    assert desk.executed == [b"x"]
    desk.answer(0)  # too late, and no fault


def test_where_nothing_can_be_opened_it_is_tried_again(
    desks: list[_Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    desk = _desk(desks, b"x", count=1)
    desk.desk.wish()
    for name in ("memfd_create", "pipe"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            desk.turn()
    assert desk.executed == []
    desk.turn()
    desk.answer(0)
    desk.turn()
    assert desk.executed == [b"x"]


def test_an_answer_that_comes_with_the_end_is_passed_over(desks: list[_Desk]) -> None:
    desk = _desk(desks, b"x", count=1)
    desk.desk.wish()
    desk.turn()
    desk.answer(0)
    heard = desk.selector.select(0)
    desk.desk.close()
    for key, _ in heard:
        key.data()
    assert desk.executed == []
