"""The place of a worker, and who sits there."""

from __future__ import annotations

import signal
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.workers.ipc import CLIENT, DRAIN, DRAINED, EXIT, LEAVING, READY, RECEIVED, STOPPING

_LASTING = 10.0
"""Seconds after which a worker's end has nothing to do with its start."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the next start in a place where one worker after the other ends early."""


@dataclass(frozen=True, slots=True)
class PendingConnection:
    """A connection, and the word with which it is given to a worker: CLIENT or OPERATOR."""

    connection: socket.socket
    word: bytes


@dataclass(slots=True)
class WorkerProcess:
    """A process, as its parent sees it."""

    pid: int
    channel: socket.socket
    began: float
    given: int = 0
    """Connections so far."""
    on_the_way: deque[PendingConnection] = field(default_factory=deque)
    """Connections that it does not have yet: if it dies, they can go to another one."""
    up: bool = False
    taking: bool = False
    """It takes clients: it is up, and neither leaves nor drains."""
    leaving: bool = False
    """It was told to end, and waits for word that no more connections come."""
    stopped: bool = False
    """It knows that no more clients come, and drains."""
    drained: bool = False
    """It serves no client any more."""
    ended: bool = False
    """It knows that no more operators come, or is gone."""
    _number: bytes = b""

    def hear(self, words: bytes) -> None:
        """Note what it says."""
        for i in range(len(words)):
            word = words[i : i + 1]
            if word == RECEIVED:
                self.on_the_way.popleft().connection.close()
            elif word == READY:
                self.up = True
                self.taking = not self.stopped
            elif word == LEAVING:
                self.leaving = True
            elif word == DRAINED:
                self.drained = True
            else:
                self._number += word

    def takes(self, word: bytes) -> bool:
        """Tell whether it takes connections with this word: operators' also while it drains."""
        return self.taking if word == CLIENT else self.up and not self.ended

    def give(self, arrival: PendingConnection) -> bool:
        """Give it a connection, which this owns then; false where it does not take it."""
        if arrival.word == CLIENT and self.stopped:
            return False
        try:
            socket.send_fds(self.channel, [arrival.word], [arrival.connection.fileno()])
        except ConnectionError:
            self.taking = False
            self.ended = True
            return False
        except OSError:
            return False  # it has yet to take what it got before
        self.given += 1
        self.on_the_way.append(arrival)
        return True

    def warn(self) -> None:
        """Tell it that the gateway stops, if it takes that now: clients still come."""
        self._tell(STOPPING)

    def stop(self) -> bool:
        """Let it drain: no more clients come. False where it has yet to take what it got before."""
        if not self.stopped and self._tell(DRAIN):
            self.stopped = True
            self.taking = False
        return self.stopped

    def end(self) -> bool:
        """Let it end: nothing more comes. False where it has yet to take what it got before."""
        if not self.ended and self._tell(EXIT):
            self.ended = True
            with suppress(OSError):  # it has just ended
                self.channel.shutdown(socket.SHUT_WR)
        return self.ended

    def _tell(self, word: bytes) -> bool:
        """Say it, if there is somebody to hear it; false where that is to be tried again."""
        try:
            self.channel.send(word)
        except BlockingIOError:
            return False
        except OSError:
            pass  # it has just ended
        return True

    @property
    def left(self) -> bool:
        """Tell whether it wants to leave, and nothing more is given to it."""
        return self.leaving and not self.taking

    @property
    def dropped(self) -> int:
        """Give the number of exchanges that took too long to be finished."""
        return int(self._number or 0)


class WorkerSlot:
    """The place of a worker and, one after the other, of those that replace it.

    ``closed`` holds one number, shared with the worker: the connections that it was given and that
    have come to an end.
    """

    def __init__(self, closed: memoryview) -> None:
        self.closed = closed
        self.worker: WorkerProcess | None = None
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


def exit_text(code: int) -> str:
    """Say it in words, from the exit code, which is negative for a signal."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"
