"""Accounts for buffered bytes, and sizes the read window of each stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Final, Protocol

MAX_WINDOW: Final = 640 * 1024
"""Bytes of a body that are buffered before reading is paused: the tensors of an image."""
MIN_WINDOW: Final = 16 * 1024
"""The same with very many streams; then it is also the size of a read."""

MIN_STREAM_BYTES: Final = 4 * MIN_WINDOW
"""Bytes that each stream may always take: a window, a read beyond it, and as much on the connection
that sends it."""

_WINDOW_SHARE: Final = 8
"""All windows together take an eighth of the limit. Reads beyond them and unsent bytes take more;
the rest is for buffered bodies."""

_HEADS_SHARE: Final = 8
"""The heads of clients take an eighth of the limit at most: calls are admitted beside them."""

_SHARED_MEMORY_SHARE = 4
"""Memory shared with servers takes a quarter of the limit at most: bodies keep the rest."""

NO_ROOM: Final = "the gateway buffers too much already (limits.max_buffered_bytes)"
"""Why a head is refused, or dropped."""

MANY_STREAMS: Final = 8
"""Bodies that a connection, or a client, has at most at a time if it is a usual one."""
STALLED: Final = 1.0
"""Seconds without a byte after which a body of a connection with more may make room for a call.
A body is slow if it takes as long for what ``ReservedBytes.progress`` tells."""
STALLED_ALONE: Final = 5.0
"""Seconds without a byte on other connections: slow clients pause so long, too."""
PROGRESS: Final = MIN_WINDOW // 2
"""Bytes that each read brings at least if so many wait, even where windows are smallest."""
_PROGRESS_SHARE: Final = MIN_STREAM_BYTES // PROGRESS
"""A body that holds more must bring this part of it in time, an eighth."""
MAX_PROGRESS: Final = 2**20
"""Bytes that are always enough: a usual client uploads faster than that many in ``STALLED``."""
_SEARCH_INTERVAL: Final = 0.2
"""Seconds between two searches for bodies that may end: each looks at all that are in transit."""
_SEARCH_REST: Final = 10
"""The time after a search, in times of what it took: searches take a tenth of the time at most."""

_UNBOUNDED: Final = 2**62


def _ignore() -> None:
    """Ignore a refusal."""


class ReservedBytes:
    """What one call has reserved: it counts for its client, and where a body of the call ends."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        """Whose call it is; see ``client_of``."""
        self.size = 0
        self.is_leaving = False
        """Whether a body of the call makes room: what it has reserved counts as given back."""

    @property
    def progress(self) -> int:
        """Return the bytes that a body of the call must bring, or take, in time."""
        return min(MAX_PROGRESS, (MIN_STREAM_BYTES + self.size) // _PROGRESS_SHARE)


NOTHING_RESERVED: Final = ReservedBytes()
"""That of bodies that are of no client's call."""


class BodyProgress:
    """Measures how long the reader of a body has waited for its client, by ``time.monotonic``.

    Time in which the reader does not wait, as for a slow server, does not count.
    """

    def __init__(self) -> None:
        self._waits_since = 0.0
        self._waited = STALLED  # so that whoever opens ever new bodies does not seem fast
        self._received = 0

    def begin_wait(self, now: float) -> None:
        """Note that the reader waits for more, unless it does already."""
        if not self._waits_since:
            self._waits_since = now

    def receive(self, size: int, progress: int = PROGRESS) -> None:
        """Count bytes that came; so many in all are ``progress``."""
        self._received += size
        if self._received >= progress:
            self._received, self._waited = 0, 0.0
        elif self._waits_since:
            self._waited += time.monotonic() - self._waits_since
        self._waits_since = 0.0

    @property
    def is_waited_for(self) -> bool:
        """Whether the reader waits for more."""
        return self._waits_since > 0.0

    def silence(self, now: float) -> float:
        """Return for how many seconds the reader waits without a byte; 0 if it does not wait."""
        return now - self._waits_since if self._waits_since else 0.0

    def slowness(self, now: float) -> float:
        """Return for how many seconds the reader has waited since there was progress.

        A new body begins at ``STALLED``.
        """
        return self._waited + self.silence(now)


class Body(Protocol):
    """A body that is still arriving, or a response that its client has yet to read."""

    @property
    def progress(self) -> BodyProgress:
        """Return how fast the client sends, or reads."""

    @property
    def reserved(self) -> ReservedBytes:
        """Return what its call has reserved."""

    def may_pause(self) -> bool:
        """Tell whether its client may have nothing to say for a while, as in a gRPC stream."""

    def is_reading(self) -> bool:
        """Tell whether the gateway reads what the client sends: else it is not the one to wait."""

    def fail_body(self, error: Exception) -> None:
        """End the body: its reader gets this error, after what was received.

        A client that does not read gets none.
        """


class _Client:
    """The connections of one client that have streams, and what the client holds."""

    def __init__(self) -> None:
        self.shares: dict[BufferShare, None] = {}
        self.streams = 0
        self.reserved = 0

    @property
    def held(self) -> int:
        """Return how many streams it holds, or the room of as many."""
        return self.streams + self.reserved // MIN_STREAM_BYTES


class BufferAccount:
    """Counts the bytes that a process buffers; ``limit`` is for all of them.

    A stream is a body that is still arriving. Its window is what it may buffer before reading is
    paused. Windows shrink as the number of streams grows, down to one small read each. A response
    that waits for its client is one stream more for each ``MIN_STREAM_BYTES`` that wait.

    Each connection counts in a ``BufferShare`` of its own.
    """

    def __init__(self, limit: int = _UNBOUNDED) -> None:
        self.reserved = 0
        """Bytes of buffered bodies, as calls have reserved them."""
        self.buffered = 0
        """Bytes that connections have read ahead, or could not send yet, with their heads."""
        self.streams = 0
        self.unread = 0
        """Streams that unread responses count as; they need no window."""
        self.heads = 0
        """Bytes of clients' heads: those that are incomplete, and large ones of calls."""
        self.holders_of_heads: dict[BufferShare, None] = {}
        """The shares that have such bytes."""
        self._clients: dict[str, _Client] = {}
        """Those that have streams which may end if others need the room, or have reserved bytes."""
        self._of_clients = _Client()
        """What these hold together."""
        self._slow: dict[Body, BufferShare] = {}
        """Bodies that were slow at the last search, of clients that hold much; the last is to end
        first."""
        self._silent: dict[Body, BufferShare] = {}
        """The same for bodies of which nothing has come."""
        self._leaving: dict[Body, tuple[BufferShare, int]] = {}
        """Bodies that count no more, and end if the next read brings nothing; each with its bytes
        of a response. These, and what their calls have reserved, count as given back meanwhile."""
        self._next_search = 0.0
        self.window = MAX_WINDOW
        """Bytes that a stream may buffer."""
        self._whole_limit = limit
        self.limit = limit
        """Bytes of all connections and calls together, beside shared memory."""
        self.shared = 0
        """Bytes of memory shared with servers, whether calls use it or not."""
        self.on_refusal: Callable[[], None] = _ignore
        """Called for each request that is refused because too much is buffered."""

    @property
    def total(self) -> int:
        """Return the reserved, buffered and shared bytes."""
        return self.reserved + self.buffered + self.shared

    @property
    def free(self) -> int:
        """Return the bytes left after each stream's minimum; negative if overcommitted."""
        return self.limit - self.reserved - max(self.buffered, self.streams * MIN_STREAM_BYTES)

    @property
    def has_room_for_heads(self) -> bool:
        """Whether the heads are within their share of the limit, and all bytes within the limit."""
        return self.heads <= self.limit // _HEADS_SHARE and self.free >= 0

    @property
    def read_size(self) -> int:
        """Return the size of the next read."""
        return self.window if self.free > 0 else MIN_WINDOW

    def make_room(self, client: str = "") -> bool:
        """End a stream for a call of ``client`` that finds no room; return whether there was one.

        Whoever holds most gives way: a client that holds more than its fair share, and than this
        client, loses its slowest one, if that is slow. Otherwise a silent one ends: those of the
        connection with the most streams first, then that which is silent for the longest time.
        If buffered bytes take the room, and not the streams, only unread responses are ended.

        The stream gives back its room at once. It ends when all connections have been read once
        more, as bytes may wait there; if they show progress, it goes on, and counts again.
        """
        now = time.monotonic()
        if now >= self._next_search:
            self._search(now)
            done = time.monotonic()
            self._next_search = max(now + _SEARCH_INTERVAL, done + _SEARCH_REST * (done - now))
        return self._end_slow(client, now) or self._end_silent(now)

    def _end_slow(self, client: str, now: float) -> bool:
        own = self._held_by(client)
        holders = len(self._clients) + (client not in self._clients)
        room = (self.limit - self.reserved + self._of_clients.reserved) // MIN_STREAM_BYTES
        if self._is_filled_by_bytes:
            room = self._of_clients.held
        fair = max(MANY_STREAMS, room // holders)
        while self._slow:
            body, share = self._slow.popitem()
            if not self._takes_room(body, share):
                continue
            if self._held_by(share.client) <= max(fair, own):
                self._slow[body] = share  # for a call of another client
                return False
            if body.progress.is_waited_for and share.is_slow(body, now):
                self._leave(body, share, share.is_slow)
                return True
        return False

    def _end_silent(self, now: float) -> bool:
        while self._silent:
            body, share = self._silent.popitem()
            if self._takes_room(body, share) and share.is_silent(body, now):
                self._leave(body, share, share.is_silent)
                return True
        return False

    def _search(self, now: float) -> None:
        """Find the bodies that may end, in the order in which they have to."""
        slow: list[tuple[int, float, int, Body, BufferShare]] = []
        silent: list[tuple[bool, int, float, int, Body, BufferShare]] = []
        for client in self._clients.values():
            found: list[tuple[float, Body, BufferShare]] = []
            for share in client.shares:
                quiet: list[tuple[float, Body]] = []
                for body in share.bodies:
                    progress = body.progress  # once, as it may take a system call
                    if not progress.is_waited_for or not body.is_reading():
                        continue
                    slowness, silence = progress.slowness(now), progress.silence(now)
                    if slowness >= STALLED and client.held > MANY_STREAMS:
                        found.append((slowness, body, share))
                    if share.is_stalled(body, silence):
                        quiet.append((silence, body))
                quiet.sort(key=itemgetter(0), reverse=True)
                for index, (seconds, body) in enumerate(quiet):
                    # Each that ends leaves one less to its connection.
                    left = len(share.bodies) - index
                    # Those that take no more room than others, and may be silent, end last.
                    key = not body.may_pause(), left, seconds, len(silent)
                    silent.append((*key, body, share))
            found.sort(key=itemgetter(0), reverse=True)
            left = client.held
            for seconds, body, share in found:
                slow.append((left, seconds, len(slow), body, share))
                left -= _streams_for(share.bodies[body]) + body.reserved.size // MIN_STREAM_BYTES
        self._slow = {entry[3]: entry[4] for entry in sorted(slow)}
        self._silent = {entry[4]: entry[5] for entry in sorted(silent)}

    def _takes_room(self, body: Body, share: BufferShare) -> bool:
        holds_bytes = share.bodies[body] > 0 or body.reserved.size >= MIN_STREAM_BYTES
        return holds_bytes or not self._is_filled_by_bytes

    @property
    def _is_filled_by_bytes(self) -> bool:
        """Whether buffered bytes take more room than the minimum of all streams."""
        return self.buffered > self.streams * MIN_STREAM_BYTES

    def _held_by(self, client: str) -> int:
        found = self._clients.get(client)
        return 0 if found is None else found.held

    def _leave(
        self, body: Body, share: BufferShare, may_end: Callable[[Body, float], bool]
    ) -> None:
        """Count a body no more, and end it after the next read if it may still end then."""
        size = share.bodies[body]
        share.close_stream(body)
        self._leaving[body] = share, size
        self.buffered -= size
        self._set_leaving(body.reserved, True)
        loop = asyncio.get_running_loop()
        # The first callback runs before the sockets are read once more, the second one after that.
        loop.call_soon(loop.call_soon, self._end, body, may_end)

    def _end(self, body: Body, may_end: Callable[[Body, float], bool]) -> None:
        left = self._leaving.get(body)
        if left is None:
            return  # it has ended itself
        self.forget(body)
        share, size = left
        stall_error = share.stall_error
        if stall_error is None:
            return  # its connection has
        share.open_stream(body, size)
        if may_end(body, time.monotonic()):
            self._set_leaving(body.reserved, True)  # until the call ends, at once
            body.fail_body(stall_error())

    def _set_leaving(self, call: ReservedBytes, is_leaving: bool) -> None:
        if call.is_leaving != is_leaving:
            call.is_leaving = is_leaving
            self._count_reserved(-call.size if is_leaving else call.size, call.client)

    def reserve(self, size: int, call: ReservedBytes | None = None) -> None:
        """Count so many reserved bytes more, or fewer; those of a ``call`` count for its client."""
        if call is None:
            self.reserved += size
            return
        call.size += size
        if not call.is_leaving:
            self._count_reserved(size, call.client)

    def _count_reserved(self, size: int, name: str) -> None:
        self.reserved += size
        self._of_clients.reserved += size
        client = self._client(name)
        client.reserved += size
        self._forget_if_empty(name, client)

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client()
        return client

    def _forget_if_empty(self, name: str, client: _Client) -> None:
        if not (client.shares or client.reserved):
            del self._clients[name]

    def add_streams(self, share: BufferShare, count: int) -> None:
        """Count so many streams more of a client's connection."""
        client = self._client(share.client)
        client.shares[share] = None
        client.streams += count
        self._of_clients.streams += count

    def remove_streams(self, share: BufferShare, count: int, *, is_last: bool) -> None:
        """Count so many streams of a client's connection no more; the last one may be of them."""
        client = self._clients.get(share.client)
        if client is None or share not in client.shares:
            return
        client.streams -= count
        self._of_clients.streams -= count
        if is_last:
            del client.shares[share]
            self._forget_if_empty(share.client, client)

    def forget(self, body: Body) -> None:
        """Keep no reference to a body that has ended."""
        self._slow.pop(body, None)
        self._silent.pop(body, None)
        left = self._leaving.pop(body, None)
        if left is not None:
            self.buffered += left[1]
            self._set_leaving(body.reserved, False)

    def set_limit(self, limit: int) -> None:
        """Change the limit of buffered bytes and shared memory together."""
        self._whole_limit = limit
        self.count_shared(0)

    def count_shared(self, size: int) -> None:
        """Count so many bytes of shared memory more, or fewer: the limit is for the rest.

        Raises OSError if it would be more than a quarter of the limit, or than is free.
        """
        most = self._whole_limit // _SHARED_MEMORY_SHARE
        if size > 0 and size > min(self.free, most - self.shared):
            raise OSError("it may take a quarter of limits.max_buffered_bytes, if that is free")
        self.shared += size
        self.limit = self._whole_limit - min(self.shared, most)  # the limit may be lower by now
        self.resize_windows()

    def resize_windows(self) -> None:
        """Divide the windows' part of the limit among the streams."""
        share = self.limit // (_WINDOW_SHARE * max(1, self.streams - self.unread))
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
        self.client = ""
        """Whose connection it is: clients share the room for streams; see ``client_of``."""
        self.streams = 0
        self.unread = 0
        """Streams that unread responses count as."""
        self.bodies: dict[Body, int] = {}
        """Those that are still arriving, and unread responses, with the bytes that wait of these.
        """
        self.drop_head: Callable[[], None] | None = None
        """Gives up the connection's largest head, and with it what it is the head of."""

        self.stall_error: Callable[[], Exception] | None = None
        """Makes the error of a body that stalls while others need the room; None if none ends."""

    def change(self, size: int) -> None:
        """Add ``size`` to the buffered bytes; it may be negative."""
        self.buffered += size
        self.account.buffered += size

    def open_stream(self, body: Body, size: int = 0) -> None:
        """Count a body that is still arriving, or a response of which ``size`` bytes wait."""
        self.bodies[body] = size
        count = _streams_for(size)
        self._change_streams(count, size)
        if self.stall_error is not None:
            self.account.add_streams(self, count)

    def close_stream(self, body: Body) -> None:
        """Stop counting such a body."""
        self.account.forget(body)
        size = self.bodies.pop(body, None)
        if size is None:
            return  # it had to make room
        count = _streams_for(size)
        self._change_streams(-count, size)
        self.account.remove_streams(self, count, is_last=not self.bodies)

    def _change_streams(self, count: int, size: int) -> None:
        self.streams += count
        self.account.streams += count
        if size:
            self.unread += count
            self.account.unread += count
        self.account.resize_windows()

    def is_slow(self, body: Body, now: float) -> bool:
        """Tell whether a body that the gateway reads makes no progress in time."""
        return body.progress.slowness(now) >= STALLED and body.is_reading()

    def is_silent(self, body: Body, now: float) -> bool:
        """Tell whether nothing comes of a body that the gateway reads, for longer than usual."""
        return self.is_stalled(body, body.progress.silence(now)) and body.is_reading()

    def is_stalled(self, body: Body, silence: float) -> bool:
        """Tell whether so many seconds without a byte of a body are longer than usual."""
        if len(self.bodies) > MANY_STREAMS:
            return silence >= STALLED
        return silence >= STALLED_ALONE and not body.may_pause()

    def hold_head(self, size: int) -> bool:
        """Count so many bytes of a head more, if there is room for them; return whether there is.

        If there is none, connections that hold more bytes of heads drop theirs, the largest first.
        """
        self.change_heads(size)
        account = self.account
        while size > 0 and not account.has_room_for_heads:
            account.on_refusal()
            largest = max(account.holders_of_heads, key=attrgetter("heads"))
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
        self.account.unread -= self.unread
        self.account.resize_windows()
        self.account.remove_streams(self, self.streams, is_last=True)
        for body in self.bodies:
            self.account.forget(body)
        self.drop_head = self.stall_error = None
        self.account = BufferAccount()  # of nobody, for what ends later


def _streams_for(size: int) -> int:
    """Return how many streams a body counts as of which ``size`` bytes wait for its client."""
    return max(1, -(-size // MIN_STREAM_BYTES))
