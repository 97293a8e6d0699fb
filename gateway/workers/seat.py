"""The place of a worker, and who sits there."""

from __future__ import annotations

import signal
import socket
from collections import deque
from dataclasses import dataclass, field

from gateway.workers.post import LEAVING, STOP, TAKEN, UP

_LASTING = 10.0
"""Seconds after which a worker's end has nothing to do with its start."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the next start in a place where one worker after the other ends early."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A connection, and the word with which it is given to a worker: CLIENT or OPERATOR."""

    connection: socket.socket
    word: bytes


@dataclass(slots=True)
class Worker:
    """A process, as its parent sees it."""

    pid: int
    channel: socket.socket
    began: float
    given: int = 0
    """Connections so far."""
    on_the_way: deque[Arrival] = field(default_factory=deque)
    """Connections that it does not have yet: if it dies, they can go to another one."""
    up: bool = False
    taking: bool = False
    """It takes connections: it is up, and does not leave."""
    leaving: bool = False
    """It was told to end, and waits for word that no more connections come."""
    _number: bytes = b""

    def hear(self, words: bytes) -> None:
        """Note what it says."""
        for i in range(len(words)):
            word = words[i : i + 1]
            if word == TAKEN:
                self.on_the_way.popleft().connection.close()
            elif word == UP:
                self.up = self.taking = True
            elif word == LEAVING:
                self.leaving = True
            else:
                self._number += word

    def give(self, arrival: Arrival) -> bool:
        """Give it a connection, which this owns then; false where it does not take it."""
        try:
            socket.send_fds(self.channel, [arrival.word], [arrival.connection.fileno()])
        except ConnectionError:
            self.taking = False  # it has been told to stop, or has ended
            return False
        except OSError:
            return False  # it has yet to take what it got before
        self.given += 1
        self.on_the_way.append(arrival)
        return True

    def stop(self) -> bool:
        """Let it drain: nothing more comes. False where it has yet to take what it got before."""
        try:
            self.channel.send(STOP)
        except BlockingIOError:
            return False
        except OSError:
            return True  # it knows, or has just ended
        self.channel.shutdown(socket.SHUT_WR)
        return True

    @property
    def left(self) -> bool:
        """Tell whether it wants to leave, and nothing more is given to it."""
        return self.leaving and not self.taking

    @property
    def dropped(self) -> int:
        """Give the number of exchanges that took too long to be finished."""
        return int(self._number or 0)


class Seat:
    """The place of a worker and, one after the other, of those that replace it.

    ``closed`` holds one number, shared with the worker: the connections that it was given and that
    have come to an end.
    """

    def __init__(self, closed: memoryview) -> None:
        self.closed = closed
        self.worker: Worker | None = None
        self.due = 0.0
        """When the next worker starts, on the clock of ``time.monotonic``, if there is none."""
        self._early_ends = 0

    @property
    def open(self) -> int:
        """Give the number of connections that the worker has."""
        return 0 if self.worker is None else self.worker.given - int(self.closed[0])

    def vacate(self, began: float, now: float) -> float:
        """Note the end of a worker; gives the seconds until the next one starts."""
        self.worker = None
        pause = 0.0
        if now - began >= _LASTING:
            self._early_ends = 0
        else:
            pause = min(_FIRST_PAUSE * 2.0 ** min(self._early_ends, 16), _LONGEST_PAUSE)
            self._early_ends += 1
        self.due = now + pause
        return pause


def how_it_ended(code: int) -> str:
    """Say it in words, from the exit code, which is negative for a signal."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"
