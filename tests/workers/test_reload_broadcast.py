"""A reload in all workers, without processes: the test plays the workers."""

import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import cast

import pytest

from gateway.workers import reload_broadcast
from gateway.workers.ipc import FromWorker, ListeningSockets, ToWorker, receive, send
from gateway.workers.reload_broadcast import ReloadBroadcaster
from gateway.workers.worker_pool import SupervisedGateway, WorkerProcess


class _Reloads:
    """A broadcaster, its workers, and what the supervisor is to apply.

    It gives the updates of a list, one after the other; None is no update.
    """

    def __init__(self, *updates: float | None, count: int = 2) -> None:
        self.updates = list(updates)
        self.polls: list[bool] = []
        self.commits = 0
        self.aborted: list[Mapping[str, str]] = []
        self.late: list[Sequence[str]] = []
        self.applied: list[float] = []
        self.workers: list[WorkerProcess] = []
        self.ends: list[socket.socket] = []
        for _ in range(count):
            self.start_worker()
        self.broadcaster = ReloadBroadcaster(cast("SupervisedGateway", self))

    def poll(self, requested: bool) -> ListeningSockets | None:
        self.polls.append(requested)
        update = self.updates.pop(0) if self.updates else None
        return None if update is None else cast("ListeningSockets", {update: ToWorker.CLIENT})

    def commit(self) -> None:
        self.commits += 1

    def abort(self, errors: Mapping[str, str]) -> None:
        self.aborted.append(errors)

    def on_applied(self, late: Sequence[str]) -> None:
        self.late.append(late)

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
        self.broadcaster.step(
            self.workers, lambda update: self.applied.extend(cast("list[float]", update))
        )

    def begin(self) -> None:
        """Have the supervisor read settings, and have the workers prepare them."""
        self.broadcaster.is_requested = True
        self.turn()

    def reply(self, number: int, expected: ToWorker, error: str = "") -> None:
        """Have a worker receive a step, and reply to it."""
        message = receive(self.ends[number])
        assert message is not None
        assert message[0] == expected
        send(self.ends[number], FromWorker.RELOAD_DONE, error)

    def reply_all(self, expected: ToWorker, *numbers: int) -> None:
        """Have workers do so, and then the supervisor take a turn."""
        for number in numbers or range(len(self.workers)):
            self.reply(number, expected)
        self.turn()

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
        for sock in (*self.ends, *(worker.channel for worker in self.workers)):
            sock.close()


_Make = Callable[..., _Reloads]


@pytest.fixture
def make() -> Iterator[_Make]:
    """Make what a test needs, and close it in the end."""
    with ExitStack() as stack:
        yield lambda *updates, count=2: stack.enter_context(
            closing(_Reloads(*updates, count=count))
        )


def test_update_is_used_by_all_workers_once_each_of_them_is_ready(make: _Make) -> None:
    reloads = make(7)
    reloads.turn()
    assert reloads.polls == []  # it is not time yet
    reloads.begin()
    assert reloads.polls == [True]
    reloads.reply_all(ToWorker.PREPARE, 0)
    assert reloads.commits == 0
    reloads.reply_all(ToWorker.PREPARE, 1)
    assert reloads.commits == 1
    reloads.reply_all(ToWorker.COMMIT, 0)
    assert reloads.applied == []
    reloads.reply_all(ToWorker.COMMIT, 1)
    assert reloads.applied == [7]
    assert reloads.late == [[]]
    assert reloads.aborted == []


def test_worker_that_fails_to_commit_is_replaced(
    make: _Make, caplog: pytest.LogCaptureFixture
) -> None:
    reloads = make(7)
    reloads.begin()
    reloads.reply_all(ToWorker.PREPARE)
    reloads.reply(0, ToWorker.COMMIT)
    reloads.reply(1, ToWorker.COMMIT, "a bug")
    reloads.turn()
    assert [worker.is_leaving for worker in reloads.workers] == [False, True]
    assert reloads.applied == [7]
    assert caplog.messages == ["worker 2 did not get all of the new settings, and is replaced"]


def test_update_that_one_worker_refuses_is_used_by_none(make: _Make) -> None:
    reloads = make(7, 8, count=3)
    reloads.begin()
    reloads.reply(0, ToWorker.PREPARE, "no luck")
    reloads.turn()
    assert reloads.aborted == []  # others may refuse it too, which is one report
    reloads.reply(1, ToWorker.PREPARE)
    reloads.ends[2].close()  # it exits, with the settings unread
    reloads.turn()
    assert reloads.aborted == [{"worker 1": "no luck"}]
    reloads.reply_all(ToWorker.ABORT, 0, 1)
    reloads.begin()
    reloads.reply_all(ToWorker.PREPARE, 0, 1)
    reloads.reply_all(ToWorker.COMMIT, 0, 1)
    assert reloads.applied == [8]
    assert reloads.commits == 1


@pytest.mark.parametrize("requested", [True, False])
def test_workers_open_their_logs_on_request_although_settings_cannot_be_read(
    make: _Make, requested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_broadcast, "POLL_INTERVAL", 0.0)
    reloads = make(None, count=1)
    if requested:
        reloads.broadcaster.is_requested = True
    reloads.turn()
    assert reloads.polls == [requested]
    if requested:
        reloads.reply(0, ToWorker.ABORT)
    reloads.ends[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(reloads.ends[0])
    assert (reloads.applied, reloads.aborted) == ([], [])


def test_source_is_polled_every_few_seconds(make: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_broadcast, "POLL_INTERVAL", 0.0)
    reloads = make(None, 7, count=0)
    reloads.turn()
    reloads.turn()
    assert reloads.polls == [False, False]
    assert reloads.applied == [7]
    monkeypatch.undo()
    reloads.turn()
    reloads.turn()
    assert reloads.polls == [False, False, False]
    assert 1 < reloads.broadcaster.next_step - time.monotonic() < 3


def test_requests_during_an_update_lead_to_one_more(make: _Make) -> None:
    reloads = make(7, 8, 9, count=1)
    for _ in range(4):
        reloads.begin()
    assert reloads.polls == [True]
    reloads.reply_all(ToWorker.PREPARE)
    reloads.reply_all(ToWorker.COMMIT)
    assert reloads.broadcaster.next_step == 0.0
    reloads.turn()
    reloads.reply_all(ToWorker.PREPARE)
    reloads.reply_all(ToWorker.COMMIT)
    for _ in range(2):
        reloads.turn()
    assert reloads.applied == [7, 8]


def test_reload_does_not_wait_for_workers_that_drain_or_are_gone(make: _Make) -> None:
    reloads = make(7, count=4)
    reloads.ends[0].close()
    reloads.workers[1].drain()
    reloads.begin()
    assert reloads.applied == []
    reloads.ends[2].close()  # with the settings unread
    reloads.workers[3].drain()
    reloads.turn()
    assert reloads.applied == [7]
    assert (reloads.aborted, reloads.late) == ([], [[]])


def test_worker_with_a_full_channel_gets_settings_later_and_the_commit_in_any_case(
    make: _Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_broadcast, "COMMIT_TIMEOUT", 0.0)
    reloads = make(7, count=1)
    for step, commits in ((ToWorker.PREPARE, 0), (ToWorker.COMMIT, 1)):
        sent = reloads.fill_channel(0)
        if step == ToWorker.PREPARE:
            reloads.begin()
        for _ in range(3):
            reloads.turn()
        assert (reloads.commits, reloads.applied) == (commits, [])
        assert time.monotonic() < reloads.broadcaster.next_step < time.monotonic() + 0.1
        for _ in range(sent):
            reloads.ends[0].recv(4096)
        if step == ToWorker.PREPARE:
            reloads.turn()
            reloads.reply(0, step)
    reloads.turn()
    reloads.reply_all(ToWorker.COMMIT)
    assert reloads.applied == [7]
