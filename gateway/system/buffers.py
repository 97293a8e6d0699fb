"""Accounts for buffered bytes, and sizes the read window of each stream."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol

MAX_WINDOW = 640 * 1024
"""Bytes of a body that are buffered before reading is paused: the tensors of an image."""
MIN_WINDOW = 16 * 1024
"""The same with very many streams; then it is also the size of a read."""

MIN_STREAM_BYTES = 4 * MIN_WINDOW
"""Bytes that each stream may always take: a window, a read beyond it, and as much on the connection
that sends it."""

_WINDOW_SHARE = 8
"""All windows together take an eighth of the limit. Reads beyond them and unsent bytes take more;
the rest is for buffered bodies."""

_HEADS_SHARE = 8
"""The heads of clients take an eighth of the limit at most: calls are admitted beside them."""

NO_ROOM: Final = "the gateway buffers too much already (limits.max_buffered_bytes)"
"""Why a head is refused, or dropped."""

MANY_STREAMS: Final = 8
"""Bodies that a connection has at most at a time if its client is a usual one."""
STALLED: Final = 1.0
"""Seconds without a byte after which a body of a connection with more may make room for a call."""
STALLED_ALONE: Final = 5.0
"""The same for other connections: slow clients pause so long, too."""
_SEARCH_INTERVAL: Final = 0.2
"""Seconds between two searches for bodies that stall: each looks at all that are in transit."""

_UNBOUNDED = 2**62


def _ignore() -> None:
    """Ignore a refusal."""


class Body(Protocol):
    """A body that is still arriving."""

    waits_since: float
    """When its reader began to wait for more, by ``time.monotonic``; 0 if it does not wait."""

    def may_pause(self) -> bool:
        """Tell whether its client may have nothing to say for a while, as in a gRPC stream."""

    def fail_body(self, error: Exception) -> None:
        """End the body: its reader gets this error, after what was received."""


class BufferAccount:
    """Counts the bytes that a process buffers; ``limit`` is for all of them.

    A stream is a body that is still arriving. Its window is what it may buffer before reading is
    paused. Windows shrink as the number of streams grows, down to one small read each.

    Each connection counts in a ``BufferShare`` of its own.
    """

    def __init__(self, limit: int = _UNBOUNDED) -> None:
        self.reserved = 0
        """Bytes of buffered bodies, as calls have reserved them."""
        self.buffered = 0
        """Bytes that connections have read ahead, or could not send yet, with their heads."""
        self.streams = 0
        self.heads = 0
        """Bytes of clients' heads: those that are incomplete, and large ones of calls."""
        self.holders_of_heads: dict[BufferShare, None] = {}
        """The shares that have such bytes."""
        self.holders_of_streams: dict[BufferShare, None] = {}
        """The shares that have streams which end if they stall and others need the room."""
        self._stalled: list[tuple[int, float, int, BufferShare]] = []
        """A heap of those whose stream had stalled at the last search."""
        self._next_search = 0.0
        self._numbers = count()
        self.window = MAX_WINDOW
        """Bytes that a stream may buffer."""
        self._limit = limit
        self.on_refusal: Callable[[], None] = _ignore
        """Called for each request that is refused because too much is buffered."""

    @property
    def limit(self) -> int:
        """Return the limit of all bytes."""
        return self._limit

    @property
    def total(self) -> int:
        """Return the reserved and buffered bytes."""
        return self.reserved + self.buffered

    @property
    def free(self) -> int:
        """Return the bytes left after each stream's minimum; negative if overcommitted."""
        return self._limit - self.reserved - max(self.buffered, self.streams * MIN_STREAM_BYTES)

    @property
    def has_room_for_heads(self) -> bool:
        """Whether the heads are within their share of the limit, and all bytes within the limit."""
        return self.heads <= self._limit // _HEADS_SHARE and self.free >= 0

    @property
    def read_size(self) -> int:
        """Return the size of the next read."""
        return self.window if self.free > 0 else MIN_WINDOW

    def make_room(self) -> bool:
        """End a stream that stalls, for a call that finds no room; return whether there was one.

        The connections with the most streams come first, then those that stall for the longest
        time. If not the streams take the room, none is ended.
        """
        if self.buffered > self.streams * MIN_STREAM_BYTES:
            return False
        now = time.monotonic()
        if now >= self._next_search:
            self._next_search = now + _SEARCH_INTERVAL
            self._stalled.clear()
            for share in self.holders_of_streams:
                self._note_stalled(share, now)
        while self._stalled:
            share = heapq.heappop(self._stalled)[-1]
            ended = share.end_stalled_stream(now)
            self._note_stalled(share, now)
            if ended:
                return True
        return False

    def _note_stalled(self, share: BufferShare, now: float) -> None:
        """Have a share end a stream for a next call, if one has stalled."""
        body = share.stalled_body(now)
        if body is not None:
            entry = (-share.streams, body.waits_since, next(self._numbers), share)
            heapq.heappush(self._stalled, entry)

    def set_limit(self, limit: int) -> None:
        """Change the limit."""
        self._limit = limit
        self.resize_windows()

    def resize_windows(self) -> None:
        """Divide the windows' part of the limit among the streams."""
        share = self._limit // (_WINDOW_SHARE * max(1, self.streams))
        self.window = max(MIN_WINDOW, min(MAX_WINDOW, share))


class BufferShare:
    """What one connection, with all its streams, has counted in an account.

    A client's connection calls ``release`` when it is lost: all that is still counted is given
    back then, whether calls and streams have ended or not. What a server has sent may be read
    after its connection is lost, and counts until the call ends.
    """

    def __init__(self, account: BufferAccount) -> None:
        self.account = account
        self.buffered = 0
        self.heads = 0
        """Bytes of heads, which are among the buffered ones."""
        self._bodies: dict[Body, None] = {}
        self.drop_head: Callable[[], None] | None = None
        """Gives up the connection's largest head, and with it what it is the head of."""

        self.stall_error: Callable[[], Exception] | None = None
        """Makes the error of a body that stalls while others need the room; None if none ends."""

    @property
    def streams(self) -> int:
        """Return the number of bodies that are still arriving."""
        return len(self._bodies)

    @property
    def window(self) -> int:
        """Return the bytes that a stream may buffer."""
        return self.account.window

    @property
    def read_size(self) -> int:
        """Return the size of the next read."""
        return self.account.read_size

    @property
    def free(self) -> int:
        """Return the bytes that the account has left."""
        return self.account.free

    def change(self, size: int) -> None:
        """Add ``size`` to the buffered bytes; it may be negative."""
        self.buffered += size
        self.account.buffered += size

    def open_stream(self, body: Body) -> None:
        """Count a body that is still arriving."""
        self._bodies[body] = None
        self.account.streams += 1
        self.account.resize_windows()
        if self.stall_error is not None:
            self.account.holders_of_streams[self] = None

    def close_stream(self, body: Body) -> None:
        """Stop counting such a body."""
        del self._bodies[body]
        self.account.streams -= 1
        self.account.resize_windows()
        if not self._bodies:
            self.account.holders_of_streams.pop(self, None)

    def stalled_body(self, now: float) -> Body | None:
        """Return the body that may end, as nothing has come for the longest time, or None."""
        if self.stall_error is None:
            return None
        has_many = self.streams > MANY_STREAMS
        waiting = [
            body for body in self._bodies if body.waits_since and (has_many or not body.may_pause())
        ]
        longest = min(waiting, key=_waits_since, default=None)
        patience = STALLED if has_many else STALLED_ALONE
        return None if longest is None or now - longest.waits_since < patience else longest

    def end_stalled_stream(self, now: float) -> bool:
        """End the stream of that body; return whether there was one."""
        body = self.stalled_body(now)
        if body is None or self.stall_error is None:
            return False
        body.fail_body(self.stall_error())
        return True

    def hold_head(self, size: int) -> bool:
        """Count so many bytes of a head more, if there is room for them; return whether there is.

        If there is none, connections that hold more bytes of heads drop theirs, the largest first.
        """
        self.change_heads(size)
        account = self.account
        while size > 0 and not account.has_room_for_heads:
            account.on_refusal()
            largest = max(account.holders_of_heads, key=_heads)
            before = largest.heads
            if before > self.heads and largest.drop_head is not None:
                largest.drop_head()
            if largest.heads == before:
                self.change_heads(-size)
                return False
        return True

    def change_heads(self, size: int) -> None:
        """Add ``size`` to the bytes of heads, whether there is room for them or not."""
        self.heads += size
        self.account.heads += size
        self.change(size)
        if self.heads:
            self.account.holders_of_heads[self] = None
        else:
            self.account.holders_of_heads.pop(self, None)

    def release(self) -> None:
        """Give back all that is counted, and count no more in the account."""
        self.change_heads(-self.heads)
        self.change(-self.buffered)
        self.account.streams -= self.streams
        self.account.resize_windows()
        self.account.holders_of_streams.pop(self, None)
        self.drop_head = self.stall_error = None
        self.account = BufferAccount()  # of nobody, for what ends later


def _heads(share: BufferShare) -> int:
    return share.heads


def _waits_since(body: Body) -> float:
    return body.waits_since
