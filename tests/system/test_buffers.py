import pytest

from gateway.system.buffers import (
    MAX_WINDOW,
    MIN_STREAM_BYTES,
    MIN_WINDOW,
    BufferAccount,
    BufferShare,
)

MIB = 2**20


def test_few_streams_have_the_largest_window() -> None:
    account = BufferAccount(1024 * MIB)
    share = BufferShare(account)
    for _ in range(200):
        share.open_stream()
    assert account.window == MAX_WINDOW


@pytest.mark.parametrize("limit", [MIB, 64 * MIB, 1024 * MIB])
def test_windows_of_many_streams_take_an_eighth_together(limit: int) -> None:
    account = BufferAccount(limit)
    share = BufferShare(account)
    windows = []
    while account.free >= MIN_STREAM_BYTES:
        share.open_stream()
        windows.append(account.window)
        assert account.window * account.streams <= max(limit // 8, MIN_WINDOW * account.streams)
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] == MIN_WINDOW
    assert account.streams == limit // MIN_STREAM_BYTES


def test_window_grows_again_as_streams_end() -> None:
    account = BufferAccount(64 * MIB)
    share = BufferShare(account)
    windows = [account.window]
    for _ in range(300):
        share.open_stream()
        windows.append(account.window)
    for window in reversed(windows[:-1]):
        share.close_stream()
        assert account.window == window


def test_free_bytes_exclude_the_minimum_of_each_stream() -> None:
    account = BufferAccount(10 * MIN_STREAM_BYTES)
    share = BufferShare(account)
    account.reserved = MIN_STREAM_BYTES
    share.open_stream()
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
    other.open_stream()
    other.change(10)
    for _ in range(3):
        share.open_stream()
    share.change(1000)
    assert share.hold_head(500)
    assert (account.streams, account.buffered, account.heads) == (4, 1510, 500)
    share.release()
    share.close_stream()
    share.change(-1000)
    share.change_heads(-500)
    share.release()
    assert (account.streams, account.buffered, account.heads) == (1, 10, 0)
    assert not account.holders_of_heads
    assert account.window == MIB // 8


def test_who_holds_the_largest_heads_drops_them_for_others() -> None:
    account = BufferAccount(8000)
    refusals: list[None] = []
    account.on_refusal = lambda: refusals.append(None)
    holders = [Holder(account) for _ in range(3)]
    for holder, size in zip(holders, (300, 400, 200), strict=True):
        assert holder.share.hold_head(size)
    newcomer = Holder(account)
    assert newcomer.share.hold_head(150)
    assert [holder.dropped for holder in holders] == [0, 1, 0]
    assert account.heads == account.buffered == 650
    assert len(refusals) == 1


def test_who_would_hold_most_is_refused() -> None:
    account = BufferAccount(8000)
    holders = [Holder(account) for _ in range(3)]
    for holder in holders:
        assert holder.share.hold_head(300)
    assert not holders[2].share.hold_head(101)
    assert not Holder(account).share.hold_head(300)
    assert not any(holder.dropped for holder in holders)
    assert account.heads == account.buffered == 900


def test_holder_that_cannot_drop_its_heads_keeps_them() -> None:
    account = BufferAccount(8000)
    assert Holder(account, can_drop=False).share.hold_head(900)
    assert not Holder(account).share.hold_head(200)
    assert account.heads == 900


def test_heads_give_way_where_bodies_take_all_room() -> None:
    account = BufferAccount(8000)
    large, small = Holder(account), Holder(account)
    assert large.share.hold_head(500)
    account.reserved = 7500
    assert small.share.hold_head(100)
    assert large.dropped == 1
    assert account.free == 400
