import pytest

from gateway.system.buffers import MAX_WINDOW, MIN_STREAM_BYTES, MIN_WINDOW, BufferAccount

MIB = 2**20


def test_few_streams_have_the_largest_window() -> None:
    account = BufferAccount(1024 * MIB)
    for _ in range(200):
        account.open_stream()
    assert account.window == MAX_WINDOW


@pytest.mark.parametrize("limit", [MIB, 64 * MIB, 1024 * MIB])
def test_windows_of_many_streams_take_an_eighth_together(limit: int) -> None:
    account = BufferAccount(limit)
    windows = []
    while account.free >= MIN_STREAM_BYTES:
        account.open_stream()
        windows.append(account.window)
        assert account.window * account.streams <= max(limit // 8, MIN_WINDOW * account.streams)
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] == MIN_WINDOW
    assert account.streams == limit // MIN_STREAM_BYTES


def test_window_grows_again_as_streams_end() -> None:
    account = BufferAccount(64 * MIB)
    windows = [account.window]
    for _ in range(300):
        account.open_stream()
        windows.append(account.window)
    for window in reversed(windows[:-1]):
        account.close_stream()
        assert account.window == window


def test_free_bytes_exclude_the_minimum_of_each_stream() -> None:
    account = BufferAccount(10 * MIN_STREAM_BYTES)
    account.reserved = MIN_STREAM_BYTES
    account.open_stream()
    assert account.free == 8 * MIN_STREAM_BYTES
    account.change(MIN_STREAM_BYTES - 1)  # within the stream's minimum
    assert account.free == 8 * MIN_STREAM_BYTES
    account.change(MIN_STREAM_BYTES + 1)
    assert account.free == 7 * MIN_STREAM_BYTES
    assert account.total == 3 * MIN_STREAM_BYTES
    account.set_limit(2 * MIN_STREAM_BYTES)
    assert account.free == -MIN_STREAM_BYTES
