from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.http2.flow_control import ReceiveWindow
from tests.http1.splits import LAW


@LAW
@given(
    st.integers(0, 100_000),
    st.integers(1, 100_000),
    st.lists(st.tuples(st.booleans(), st.integers(0, 50_000)), max_size=60),
)
def test_window_and_unused_data_never_exceed_the_target(
    size: int, target: int, steps: list[tuple[bool, int]]
) -> None:
    target = max(size, target)
    window = ReceiveWindow(size, target)
    allowed, unused = size, 0
    for receives, count in steps:
        if receives:
            count = min(count, allowed)
            assert window.receive(count)
            allowed -= count
            unused += count
            allowed += window.opening()
        else:
            count = min(count, unused)
            unused -= count
            allowed += window.use(count)
        assert (window.size, window.unused) == (allowed, unused)
        untold = target - allowed - unused
        assert 0 <= untold < max(allowed, target / 8, 1)


def test_data_beyond_the_window_are_not_allowed() -> None:
    window = ReceiveWindow(10, 100)
    assert window.receive(10)
    assert not window.receive(1)


def test_window_never_exceeds_the_maximum() -> None:
    window = ReceiveWindow(100, 2**32)
    assert window.opening() == 2**31 - 1 - 100
    assert window.size == 2**31 - 1


def test_window_that_is_large_enough_is_not_opened() -> None:
    window = ReceiveWindow(65_535, 65_536)
    assert window.opening() == 0
    assert window.receive(32_766)
    assert window.use(32_766) == 0
    assert window.receive(1)
    assert window.use(1) == 32_768


def test_target_can_shrink() -> None:
    window = ReceiveWindow(1000, 1000)
    window.target = 10
    assert window.receive(500)
    assert window.use(500) == 0
    assert window.size == 500
