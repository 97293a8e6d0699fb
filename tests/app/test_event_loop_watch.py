"""An event loop that lags for seconds is named; one long pause is not."""

import logging

import pytest

from gateway.app.event_loop_watch import LAGS_FROM, MEASUREMENTS, WELL_BELOW, EventLoopWatch


def _observe(watch: EventLoopWatch, lag: float, times: int = MEASUREMENTS) -> None:
    for _ in range(times):
        watch.observe(lag)


def test_event_loop_that_lags_is_named_until_it_is_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    watch = EventLoopWatch()
    _observe(watch, LAGS_FROM * 1.4)
    found = watch.describe()
    assert found is not None
    assert found["text"].startswith("lags by 140 ms and uses ")
    since = found["since"]
    _observe(watch, WELL_BELOW)
    found = watch.describe()
    assert found is not None
    assert found["since"] == since
    assert found["text"].startswith("lags by 50 ms")
    _observe(watch, WELL_BELOW / 2)
    assert watch.describe() is None
    first, last = caplog.messages
    assert first.startswith("the event loop lags by 140 ms and uses ")
    assert last == "the event loop lags no more"


def test_long_pause_is_no_lag(caplog: pytest.LogCaptureFixture) -> None:
    watch = EventLoopWatch()
    _observe(watch, 0.001)
    _observe(watch, 20.0, MEASUREMENTS // 2 - 1)
    assert watch.describe() is None
    assert not caplog.messages
