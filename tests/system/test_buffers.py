import gc
import weakref

import numpy as np
import pytest

from gateway.system.buffers import (
    MANY_STREAMS,
    MAX_PROGRESS,
    MAX_WINDOW,
    MIN_STREAM_BYTES,
    MIN_WINDOW,
    PROGRESS,
    STALLED,
    STALLED_ALONE,
    BufferAccount,
    BufferShare,
)
from gateway.system.read_buffer import ReadBuffer
from tests.system.arriving_body import ArrivingBody, client_share, ended, turn_of_sockets

MIB = 2**20


@pytest.mark.parametrize("limit", [MIB, 64 * MIB])
def test_windows_of_many_streams_take_an_eighth_together(limit: int) -> None:
    account = BufferAccount(limit)
    share = BufferShare(account)
    windows = []
    while account.free >= MIN_STREAM_BYTES:
        share.open_stream(ArrivingBody())
        windows.append(account.window)
        assert account.window * account.streams <= max(limit // 8, MIN_WINDOW * account.streams)
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] == MIN_WINDOW
    assert account.streams == limit // MIN_STREAM_BYTES


def test_shared_memory_takes_a_quarter_of_the_limit_at_most_and_bodies_have_the_rest() -> None:
    account = BufferAccount(64 * MIB)
    account.count_shared(16 * MIB)
    assert (account.limit, account.free, account.total) == (48 * MIB, 48 * MIB, 16 * MIB)
    with pytest.raises(OSError, match="max_buffered_bytes"):
        account.count_shared(1)
    account.count_shared(-MIB)
    account.reserve(48 * MIB)
    with pytest.raises(OSError, match="max_buffered_bytes"):
        account.count_shared(MIB + 1)  # more than is free
    account.count_shared(MIB)
    account.set_limit(32 * MIB)
    assert account.limit == 24 * MIB  # not less, until it is given back
    account.count_shared(-16 * MIB)
    assert account.limit == 32 * MIB


def test_free_bytes_exclude_the_minimum_of_each_stream() -> None:
    account = BufferAccount(10 * MIN_STREAM_BYTES)
    share = BufferShare(account)
    account.reserved = MIN_STREAM_BYTES
    share.open_stream(ArrivingBody())
    assert account.free == 8 * MIN_STREAM_BYTES
    share.change(MIN_STREAM_BYTES - 1)  # within the stream's minimum
    assert account.free == 8 * MIN_STREAM_BYTES
    share.change(MIN_STREAM_BYTES + 1)
    assert account.free == 7 * MIN_STREAM_BYTES
    assert account.total == 3 * MIN_STREAM_BYTES
    account.set_limit(2 * MIN_STREAM_BYTES)
    assert account.free == -MIN_STREAM_BYTES


# Shares


class Holder:
    """A connection with one head, which is as large as its share tells."""

    def __init__(self, account: BufferAccount, can_drop: bool = True) -> None:
        self.share = BufferShare(account)
        self.dropped = 0
        if can_drop:
            self.share.drop_head = self.drop

    def drop(self) -> None:
        self.dropped += 1
        self.share.change_heads(-self.share.heads)


def test_release_gives_all_back_and_what_ends_later_counts_nowhere() -> None:
    account = BufferAccount(MIB)
    other, share = BufferShare(account), BufferShare(account)
    other.open_stream(ArrivingBody())
    other.change(10)
    bodies = [ArrivingBody() for _ in range(3)]
    for body in bodies:
        share.open_stream(body)
    share.change(1000)
    assert share.hold_head(500)
    assert (account.streams, account.buffered, account.heads) == (4, 1510, 500)
    share.release()
    share.close_stream(bodies[0])
    share.change(-1000)
    share.change_heads(-500)
    share.release()
    assert (account.streams, account.buffered, account.heads) == (1, 10, 0)
    assert not account.holders_of_heads
    assert account.window == MIB // 8


def test_who_would_hold_most_is_refused() -> None:
    account = BufferAccount(8000)
    holders = [Holder(account) for _ in range(3)]
    for holder in holders:
        assert holder.share.hold_head(300)
    assert not holders[2].share.hold_head(101)
    assert not Holder(account).share.hold_head(300)
    assert not any(holder.dropped for holder in holders)
    assert account.heads == account.buffered == 900


def test_heads_give_way_where_bodies_take_all_room() -> None:
    account = BufferAccount(8000)
    refusals: list[None] = []
    account.on_refusal = lambda: refusals.append(None)
    large, small = Holder(account), Holder(account)
    assert large.share.hold_head(500)
    account.reserved = 7500
    assert small.share.hold_head(100)
    assert large.dropped == len(refusals) == 1
    assert account.free == 400


# Room for a call


async def test_room_is_made_by_whoever_has_most_streams_that_stall() -> None:
    account = BufferAccount(100 * MIN_STREAM_BYTES)
    one, two, three = (client_share(account) for _ in range(3))
    long, longer = 2 * STALLED_ALONE, 3 * STALLED_ALONE
    bodies = [
        ArrivingBody(one, longer),
        *[ArrivingBody(two, long) for _ in range(3)],
        ArrivingBody(three, long),
        ArrivingBody(three),
    ]
    left = []
    while account.make_room():
        left.append((one.streams, two.streams, three.streams))
    # The other stream of the third connection moves.
    assert left == [(1, 2, 2), (1, 1, 2), (1, 1, 1), (0, 1, 1), (0, 0, 1)]
    assert await ended(bodies) == [0, 1, 2, 3, 4]


async def test_usual_clients_may_pause_for_longer_than_those_with_many_streams() -> None:
    account = BufferAccount(100 * MIN_STREAM_BYTES)
    usual, greedy = client_share(account), client_share(account)
    few = [ArrivingBody(usual, 2 * STALLED) for _ in range(MANY_STREAMS)]
    streams = [ArrivingBody(usual, 2 * STALLED_ALONE, may_pause=True)]
    usual_ones = [*few[1:], *streams]
    few[0].fail_body(TimeoutError())  # as many as are usual
    many = [
        ArrivingBody(greedy, 2 * STALLED, may_pause=bool(number % 2))
        for number in range(2 * MANY_STREAMS)
    ]
    while account.make_room():
        pass
    assert greedy.streams == MANY_STREAMS
    assert len(await ended(many)) == MANY_STREAMS
    assert not await ended(usual_ones)


@pytest.mark.parametrize("is_client", [False, True])
async def test_streams_of_servers_and_those_that_take_no_room_stay(is_client: bool) -> None:
    account = BufferAccount(100 * MIN_STREAM_BYTES)
    share = client_share(account) if is_client else BufferShare(account)
    body = ArrivingBody(share, 2 * STALLED_ALONE)
    share.change(2 * MIN_STREAM_BYTES if is_client else 0)
    assert not account.make_room()
    assert body.error is None


async def test_search_for_streams_looks_at_them_once_for_many_calls() -> None:
    looks = 0

    class Watched(ArrivingBody):
        def is_reading(self) -> bool:
            nonlocal looks
            looks += 1
            return False

    account = BufferAccount(100 * MIN_STREAM_BYTES)
    bodies = [Watched(client_share(account), 2 * STALLED_ALONE) for _ in range(100)]
    for _ in range(100):
        assert not account.make_room("other")
    assert looks < 10 * len(bodies)


async def test_client_with_most_streams_loses_its_slowest_ones() -> None:
    """However few each of its connections has."""
    account = BufferAccount(30 * MIN_STREAM_BYTES)
    times = [0.1, 0.4, 0.2, 0.3]
    bodies = [
        ArrivingBody(client_share(account, "greedy"), times[number % 4], trickles=True)
        for number in range(20)
    ]
    usual = [ArrivingBody(client_share(account, "usual"), 0.5, trickles=True) for _ in range(9)]
    streams = [ArrivingBody(client_share(account, "usual"), 0.5, may_pause=True)]
    assert account.make_room("other")
    assert await ended(bodies) == [1]
    while account.make_room("other"):
        pass
    # A third of the room is the fair share of each of three clients.
    assert len(await ended(bodies)) == 10
    assert {times[number % 4] for number in await ended(bodies)} == {0.4, 0.3}
    assert not await ended([*usual, *streams])


async def test_streams_of_who_holds_as_much_as_others_are_not_ended_for_them() -> None:
    account = BufferAccount(40 * MIN_STREAM_BYTES)
    shares = {client: client_share(account, client) for client in "ABC"}
    bodies = [
        ArrivingBody(shares[client], 100.0 - number, trickles=True)
        for number, client in enumerate(16 * "A" + 14 * "BC")
    ]
    assert not account.make_room("A")
    assert account.make_room("B")
    assert account.make_room("B")
    assert not account.make_room("B")  # it has as many now
    assert not account.make_room("C")
    assert account.make_room("D")
    assert await ended(bodies) == [0, 1, 2]


async def test_fast_streams_are_not_ended_for_other_clients() -> None:
    account = BufferAccount(30 * MIN_STREAM_BYTES)
    share = client_share(account, "greedy")
    bodies = [ArrivingBody(share, STALLED / 2, moves=PROGRESS) for _ in range(28)]
    bodies += [ArrivingBody(share, 2 * STALLED, moves=PROGRESS), ArrivingBody(share, 0.01)]
    while account.make_room("other"):
        pass
    assert await ended(bodies) == [28, 29]


@pytest.mark.parametrize("client", ["greedy", "other"])
async def test_streams_that_the_gateway_does_not_read_are_not_ended(client: str) -> None:
    account = BufferAccount(30 * MIN_STREAM_BYTES)
    share = client_share(account, "greedy")
    bodies = [ArrivingBody(share, 2 * STALLED_ALONE) for _ in range(30)]
    for body in bodies[1:]:
        body.reads = False
    assert account.make_room(client)
    assert not account.make_room(client)
    assert await ended(bodies) == [0]


async def test_streams_that_had_stalled_are_not_kept_with_their_connections() -> None:
    account = BufferAccount(30 * MIN_STREAM_BYTES)
    shares = [client_share(account, "greedy") for _ in range(30)]
    bodies = [ArrivingBody(share, 2 * STALLED_ALONE) for share in shares]
    assert account.make_room("other")
    await turn_of_sockets()
    kept = [weakref.ref(body) for body in bodies]
    for share in shares:
        share.release()
    del bodies, shares, share
    gc.collect()
    assert not any(each() for each in kept)


def test_unread_responses_take_no_part_of_the_windows() -> None:
    account = BufferAccount(1024 * MIB)
    share, body = client_share(account), ArrivingBody()
    share.open_stream(body, 64 * MIB)
    assert account.streams == 64 * MIB // MIN_STREAM_BYTES
    assert account.window == MAX_WINDOW
    share.close_stream(body)
    assert (account.streams, account.unread) == (0, 0)
    share.open_stream(body, 64 * MIB)
    share.release()
    assert (account.streams, account.unread) == (0, 0)


async def test_streams_that_may_be_silent_make_room_last() -> None:
    """However many their connection has: each takes no more room than others."""
    account = BufferAccount(100 * MIN_STREAM_BYTES)
    patient = client_share(account, "patient")
    streams = [ArrivingBody(patient, 9 * STALLED_ALONE, may_pause=True) for _ in range(20)]
    stalled = [ArrivingBody(client_share(account, "stalled"), 2 * STALLED_ALONE) for _ in range(8)]
    for _ in stalled:
        assert account.make_room("stalled")
    assert not await ended(streams)
    assert await ended(stalled) == list(range(8))


async def test_client_that_has_reserved_most_loses_its_slowest_body() -> None:
    """However few bodies it has."""
    account = BufferAccount(12 * MIB)
    greedy = client_share(account, "greedy")
    bodies = [
        ArrivingBody(greedy, seconds, trickles=True, reserves=2 * MIB)
        for seconds in (0.1, 0.4, 0.2, 0.3, 0.5)
    ]
    usual = ArrivingBody(client_share(account, "usual"), 9.0, trickles=True, reserves=2 * MIB)
    streams = client_share(account, "streams")
    small = [ArrivingBody(streams, 9.0, trickles=True) for _ in range(20)]
    while account.make_room("other"):
        pass
    # A quarter of the room is the fair share of each of four clients.
    assert await ended(bodies) == [1, 2, 3, 4]
    assert not await ended([usual, *small])
    assert account.reserved == 4 * MIB


async def test_body_must_bring_an_eighth_of_what_its_call_has_reserved() -> None:
    account = BufferAccount(100 * MIB)
    share = client_share(account, "greedy")
    reserved = 4 * MIB - MIN_STREAM_BYTES
    bodies = [
        ArrivingBody(share, STALLED / 2, moves=moves, reserves=reserves)
        for reserves, moves in (
            (reserved, 4 * MIB // 8),
            (reserved, 4 * MIB // 8 - 1),
            (30 * MIB, MAX_PROGRESS),
            (30 * MIB, MAX_PROGRESS - 1),
        )
    ]
    while account.make_room("other"):
        pass
    assert await ended(bodies) == [1, 3]


async def test_reserved_bytes_of_a_body_that_makes_room_are_given_back_at_once() -> None:
    account = BufferAccount(12 * MIB)
    share = client_share(account, "greedy")
    bodies = [ArrivingBody(share, 9.0, reserves=3 * MIB) for _ in range(4)]
    account.reserve(MIB)  # of nobody
    for left in (10, 7):
        assert account.make_room("other")
        assert account.reserved == left * MIB
    (goes_on, _) = leaving = [body for body in bodies if body.reserved.is_leaving]
    goes_on.progress.receive(MAX_PROGRESS)
    for body in leaving:
        account.reserve(1, body.reserved)
    assert account.reserved == 7 * MIB
    assert await ended(leaving) == [1]
    assert account.reserved == 10 * MIB + 1  # what goes on counts again


async def test_body_that_ends_while_it_makes_room_counts_what_its_call_has_reserved() -> None:
    account = BufferAccount(12 * MIB)
    share = client_share(account, "greedy")
    body = ArrivingBody(share, 9.0, reserves=11 * MIB)
    assert account.make_room("other")
    assert account.reserved == 0
    share.close_stream(body)
    assert account.reserved == 11 * MIB
    assert not await ended([body])


async def test_lost_connection_counts_what_its_call_has_reserved_until_that_ends() -> None:
    account = BufferAccount(12 * MIB)
    share = client_share(account, "greedy")
    body = ArrivingBody(share, 9.0, reserves=11 * MIB)
    assert account.make_room("other")
    share.release()
    await turn_of_sockets()
    assert account.reserved == 11 * MIB
    account.reserve(-11 * MIB, body.reserved)
    assert account.reserved == 0


async def test_body_with_reserved_bytes_makes_room_where_buffered_bytes_take_it() -> None:
    account = BufferAccount(12 * MIB)
    share = client_share(account, "greedy")
    body = ArrivingBody(share, 9.0, trickles=True, reserves=4 * MIB)
    stream = ArrivingBody(share, 9.5, trickles=True)
    share.change(8 * MIB)
    assert account.make_room("other")
    assert not account.make_room("other")
    assert await ended([body, stream]) == [0]


LARGE = 100 * 1024


def fill(buffer: ReadBuffer, data: bytes) -> bytes | memoryview:
    space = buffer.prepare()
    space[: len(data)] = data
    return buffer.commit(len(data))


def test_read_data_is_not_overwritten() -> None:
    buffer = ReadBuffer()
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(int(size)) for size in rng.integers(1, LARGE, 50)]
    taken = [fill(buffer, piece) for piece in pieces]
    assert [bytes(data) for data in taken] == pieces


def test_small_read_is_copied() -> None:
    buffer = ReadBuffer()
    space = buffer.prepare()
    assert isinstance(fill(buffer, b"little"), bytes)
    assert buffer.prepare() is space


def test_large_read_is_not_copied() -> None:
    buffer = ReadBuffer()
    data = fill(buffer, bytes(LARGE))
    assert isinstance(data, memoryview)
    assert len(data) == LARGE


def test_waiting_reads_pin_few_slabs() -> None:
    buffer = ReadBuffer()
    waiting = []
    for _ in range(500):
        fill(buffer, bytes(6 * LARGE))  # which nobody keeps
        waiting.append(fill(buffer, b"x" * 20_000))
    copies = [piece for piece in waiting if isinstance(piece, bytes)]
    shared = [piece for piece in waiting if isinstance(piece, memoryview)]
    assert 0 < len({id(view.obj) for view in shared}) <= 32
    assert len(copies) > 400
    assert all(bytes(piece) == b"x" * 20_000 for piece in waiting)


def test_large_reads_are_copied_while_many_slabs_are_pinned() -> None:
    buffer = ReadBuffer()
    waiting = [(fill(buffer, bytes(6 * LARGE)), fill(buffer, bytes(LARGE))) for _ in range(50)]
    assert isinstance(fill(buffer, bytes(LARGE)), bytes)
    assert isinstance(fill(buffer, bytes(6 * LARGE)), memoryview)
    waiting.clear()
    assert isinstance(fill(buffer, bytes(LARGE)), memoryview)
