"""A cache keeps what is used again, whatever other keys come meanwhile."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.system.bounded_cache import BoundedCache, cached

FLOOD = 10_000


def test_cached_values_are_found() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    assert cache.put("one", 1) == 1
    assert cache.put("zero", 0) == 0
    assert (cache.get("one"), cache.get("zero"), cache.get("other")) == (1, 0, None)
    cache.clear()
    assert (cache.get("one"), len(cache)) == (None, 0)


def _use(cache: BoundedCache[object, object], key: object) -> bool:
    """Use a key as callers do, and tell whether it was found."""
    found = cache.get(key) is not None
    if not found:
        cache.put(key, key)
    return found


@pytest.mark.parametrize("max_entries", [1, 2, 64])
def test_keys_used_once_displace_nothing(max_entries: int) -> None:
    cache: BoundedCache[object, object] = BoundedCache(max_entries)
    for number in range(max_entries):
        _use(cache, f"innocent {number}")
    for number in range(FLOOD):
        _use(cache, f"flood {number}")
    assert all(_use(cache, f"innocent {number}") for number in range(max_entries))


def test_keys_used_again_and_again_survive_a_flood_of_keys_used_twice() -> None:
    cache: BoundedCache[object, object] = BoundedCache(64)
    _use(cache, "innocent")
    for number in range(FLOOD):
        _use(cache, f"flood {number}")
        _use(cache, f"flood {number}")
        if not number % 60:
            assert _use(cache, "innocent"), number
    assert len(cache) <= 4 * 64


def test_keys_that_come_to_a_full_cache_and_stay_in_use_displace_those_of_before() -> None:
    cache: BoundedCache[object, object] = BoundedCache(4)
    for number in range(4):
        _use(cache, f"before {number}")
    for _ in range(300):
        for number in range(4):
            _use(cache, f"now {number}")
    assert set(cache.recent) == {f"now {number}" for number in range(4)}


def test_objects_used_once_displace_nothing_though_their_identities_repeat() -> None:
    cache: BoundedCache[object, object] = BoundedCache(64)
    innocents = [_Template(f"innocent {number}") for number in range(64)]
    for each in innocents:
        cache.put(each, each, each.content)
    for number in range(FLOOD):
        each = _Template(f"flood {number}")
        assert cache.get(each) is None
        cache.put(each, each, each.content)
    assert all(cache.get(each) is each for each in innocents)
    other = _Template("other")
    for _ in range(2):
        cache.put(other, other, other.content)
    assert cache.get(other) is other


class _Template:
    """It is compared by identity."""

    def __init__(self, content: str) -> None:
        self.content = content


def test_key_that_first_comes_within_a_flood_is_cached_at_its_second_use() -> None:
    cache: BoundedCache[object, object] = BoundedCache(64)
    for number in range(FLOOD):
        _use(cache, f"flood {number}")
    uses = []
    for number in range(4):
        uses.append(_use(cache, "innocent"))
        for more in range(10):
            _use(cache, f"more {number} {more}")
    assert uses == [False, False, True, True]


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=200))
def test_cache_is_bounded_and_keeps_the_keys_used_last(
    max_entries: int, steps: list[tuple[bool, int]]
) -> None:
    cache: BoundedCache[object, object] = BoundedCache(max_entries)
    used: OrderedDict[object, None] = OrderedDict()
    """Keys found in the cache, or cached by this use, the last one last."""
    for is_lookup, key in steps:
        found = cache.get(key)
        assert found in (None, key)
        if found is None and key in used:
            later = len(used) - 1 - list(used).index(key)
            assert later >= max_entries, "one of the last keys used is gone"
            del used[key]
        if found is None and not is_lookup:
            cache.put(key, key)
            found = key if len(cache) and cache.get(key) == key else None
        if found is not None:
            used[key] = None
            used.move_to_end(key)
        assert len(cache) <= 4 * max_entries


def test_results_of_a_function_are_cached_by_its_arguments() -> None:
    calls: list[tuple[int, str]] = []

    @cached(4)
    def function(number: int, text: str) -> str | None:
        calls.append((number, text))
        if number < 0:
            raise ValueError(text)
        return text * number or None

    for _ in range(3):
        assert function(2, "a") == "aa"
        assert function(2, "b") == "bb"
    assert calls == [(2, "a"), (2, "b")]
    for _ in range(2):
        assert function(0, "a") is None
        with pytest.raises(ValueError, match="a"):
            function(-1, "a")
    assert calls[2:] == [(0, "a"), (-1, "a")] * 2
