"""A reload in all workers, without processes: the test plays the workers."""

import os
import socket
import time
from collections.abc import Iterator, Mapping

import pytest

from gateway.workers import reload_broadcast
from gateway.workers.ipc import FromWorker, ToWorker, receive_descriptor, send
from gateway.workers.reload_broadcast import ConfigUpdate, ReloadBroadcaster
from gateway.workers.worker_pool import WorkerProcess


class _Source:
    """Gives the updates of a list, one after the other."""

    def __init__(self, *settings: bytes | None) -> None:
        self.settings = list(settings)
        self.polls: list[bool] = []
        self.errors: list[Mapping[int, str]] = []

    def poll(self, requested: bool) -> ConfigUpdate | None:
        self.polls.append(requested)
        settings = self.settings.pop(0) if self.settings else None
        return None if settings is None else ConfigUpdate(settings, {}, 1.0)

    def on_applied(self, errors: Mapping[int, str]) -> None:
        self.errors.append(errors)


class _Reloads:
    """A broadcaster, its workers, and what the supervisor is to apply."""

    def __init__(self, source: _Source, count: int = 2) -> None:
        self.source = source
        self.workers: list[WorkerProcess] = []
        self.ends: list[socket.socket] = []
        for number in range(count):
            ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self.workers.append(WorkerProcess(number + 1, ours, 0.0))
            self.ends.append(end)
        self.applied: list[bytes] = []
        self.broadcaster = ReloadBroadcaster(source)

    def turn(self) -> None:
        """Do what the supervisor does in one turn of its loop."""
        for worker in self.workers:
            if worker.channel.fileno() >= 0:
                worker.read_message()
        self.broadcaster.step(self.workers, lambda update: self.applied.append(update.settings))

    def receive(self, number: int) -> bytes:
        """Have a worker receive the next message, which is settings."""
        message = receive_descriptor(self.ends[number])
        assert message is not None
        kind, descriptor = message
        assert kind == ToWorker.RELOAD
        with open(descriptor, "rb") as file:
            return os.pread(file.fileno(), 1_000_000, 0)

    def reply(self, number: int, error: str = "") -> bytes:
        """Have a worker receive settings and reply to them."""
        settings = self.receive(number)
        send(self.ends[number], FromWorker.RELOADED, error)
        return settings

    def close(self) -> None:
        self.broadcaster.cancel()
        for sock in (*self.ends, *(worker.channel for worker in self.workers)):
            sock.close()


class _Make:
    """Makes what a test needs, and closes it in the end."""

    def __init__(self) -> None:
        self.made: list[_Reloads] = []

    def __call__(self, *settings: bytes | None, count: int = 2) -> _Reloads:
        self.made.append(_Reloads(_Source(*settings), count))
        return self.made[-1]


@pytest.fixture
def make() -> Iterator[_Make]:
    before = os.listdir("/proc/self/fd")
    make = _Make()
    yield make
    for reloads in make.made:
        reloads.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def _fail(*_: object) -> int:
    raise OSError(24, "Too many open files")


def test_update_is_applied_when_every_worker_has_replied(make: _Make) -> None:
    reloads = make(b"x" * 500_000)
    reloads.turn()
    assert reloads.source.polls == []  # it is not time yet
    reloads.broadcaster.request()
    reloads.turn()
    assert reloads.source.polls == [True]
    assert reloads.reply(0) == b"x" * 500_000
    reloads.turn()
    assert reloads.applied == []
    reloads.reply(1)
    reloads.turn()
    assert reloads.applied == [b"x" * 500_000]
    assert reloads.source.errors == [{}]


def test_source_is_polled_every_few_seconds(make: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_broadcast, "POLL_INTERVAL", 0.0)
    reloads = make(None, b"x", count=0)
    reloads.turn()
    reloads.turn()
    assert reloads.source.polls == [False, False]
    assert reloads.applied == [b"x"]
    monkeypatch.undo()
    reloads.turn()
    reloads.turn()
    assert reloads.source.polls == [False, False, False]
    assert 1 < reloads.broadcaster.next_step - time.monotonic() < 3


def test_requests_during_an_update_lead_to_one_more(make: _Make) -> None:
    reloads = make(b"one", b"two", b"three", count=1)
    reloads.broadcaster.request()
    reloads.turn()
    for _ in range(3):
        reloads.broadcaster.request()
        reloads.turn()
    assert reloads.source.polls == [True]
    assert reloads.reply(0) == b"one"
    reloads.turn()
    assert reloads.broadcaster.next_step == 0.0
    reloads.turn()
    assert reloads.reply(0) == b"two"
    for _ in range(3):
        reloads.turn()
    assert reloads.applied == [b"one", b"two"]


def test_errors_of_workers_are_reported(make: _Make) -> None:
    reloads = make(b"x", count=3)
    reloads.broadcaster.request()
    reloads.turn()
    reloads.reply(0, "no luck" + "k" * 10_000)
    reloads.reply(1)
    reloads.receive(2)
    reloads.ends[2].close()  # it exits
    reloads.turn()
    (errors,) = reloads.source.errors
    assert list(errors) == [1]
    assert errors[1].startswith("no luckkk")
    assert len(errors[1]) == 4000
    assert reloads.applied == [b"x"]


def test_broadcast_does_not_wait_for_workers_that_drain_or_are_gone(make: _Make) -> None:
    reloads = make(b"x", count=3)
    reloads.ends[0].close()
    reloads.workers[1].drain()
    reloads.broadcaster.request()
    reloads.turn()
    assert reloads.applied == []
    reloads.ends[2].close()  # with the settings unread
    reloads.turn()
    assert reloads.applied == [b"x"]
    assert reloads.source.errors == [{}]


def test_broadcast_does_not_wait_for_a_worker_that_begins_to_drain(make: _Make) -> None:
    reloads = make(b"x", count=1)
    reloads.broadcaster.request()
    reloads.turn()
    reloads.workers[0].drain()
    reloads.turn()
    assert reloads.applied == [b"x"]
    assert reloads.source.errors == [{}]


def test_worker_with_a_full_channel_gets_settings_later(make: _Make) -> None:
    reloads = make(b"x", count=1)
    channel = reloads.workers[0].channel
    sent = 0
    while True:
        try:
            channel.send(bytes(4096))
        except BlockingIOError:
            break
        sent += 1
    reloads.broadcaster.request()
    reloads.turn()
    assert reloads.broadcaster.next_step < time.monotonic() + 0.1
    for _ in range(sent):
        reloads.ends[0].recv(4096)
    reloads.turn()
    reloads.reply(0)
    reloads.turn()
    assert reloads.applied == [b"x"]


def test_broadcast_does_not_wait_for_a_worker_that_exits_before_it_gets_settings(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads = make(b"x", count=1)
    reloads.broadcaster.request()
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", _fail)
        reloads.turn()
    reloads.ends[0].close()
    reloads.turn()
    assert reloads.applied == [b"x"]
    assert reloads.source.errors == [{}]


def test_broadcast_ends_without_late_replies(make: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_broadcast, "_REPLY_TIMEOUT", 0.0)
    reloads = make(b"x")
    reloads.broadcaster.request()
    reloads.turn()
    assert reloads.source.errors == [{1: "no reply within 0 s", 2: "no reply within 0 s"}]
    assert reloads.applied == [b"x"]
    reloads.reply(0)  # too late, and no error
    reloads.turn()


def test_late_reply_is_not_taken_for_that_to_the_next_update(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads = make(b"one", b"two", count=1)
    reloads.broadcaster.request()
    with monkeypatch.context() as patch:
        patch.setattr(reload_broadcast, "_REPLY_TIMEOUT", 0.0)
        reloads.turn()
    reloads.broadcaster.request()
    reloads.turn()
    assert reloads.reply(0) == b"one"
    reloads.turn()
    assert reloads.applied == [b"one"]
    assert reloads.reply(0, "no luck") == b"two"
    reloads.turn()
    assert reloads.applied == [b"one", b"two"]
    assert reloads.source.errors[1] == {1: "no luck"}


def test_broadcast_is_tried_again_if_no_memory_can_be_opened(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads = make(b"x", count=1)
    reloads.broadcaster.request()
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", _fail)
        reloads.turn()
    assert reloads.applied == []
    reloads.turn()
    reloads.reply(0)
    reloads.turn()
    assert reloads.applied == [b"x"]


def test_reply_to_an_update_that_was_cancelled_is_ignored(make: _Make) -> None:
    reloads = make(b"x", count=1)
    reloads.broadcaster.request()
    reloads.turn()
    reloads.reply(0)
    reloads.broadcaster.cancel()
    reloads.turn()
    assert reloads.applied == []
