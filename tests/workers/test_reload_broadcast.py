"""A reload in all workers, without processes: the test plays the workers."""

import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from gateway.workers import reload_broadcast
from gateway.workers.ipc import FromWorker, ToWorker, receive_descriptor, send
from gateway.workers.reload_broadcast import ConfigUpdate, RefusedUpdate, ReloadBroadcaster
from gateway.workers.worker_pool import WorkerProcess


class _Source:
    """Gives the updates of a list, one after the other; those of ``None`` are no update."""

    def __init__(self, *updates: bytes | RefusedUpdate | None) -> None:
        self.updates = list(updates)
        self.polls: list[bool] = []
        self.commits = 0
        self.aborted: list[Mapping[str, str]] = []
        self.late: list[Sequence[str]] = []

    def poll(self, requested: bool) -> ConfigUpdate | RefusedUpdate | None:
        self.polls.append(requested)
        update = self.updates.pop(0) if self.updates else None
        return ConfigUpdate(update, {}, 1.0) if isinstance(update, bytes) else update

    def commit(self) -> None:
        self.commits += 1

    def abort(self, errors: Mapping[str, str]) -> RefusedUpdate:
        self.aborted.append(errors)
        return RefusedUpdate(b"refused")

    def on_applied(self, late: Sequence[str]) -> None:
        self.late.append(late)


class _Reloads:
    """A broadcaster, its workers, and what the supervisor is to apply."""

    def __init__(self, source: _Source, count: int = 2) -> None:
        self.source = source
        self.workers: list[WorkerProcess] = []
        self.ends: list[socket.socket] = []
        for _ in range(count):
            self.start_worker()
        self.applied: list[bytes] = []
        self.broadcaster = ReloadBroadcaster(source)

    def start_worker(self) -> None:
        ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        end.settimeout(5)
        self.workers.append(WorkerProcess(len(self.workers) + 1, ours, 0.0))
        self.ends.append(end)

    def turn(self) -> None:
        """Do what the supervisor does in one turn of its loop."""
        for worker in self.workers:
            while select.select([worker.channel], [], [], 0)[0] and worker.read_message():
                pass
        self.broadcaster.step(self.workers, lambda update: self.applied.append(update.settings))

    def receive(self, number: int) -> tuple[int, bytes]:
        """Have a worker receive the next message: its kind, and its document."""
        message = receive_descriptor(self.ends[number])
        assert message is not None
        kind, descriptor = message
        if descriptor < 0:
            return kind, b""
        with open(descriptor, "rb") as file:
            return kind, os.pread(file.fileno(), 1_000_000, 0)

    def prepare(self, number: int, error: str = "") -> bytes:
        """Have a worker receive new settings and reply to them."""
        kind, settings = self.receive(number)
        assert kind == ToWorker.PREPARE
        send(self.ends[number], FromWorker.RELOAD_DONE, error)
        return settings

    def begin(self) -> None:
        """Have the supervisor read settings, and send them."""
        self.broadcaster.request()
        self.turn()

    def finish(self, *numbers: int) -> None:
        """Have workers prepare new settings, and use them."""
        for number in numbers:
            self.prepare(number)
        self.turn()
        self.commit(*numbers)
        self.turn()

    def commit(self, *numbers: int) -> None:
        """Have workers receive that they are to use them, and reply."""
        for number in numbers:
            assert self.receive(number) == (ToWorker.COMMIT, b"")
            send(self.ends[number], FromWorker.RELOAD_DONE)

    def fill_channel(self, number: int) -> int:
        """Send messages to a worker until no more go in; return their number."""
        sent = 0
        while True:
            try:
                self.workers[number].channel.send(bytes(4096))
            except BlockingIOError:
                return sent
            sent += 1

    def close(self) -> None:
        self.broadcaster.cancel()
        for sock in (*self.ends, *(worker.channel for worker in self.workers)):
            sock.close()


class _Make:
    """Makes what a test needs, and closes it in the end."""

    def __init__(self) -> None:
        self.made: list[_Reloads] = []

    def __call__(self, *updates: bytes | RefusedUpdate | None, count: int = 2) -> _Reloads:
        self.made.append(_Reloads(_Source(*updates), count))
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


def test_update_is_used_by_all_workers_once_each_of_them_is_ready(make: _Make) -> None:
    reloads = make(b"x" * 500_000)
    reloads.turn()
    assert reloads.source.polls == []  # it is not time yet
    reloads.begin()
    assert reloads.source.polls == [True]
    assert reloads.prepare(0) == b"x" * 500_000
    reloads.turn()
    assert reloads.source.commits == 0
    reloads.prepare(1)
    reloads.turn()
    assert reloads.source.commits == 1
    reloads.commit(0)
    reloads.turn()
    assert reloads.applied == []
    reloads.commit(1)
    reloads.turn()
    assert reloads.applied == [b"x" * 500_000]
    assert reloads.source.late == [[]]
    assert reloads.source.aborted == []


def test_worker_that_fails_to_commit_is_replaced(
    make: _Make, caplog: pytest.LogCaptureFixture
) -> None:
    reloads = make(b"x")
    reloads.begin()
    for number in (0, 1):
        reloads.prepare(number)
    reloads.turn()
    reloads.commit(0)
    assert reloads.receive(1) == (ToWorker.COMMIT, b"")
    send(reloads.ends[1], FromWorker.RELOAD_DONE, "a bug")
    reloads.turn()
    assert [worker.is_leaving for worker in reloads.workers] == [False, True]
    assert reloads.applied == [b"x"]
    assert caplog.messages == ["worker 2 did not get all of the new settings, and is replaced"]


def test_update_that_one_worker_refuses_is_used_by_none(make: _Make) -> None:
    reloads = make(b"x", b"y", count=3)
    reloads.begin()
    reloads.prepare(0, "no luck" + "k" * 10_000)
    reloads.turn()
    assert reloads.source.aborted == []  # others may refuse it too, which is one report
    reloads.prepare(1)
    reloads.receive(2)
    reloads.ends[2].close()  # it exits
    reloads.turn()
    (errors,) = reloads.source.aborted
    assert list(errors) == ["worker 1"]
    assert errors["worker 1"].startswith("no luckkk")
    assert len(errors["worker 1"]) == 4000
    assert [reloads.receive(number) for number in (0, 1)] == [(ToWorker.ABORT, b"refused")] * 2
    reloads.begin()
    for number in (0, 1):
        send(reloads.ends[number], FromWorker.RELOAD_DONE)  # to ABORT
        assert reloads.prepare(number) == b"y"
    reloads.turn()
    reloads.commit(0, 1)
    reloads.turn()
    assert reloads.applied == [b"y"]
    assert reloads.source.commits == 1


def test_workers_learn_why_settings_could_not_even_be_read(make: _Make) -> None:
    reloads = make(RefusedUpdate(b"why"))
    reloads.begin()
    assert [reloads.receive(number) for number in (0, 1)] == [(ToWorker.ABORT, b"why")] * 2
    reloads.turn()
    assert reloads.broadcaster.next_step > time.monotonic()
    assert (reloads.applied, reloads.source.aborted) == ([], [])


def test_worker_that_starts_meanwhile_prepares_the_update_too(make: _Make) -> None:
    reloads = make(b"x", count=1)
    reloads.begin()
    reloads.start_worker()
    reloads.prepare(0)
    reloads.turn()
    assert reloads.source.commits == 0
    assert reloads.prepare(1) == b"x"
    reloads.turn()
    reloads.commit(0, 1)
    reloads.start_worker()  # it has the new settings, as the source has committed
    reloads.turn()
    assert reloads.applied == [b"x"]


def test_worker_that_dies_when_it_is_ready_keeps_nobody_waiting(make: _Make) -> None:
    reloads = make(b"x")
    reloads.begin()
    reloads.prepare(0)
    reloads.turn()
    reloads.ends[0].close()
    reloads.prepare(1)
    reloads.turn()
    reloads.commit(1)
    reloads.turn()
    assert reloads.applied == [b"x"]
    assert (reloads.source.commits, reloads.source.aborted) == (1, [])


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
    reloads.begin()
    for _ in range(3):
        reloads.begin()
    assert reloads.source.polls == [True]
    assert reloads.prepare(0) == b"one"
    reloads.begin()
    reloads.commit(0)
    reloads.turn()
    assert reloads.broadcaster.next_step == 0.0
    reloads.turn()
    assert reloads.prepare(0) == b"two"
    reloads.turn()
    reloads.commit(0)
    for _ in range(3):
        reloads.turn()
    assert reloads.applied == [b"one", b"two"]


def test_reload_does_not_wait_for_workers_that_drain_or_are_gone(make: _Make) -> None:
    reloads = make(b"x", count=3)
    reloads.ends[0].close()
    reloads.workers[1].drain()
    reloads.begin()
    assert reloads.applied == []
    reloads.ends[2].close()  # with the settings unread
    reloads.turn()
    assert reloads.applied == [b"x"]
    assert reloads.source.aborted == []


def test_reload_does_not_wait_for_a_worker_that_begins_to_drain(make: _Make) -> None:
    reloads = make(b"x", count=1)
    reloads.begin()
    reloads.workers[0].drain()
    reloads.turn()
    assert reloads.applied == [b"x"]
    assert reloads.source.late == [[]]


def test_worker_with_a_full_channel_gets_settings_later(make: _Make) -> None:
    reloads = make(b"x", count=1)
    sent = reloads.fill_channel(0)
    reloads.begin()
    assert reloads.broadcaster.next_step < time.monotonic() + 0.1
    for _ in range(sent):
        reloads.ends[0].recv(4096)
    reloads.turn()
    reloads.finish(0)
    assert reloads.applied == [b"x"]


def test_worker_with_a_full_channel_gets_the_commit_in_any_case(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_broadcast, "COMMIT_TIMEOUT", 0.0)
    reloads = make(b"x", count=1)
    reloads.begin()
    reloads.prepare(0)
    sent = reloads.fill_channel(0)
    for _ in range(3):
        reloads.turn()
    assert (reloads.source.commits, reloads.applied) == (1, [])
    assert time.monotonic() < reloads.broadcaster.next_step < time.monotonic() + 0.1
    for _ in range(sent):
        reloads.ends[0].recv(4096)
    reloads.turn()
    reloads.commit(0)
    reloads.turn()
    assert reloads.applied == [b"x"]


def test_reload_does_not_wait_for_a_worker_that_exits_before_it_gets_settings(
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
    assert reloads.source.aborted == []


def test_reload_without_a_reply_in_time_is_aborted(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_broadcast, "PREPARE_TIMEOUT", 0.0)
    reloads = make(b"x")
    reloads.begin()
    reason = "no reply within 0 s"
    assert reloads.source.aborted == [{"worker 1": reason, "worker 2": reason}]
    assert reloads.applied == []
    reloads.prepare(0)  # too late, and no error
    assert reloads.receive(0) == (ToWorker.ABORT, b"refused")
    reloads.turn()
    assert reloads.source.commits == 0


def test_update_is_applied_without_late_replies_to_the_commit(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_broadcast, "COMMIT_TIMEOUT", 0.0)
    reloads = make(b"x")
    reloads.begin()
    reloads.prepare(0)
    reloads.prepare(1)
    reloads.turn()
    assert reloads.applied == [b"x"]
    assert reloads.source.late == [["worker 1", "worker 2"]]


def test_late_reply_is_not_taken_for_that_to_the_next_update(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads = make(b"one", b"two", count=1)
    reloads.broadcaster.request()
    with monkeypatch.context() as patch:
        patch.setattr(reload_broadcast, "PREPARE_TIMEOUT", 0.0)
        reloads.turn()
    reloads.begin()
    assert reloads.prepare(0) == b"one"
    reloads.turn()
    assert reloads.receive(0) == (ToWorker.ABORT, b"refused")
    send(reloads.ends[0], FromWorker.RELOAD_DONE)
    reloads.turn()
    assert reloads.source.commits == 0
    assert reloads.prepare(0, "no luck") == b"two"
    reloads.turn()
    reloads.turn()
    assert reloads.source.aborted == [
        {"worker 1": "no reply within 0 s"},
        {"worker 1": "no luck"},
    ]


def test_reload_is_tried_again_if_no_memory_can_be_opened(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads = make(b"x", count=1)
    reloads.broadcaster.request()
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", _fail)
        reloads.turn()
    assert reloads.applied == []
    reloads.turn()
    reloads.finish(0)
    assert reloads.applied == [b"x"]


def test_reply_to_an_update_that_was_cancelled_is_ignored(make: _Make) -> None:
    reloads = make(b"x", count=1)
    reloads.begin()
    reloads.prepare(0)
    reloads.broadcaster.cancel()
    reloads.turn()
    assert (reloads.source.commits, reloads.applied) == (0, [])
