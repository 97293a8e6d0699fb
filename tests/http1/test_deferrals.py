from __future__ import annotations

import asyncio

import pytest

from gateway.http1.deferrals import DEFER_TIMEOUT, BodyDeferrals

SMALL = 128 * 1024


class _Entry:
    def __init__(self) -> None:
        self.timed_out = asyncio.Event()

    def on_timeout(self) -> None:
        self.timed_out.set()


@pytest.mark.parametrize(
    ("length", "is_large"), [(0, False), (SMALL, False), (None, False), (SMALL + 1, True)]
)
async def test_only_large_bodies_are_given_up_early(length: int | None, is_large: bool) -> None:
    deferrals, entry, large = BodyDeferrals(), _Entry(), _Entry()
    deferrals.add(entry, length)
    deferrals.add(large, 10 * SMALL)  # due after the entry if that is large, too
    async with asyncio.timeout(5):
        await large.timed_out.wait()
    assert entry.timed_out.is_set() is is_large
    async with asyncio.timeout(5 + DEFER_TIMEOUT):
        await entry.timed_out.wait()
    assert deferrals.size == 0
    deferrals.close()


@pytest.mark.parametrize("length", [1, 10 * SMALL])
async def test_removed_entry_does_not_time_out(length: int) -> None:
    deferrals, entry, other = BodyDeferrals(), _Entry(), _Entry()
    deferrals.add(entry, length)
    deferrals.add(other, length)
    deferrals.remove(entry)
    deferrals.remove(entry)
    assert deferrals.size == 1
    async with asyncio.timeout(5):
        await other.timed_out.wait()
    assert not entry.timed_out.is_set()
    deferrals.add(entry, length)
    deferrals.close()
    assert deferrals.size == 0
