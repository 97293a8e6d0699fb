"""The open connections of a listener: who gives way where file descriptors run out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from gateway.listener.client_shares import client_of
from gateway.listener.connection_host import ListenerConnection
from gateway.system.buffers import STALLED
from gateway.system.descriptors import descriptor_limit, exceeds_share

_ROOM_SHARE = 4
"""One of so many idle or stalled connections of a client is closed at a time."""
_SCARCE_SHARE = 3 / 4
"""Above this share of open descriptors, idle connections must not hold ``_IDLE_SHARE`` of all, as
connections to servers are made only while there are free ones."""
_IDLE_SHARE = 1 / 8
_CROWDED_SHARE = 7 / 8
"""Above this share of open descriptors, a client with more than half of all connections makes room
for others. Half of the rest is for connections to servers: see ``MAX_DESCRIPTOR_SHARE``."""
_CROWD_SHARE = 1 / 8
"""A client with fewer connections than this share of all descriptors takes nobody's room."""
_CHECK_INTERVAL = 10e-6
"""Minimum seconds between two searches for room, for each connection: they look at all."""
_MIN_STALL = 2 * STALLED
"""Seconds: a new body begins at ``STALLED``, so its client has as long to send some."""
_LOG_INTERVAL = 10.0
"""Seconds in which each kind of connection that had to go is logged once."""

_STALLED_CALL = "the request did not go on, and others needed the file descriptor"

_REFUSED = "refused %d new ones"
_CLOSED_IDLE = "closed %d of its %d idle ones"
_DROPPED = "closed %d whose requests did not go on"

_log = logging.getLogger("tensorgate.listener")


class OpenConnections:
    """Keeps the connections of a listener, each with its client, the oldest first."""

    def __init__(self) -> None:
        self._clients: dict[ListenerConnection, str] = {}
        self._counts: dict[str, int] = {}
        """How many connections each client has, with the pending ones."""
        self._total = 0
        self._next_search = 0.0
        self._pending: dict[int, str] = {}
        """The clients of admitted connections that are not added yet, by their descriptors."""
        self._refused = 0
        """Connections since the last one that was logged."""
        self._log_after: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[ListenerConnection]:
        return iter(self._clients)

    def add(self, connection: ListenerConnection) -> None:
        """Add a new connection."""
        transport = connection.transport
        client = client_of(transport.get_extra_info("peername"))
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self.forget(sock.fileno())
        self._clients[connection] = client
        self._count(client, 1)

    def replace(self, old: ListenerConnection, new: ListenerConnection) -> None:
        """Let another protocol serve a connection."""
        client = self._clients.pop(old, None)
        if client is None:
            self.add(new)
        else:
            self._clients[new] = client

    def discard(self, connection: ListenerConnection) -> None:
        """Remove a connection that is closed."""
        client = self._clients.pop(connection, None)
        if client is not None:
            self._count(client, -1)

    def forget(self, descriptor: int) -> None:
        """Count an admitted connection no more, unless it was added."""
        client = self._pending.pop(descriptor, None)
        if client is not None:
            self._count(client, -1)

    def _count(self, client: str, change: int) -> None:
        self._total += change
        self._counts[client] = self._counts.get(client, 0) + change
        if not self._counts[client]:
            del self._counts[client]

    def admit(self, descriptor: int, client: str) -> bool:
        """Count a new connection until it is added or forgotten; False if it has to go.

        Where descriptors are scarce, it makes room. Where they are crowded, a client with more than
        half of all connections gets none more. An idle one of it makes room for its next one: what
        closes now is free a little later, and this one would take what is kept for others.
        """
        if not self._has_room(descriptor, client):
            return False
        self._pending[descriptor] = client
        self._count(client, 1)
        return True

    def _has_room(self, descriptor: int, client: str) -> bool:
        if not exceeds_share(descriptor, _SCARCE_SHARE):
            return True
        is_crowded, now = exceeds_share(descriptor, _CROWDED_SHARE), time.monotonic()
        if now >= self._next_search:
            self._next_search = now + _CHECK_INTERVAL * len(self)
            max_idle = int(descriptor_limit() * _IDLE_SHARE)
            crowd = self._crowd() if is_crowded else None
            self._make_room(now, crowd, client, max_idle)
        if not is_crowded or not self._is_crowd(client):
            return True
        self._refused += 1
        if self._warn(_REFUSED, (self._refused,), client, now):
            self._refused = 0
        return False

    def make_room(self) -> bool:
        """Close connections, as descriptors have run out; return whether there were any to close.

        A client with more than half of all loses idle ones, else those that wait for it. If there
        is none, the client with the most idle ones loses some: else one client that opens
        connections, and sends nothing, would lock out all others and the probes.
        """
        return self._make_room(time.monotonic(), self._crowd())

    def _make_room(
        self, now: float, crowd: str | None, client: str | None = None, max_idle: int = 0
    ) -> bool:
        """Make room, perhaps for a new connection of a client; return whether it was made.

        The crowd's own new connection ends none that is in use. ``max_idle`` connections of others
        may stay idle.
        """
        idle = self._idle()
        if crowd is not None:
            if crowd in idle:
                return self._close_idle(crowd, idle[crowd], now)
            if client != crowd and self._drop_stalled(crowd, now):
                return True
        if sum(map(len, idle.values())) <= max_idle:
            return False
        most = max(idle, key=lambda each: len(idle[each]))
        return self._close_idle(most, idle[most], now)

    def _is_crowd(self, client: str) -> bool:
        """Tell whether a client has so many connections that others may find no descriptor."""
        count = self._counts.get(client, 0)
        return 2 * count > self._total and count > descriptor_limit() * _CROWD_SHARE

    def _crowd(self) -> str | None:
        """Return the client that has so many, if there is one."""
        most = max(self._counts, key=lambda client: self._counts[client], default="")
        return most if self._is_crowd(most) else None

    def _idle(self) -> dict[str, list[ListenerConnection]]:
        """Return the idle connections of each client that has any."""
        idle: dict[str, list[ListenerConnection]] = {}
        for connection, client in self._clients.items():
            if connection.is_idle and not connection.transport.is_closing():
                idle.setdefault(client, []).append(connection)
        return idle

    def _close_idle(self, client: str, idle: list[ListenerConnection], now: float) -> bool:
        """Close some of a client's idle connections; return True."""
        # Of what was written, some may wait for the client: it would be cut short.
        idle.sort(key=lambda each: each.transport.get_write_buffer_size() > 0)
        gone = _part(idle)
        for each in gone:
            each.transport.abort()
        self._warn(_CLOSED_IDLE, (len(gone), len(idle)), client, now)
        return True

    def _drop_stalled(self, client: str, now: float) -> bool:
        """Drop some connections of a client that wait for it; return whether there were any."""
        waits = {
            each: each.seconds_stalled(now)
            for each, owner in self._clients.items()
            if owner == client
        }
        stalled = [each for each, seconds in waits.items() if seconds >= _MIN_STALL]
        stalled.sort(key=lambda each: -waits[each])
        gone = _part(stalled)
        for each in gone:
            try:
                each.drop(_STALLED_CALL)
            except Exception:  # others are to be dropped, and the new connection is to be served
                _log.exception("a connection failed, and is aborted")
                each.transport.abort()
        if gone:
            self._warn(_DROPPED, (len(gone),), client, now)
        return bool(gone)

    def _warn(self, what: str, counts: tuple[int, ...], client: str, now: float) -> bool:
        """Log what was done to a client, at a limited rate; return whether it was logged."""
        if now < self._log_after.get(what, 0.0):
            return False
        self._log_after[what] = now + _LOG_INTERVAL
        _log.warning(
            "too many open files: %s has %d of %d connections, and others need room: %s. If it is"
            " a load balancer, allow the gateway more open files (ulimit -n)",
            client or "a Unix socket",
            self._counts.get(client, 0),
            self._total,
            what % counts,
        )
        return True


def _part(found: list[ListenerConnection]) -> list[ListenerConnection]:
    """Return the first ones of those that may go."""
    return found[: -(-len(found) // _ROOM_SHARE)]
