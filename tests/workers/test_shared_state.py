"""Ejections of endpoints in memory that processes share."""

import os
from itertools import count

import pytest

from gateway.workers.shared_state import RETENTION, SharedEjection, SharedEjections

URL = "u http://127.0.0.1:8000"


def _publish_in_a_child(name: str, shared: SharedEjections) -> None:
    """Have a process that is forked now publish an ejection, and wait for its end."""
    pid = os.fork()
    if pid == 0:
        try:
            shared.publish(name, 3, 20.5, 10)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def _names_of_one_slot(shared: SharedEjections) -> tuple[str, str]:
    """Return two names that hash to the same slot."""
    seen: dict[int, str] = {}
    for number in count():
        name = f"u http://{number}"
        _, _, at = shared._locate(name)
        if at in seen:
            return seen[at], name
        seen[at] = name
    raise AssertionError


def test_endpoint_that_nobody_published_is_not_known() -> None:
    assert SharedEjections().read(URL) is None


@pytest.mark.parametrize(
    ("ejections", "until", "expected"),
    [
        (1, 110.25, SharedEjection(1, 110.25)),
        (0, 0, SharedEjection(0, 100)),
        # Cut to milliseconds, never later.
        (1, 110.0009, SharedEjection(1, 110)),
        (255, 110, SharedEjection(255, 110)),
        (256, 110, SharedEjection(255, 110)),
        (10**30, 1e9, SharedEjection(255, 1e9)),
        (1, 1e300, SharedEjection(1, (2**40 - 1) / 1000)),
    ],
)
def test_published_ejection_is_read(ejections: int, until: float, expected: SharedEjection) -> None:
    shared = SharedEjections()
    shared.publish(URL, ejections, until, 100)
    assert shared.read(URL) == expected
    assert shared.read("u http://127.0.0.1:8001") is None
    assert shared.read("v http://127.0.0.1:8000") is None


def test_last_ejection_counts() -> None:
    shared = SharedEjections()
    shared.publish(URL, 1, 110, 100)
    shared.publish(URL, 2, 130, 110)
    assert shared.read(URL) == SharedEjection(2, 130)
    shared.publish(URL, 0, 0, 131)
    assert shared.read(URL) == SharedEjection(0, 131)


def test_ejection_reaches_other_processes_and_outlives_its_publisher() -> None:
    shared = SharedEjections()
    _publish_in_a_child(URL, shared)
    _publish_in_a_child("u http://127.0.0.1:8001", shared)
    assert shared.read(URL) == SharedEjection(3, 20.5)
    assert shared.read("u http://127.0.0.1:8001") == SharedEjection(3, 20.5)


@pytest.mark.parametrize("ejections", [0, 1])
def test_slot_is_kept_until_its_ejection_is_over(ejections: int) -> None:
    shared = SharedEjections()
    first, second = _names_of_one_slot(shared)
    shared.publish(first, ejections, 100, 100)
    shared.publish(second, 1, 200, 100 + RETENTION)
    assert shared.read(first) == SharedEjection(ejections, 100)
    assert shared.read(second) is None
    shared.publish(second, 1, 200, 101 + RETENTION)
    assert shared.read(first) is None
    assert shared.read(second) == SharedEjection(1, 200)


def test_endpoints_that_take_a_slot_at_once_are_told_apart() -> None:
    shared = SharedEjections()
    first, second = _names_of_one_slot(shared)
    shared.publish(first, 1, 110, 100)
    # Another process had seen the slot free too, and has written the owner, but no ejection yet.
    owner, _, at = shared._locate(second)
    shared._words[at] = owner
    assert shared.read(first) is None
    assert shared.read(second) is None
    shared.publish(second, 1, 120, 100)
    assert shared.read(second) == SharedEjection(1, 120)


def test_full_table_keeps_its_ejections_and_ignores_others() -> None:
    shared = SharedEjections(slots=8)
    names = [f"u http://{number}" for number in range(100)]
    for name in names:
        shared.publish(name, 1, 110, 100)
    known = [name for name in names if shared.read(name) is not None]
    assert len(known) == 8
    assert {shared.read(name) for name in known} == {SharedEjection(1, 110)}
