"""What workers say on a board, and what others read there."""

import os
from itertools import count

import pytest

from gateway.workers.shared_state import RETENTION, SharedEjection, SharedEjections

URL = "u http://127.0.0.1:8000"


def _post_in_a_child(name: str, board: SharedEjections) -> None:
    """Have a process that is forked now say something, and wait for its end."""
    pid = os.fork()
    if pid == 0:
        try:
            board.publish(name, 3, 20.5, 10)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def _of_one_slot(board: SharedEjections) -> tuple[str, str]:
    """Give two names that hash to the same slot."""
    seen: dict[int, str] = {}
    for number in count():
        name = f"u http://{number}"
        _, _, at = board._place(name)
        if at in seen:
            return seen[at], name
        seen[at] = name
    raise AssertionError


def test_what_nobody_has_said_is_not_known() -> None:
    assert SharedEjections().read(URL) is None


@pytest.mark.parametrize(
    ("ejections", "until", "news"),
    [
        (1, 110.25, SharedEjection(1, 110.25)),
        (0, 0, SharedEjection(0, 100)),
        # Never later than it is.
        (1, 110.0009, SharedEjection(1, 110)),
        (255, 110, SharedEjection(255, 110)),
        (256, 110, SharedEjection(255, 110)),
        (10**30, 1e9, SharedEjection(255, 1e9)),
        (1, 1e300, SharedEjection(1, (2**40 - 1) / 1000)),
    ],
)
def test_what_is_said_is_read(ejections: int, until: float, news: SharedEjection) -> None:
    board = SharedEjections()
    board.publish(URL, ejections, until, 100)
    assert board.read(URL) == news
    assert board.read("u http://127.0.0.1:8001") is None
    assert board.read("v http://127.0.0.1:8000") is None


def test_the_last_word_counts() -> None:
    board = SharedEjections()
    board.publish(URL, 1, 110, 100)
    board.publish(URL, 2, 130, 110)
    assert board.read(URL) == SharedEjection(2, 130)
    board.publish(URL, 0, 0, 131)
    assert board.read(URL) == SharedEjection(0, 131)


def test_other_processes_read_it_and_it_outlives_them() -> None:
    board = SharedEjections()
    _post_in_a_child(URL, board)
    _post_in_a_child("u http://127.0.0.1:8001", board)
    assert board.read(URL) == SharedEjection(3, 20.5)
    assert board.read("u http://127.0.0.1:8001") == SharedEjection(3, 20.5)


@pytest.mark.parametrize("ejections", [0, 1])
def test_a_slot_is_its_owners_until_what_that_said_is_over(ejections: int) -> None:
    board = SharedEjections()
    first, second = _of_one_slot(board)
    board.publish(first, ejections, 100, 100)
    board.publish(second, 1, 200, 100 + RETENTION)
    assert board.read(first) == SharedEjection(ejections, 100)
    assert board.read(second) is None
    board.publish(second, 1, 200, 101 + RETENTION)
    assert board.read(first) is None
    assert board.read(second) == SharedEjection(1, 200)


def test_two_that_take_a_slot_at_once_are_not_taken_for_each_other() -> None:
    board = SharedEjections()
    first, second = _of_one_slot(board)
    board.publish(first, 1, 110, 100)
    # The other one had seen the slot free too, and has written whose it is, but no more yet.
    owner, _, at = board._place(second)
    board._words[at] = owner
    assert board.read(first) is None
    assert board.read(second) is None
    board.publish(second, 1, 120, 100)
    assert board.read(second) == SharedEjection(1, 120)


def test_a_full_board_forgets_nobody_and_fails_nobody() -> None:
    board = SharedEjections(slots=8)
    names = [f"u http://{number}" for number in range(100)]
    for name in names:
        board.publish(name, 1, 110, 100)
    known = [name for name in names if board.read(name) is not None]
    assert len(known) == 8
    assert {board.read(name) for name in known} == {SharedEjection(1, 110)}
