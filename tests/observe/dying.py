"""Runs code in processes that are killed at a chosen moment."""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

STORES = {dis.opmap[name] for name in ("STORE_SUBSCR", "STORE_SLICE") if name in dis.opmap}


def run_in_a_child(run: Callable[[], None]) -> int:
    """Run something in a process of its own, and return how that ended, as ``waitpid`` says."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def die_before_store(number: int) -> None:
    """Have this process killed before it next stores items, after it did so ``number`` times."""
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in STORES:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    # Python 3.12 looks for this before it traces, and not again.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
