"""The event loop does not wait long for a thread that computes."""

import sys

from gateway.system.memory import tune_thread_switches


def test_event_loop_waits_half_a_millisecond_for_other_threads() -> None:
    before = sys.getswitchinterval()
    try:
        tune_thread_switches()
        assert sys.getswitchinterval() < 0.001 < before
    finally:
        sys.setswitchinterval(before)
