"""What the parent has its workers do together, and what came of it."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gateway.system.files import POLL_INTERVAL
from gateway.workers.ipc import CONFIG_UPDATE
from gateway.workers.letters import DONE, MAX_REPLY_SIZE
from gateway.workers.seat import WorkerProcess

_AGAIN = 0.01
"""Seconds until a worker that has yet to take what it got before is sent the letter again."""
_PATIENCE = 30.0
"""Seconds for all workers to answer."""


@dataclass(frozen=True, slots=True)
class ConfigUpdate:
    """Say what changes: workers read the letter, and when they have, the parent does the rest.

    It listens on these sockets from then on, and closes those that are not among them; with each
    comes the word for who connects there, CLIENT or OPERATOR. ``patience`` is the time in seconds
    in which workers drain.
    """

    letter: bytes
    sockets: Mapping[socket.socket, bytes]
    patience: float


class ConfigSource(Protocol):
    """Who gives the parent orders; one after the other is carried out."""

    def look(self, wished: bool) -> ConfigUpdate | None:
        """Give new orders, if there are any; SIGHUP wishes that there are. Raises nothing."""

    def on_applied(self, faults: Mapping[int, str]) -> None:
        """Hear that orders are carried out, but for the workers with these ids, and why not."""


class _Delivery:
    """Has each worker read the letter of orders, and hears their answers."""

    def __init__(
        self,
        orders: ConfigUpdate,
        workers: Iterable[WorkerProcess],
        selector: selectors.BaseSelector,
    ) -> None:
        self.orders = orders
        self.faults: dict[int, str] = {}
        self._selector = selector
        self._unsent = list(workers)
        self._answers: dict[int, int] = {}
        self._until = time.monotonic() + _PATIENCE
        self._memory: int | None = None
        self.go_on()

    @property
    def over(self) -> bool:
        """Tell whether each worker has answered, or is gone."""
        return not self._unsent and not self._answers

    @property
    def due(self) -> float:
        """Tell when to go on, on the clock of ``time.monotonic``."""
        return min(self._until, time.monotonic() + _AGAIN) if self._unsent else self._until

    def go_on(self) -> None:
        """Send what could not be sent, and give up what takes too long."""
        self._unsent = [worker for worker in self._unsent if not self._send(worker)]
        if time.monotonic() < self._until:
            return
        late = [*self._answers.values(), *(worker.pid for worker in self._unsent)]
        self.faults.update(dict.fromkeys(late, f"no answer within {_PATIENCE:g} s"))
        self.close()

    def close(self) -> None:
        """Wait no more."""
        self._unsent.clear()
        for pipe in tuple(self._answers):
            self._forget(pipe)
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def leave(self) -> None:
        """Close, in a child, what is the parent's."""
        for descriptor in self._answers:
            os.close(descriptor)
        if self._memory is not None:
            os.close(self._memory)

    def _send(self, worker: WorkerProcess) -> bool:
        """Send a worker the letter; false where that is to be tried again."""
        if worker.channel.fileno() < 0:
            return True  # it has ended
        try:
            if self._memory is None:
                self._memory = _written(self.orders.letter)
            answer, reply = os.pipe()
        except OSError:
            return False  # too many open files, of which some may be closed soon
        try:
            socket.send_fds(worker.channel, [CONFIG_UPDATE], [self._memory, reply])
        except OSError as error:
            os.close(answer)
            # If it neither leaves nor has ended, it has yet to take what it got before.
            return isinstance(error, ConnectionError)
        finally:
            os.close(reply)
        self._answers[answer] = worker.pid
        self._selector.register(answer, selectors.EVENT_READ, partial(self._hear, answer))
        return True

    def _hear(self, pipe: int) -> None:
        pid = self._answers.get(pipe)
        if pid is None:
            return  # what else came in this turn has ended it all
        answer = os.read(pipe, MAX_REPLY_SIZE)
        self._forget(pipe)
        if answer not in (DONE, b""):  # one that ends does not answer, of which others tell
            self.faults[pid] = answer.decode(errors="replace")

    def _forget(self, pipe: int) -> None:
        del self._answers[pipe]
        self._selector.unregister(pipe)
        os.close(pipe)


class ReloadBroadcaster:
    """Looks for orders, and has them carried out, one after the other, without ever waiting."""

    def __init__(self, superior: ConfigSource, selector: selectors.BaseSelector) -> None:
        self._superior = superior
        self._selector = selector
        self._wished = False
        self._look_at = time.monotonic() + POLL_INTERVAL
        self._delivery: _Delivery | None = None

    def wish(self) -> None:
        """Ask for new orders as soon as none are under way."""
        self._wished = True

    @property
    def due(self) -> float:
        """Tell when to go on, on the clock of ``time.monotonic``."""
        if self._delivery is not None:
            return self._delivery.due
        return 0.0 if self._wished else self._look_at

    def go_on(
        self, workers: Iterable[WorkerProcess], execute: Callable[[ConfigUpdate], None]
    ) -> None:
        """Do what is due; what all workers have read is for the parent to execute."""
        if self._delivery is not None:
            self._delivery.go_on()
        elif time.monotonic() >= self.due:
            self._look(workers)
        delivery = self._delivery
        if delivery is not None and delivery.over:
            delivery.close()
            self._delivery = None
            execute(delivery.orders)
            self._superior.on_applied(delivery.faults)

    def close(self) -> None:
        """Carry nothing out any more."""
        if self._delivery is not None:
            self._delivery.close()

    @property
    def sockets(self) -> Mapping[socket.socket, bytes]:
        """Give those that orders under way are about."""
        return {} if self._delivery is None else self._delivery.orders.sockets

    def leave(self) -> None:
        """Close, in a child, what is the parent's."""
        if self._delivery is not None:
            self._delivery.leave()
        for sock in self.sockets:
            sock.close()

    def _look(self, workers: Iterable[WorkerProcess]) -> None:
        wished, self._wished = self._wished, False
        orders = self._superior.look(wished)
        self._look_at = time.monotonic() + POLL_INTERVAL
        if orders is not None:
            self._delivery = _Delivery(orders, workers, self._selector)


def _written(letter: bytes) -> int:
    memory = os.memfd_create("letter")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(letter)
    except OSError:
        os.close(memory)
        raise
    return memory
