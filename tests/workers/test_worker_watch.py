"""Workers that hang, as another worker logs them."""

import os
import time

import pytest

from gateway.workers.shared_records import shared_counters
from gateway.workers.worker_watch import WorkerWatch

SILENT = 5
"""Looks after which a worker is said to hang."""
DEAD = 2**22 + 1
"""More than the highest process id of Linux."""


class _Workers:
    """Three workers as the last one of them sees the others."""

    def __init__(self) -> None:
        self.pids, self.heartbeats = shared_counters(3), shared_counters(3)
        for slot, pid in enumerate((os.getpid(), os.getppid(), DEAD)):
            self.pids[slot][0] = pid
            self.beat(slot, 20.0)
        self.watch = WorkerWatch(self.pids, self.heartbeats, 2)

    def beat(self, slot: int, seconds_ago: float = 0.0) -> None:
        self.heartbeats[slot][0] = int((time.monotonic() - seconds_ago) * 1000)

    def look(self, times: int, *beating: int, leads: bool = True) -> None:
        for _ in range(times):
            for slot in beating:
                self.heartbeats[slot][0] += 1000
            self.watch.look(leads)


def test_worker_that_hangs_is_logged_once_and_when_it_runs_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = _Workers()
    workers.look(SILENT, 1)
    assert not caplog.messages
    workers.look(20, 1)
    pid = os.getpid()
    assert caplog.messages == [
        f"worker {pid} has not said anything for 20 s: its calls wait meanwhile"
    ]
    workers.look(1, 0, 1)
    workers.look(3, 0, 1)
    assert caplog.messages[1:] == [f"worker {pid} runs again"]
    assert [each.levelname for each in caplog.records] == ["ERROR", "WARNING"]


def test_worker_that_does_not_lead_logs_nothing_until_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = _Workers()
    workers.look(20, 1, leads=False)
    assert not caplog.messages
    workers.look(1, 1)
    assert len(caplog.messages) == 1
    # Once the first worker runs, it leads again; who has said that it hangs says that, too.
    workers.look(1, 0, 1, leads=False)
    assert caplog.messages[1:] == [f"worker {os.getpid()} runs again"]


def test_dead_worker_and_its_successor_do_not_hang(caplog: pytest.LogCaptureFixture) -> None:
    workers = _Workers()
    workers.pids[0][0], workers.pids[2][0] = DEAD, os.getpid()  # its own slot is silent, too
    workers.look(20, 1)
    workers.pids[0][0] = 0
    workers.look(20, 1)
    workers.pids[0][0] = os.getpid()
    workers.look(SILENT, 1)
    assert not caplog.messages


def test_first_worker_whose_event_loop_runs_leads() -> None:
    beats = shared_counters(3)

    def leaders(*seconds_ago: float) -> list[int]:
        for beat, seconds in zip(beats, seconds_ago, strict=True):
            beat[0] = int((time.monotonic() - seconds) * 1000)
        return [slot for slot in range(3) if WorkerWatch([], beats, slot).leads()]

    assert leaders(1, 1, 1) == [0]
    assert leaders(10, 1, 1) == [0, 1], "the first one hangs, and does not learn of it"
    assert leaders(20, 11, 1) == [0, 1, 2]
    assert leaders(0, 12, 2) == [0]
