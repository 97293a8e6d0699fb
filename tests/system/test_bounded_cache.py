from __future__ import annotations

import pytest

from gateway.system.bounded_cache import BoundedCache


def test_cached_values_are_found() -> None:
    cache: BoundedCache[str, int | None] = BoundedCache(2)
    assert cache.put("one", 1) == 1
    assert cache.put("none", None) is None
    assert cache["one"] == 1
    assert "none" in cache
    assert "other" not in cache


@pytest.mark.parametrize("max_entries", [1, 2, 3])
def test_full_cache_is_cleared_for_the_next_value(max_entries: int) -> None:
    cache: BoundedCache[int, int] = BoundedCache(max_entries)
    for number in range(max_entries):
        cache.put(number, number)
    assert len(cache) == max_entries
    cache.put(-1, -1)
    assert cache == {-1: -1}
