"""Exhausts the file descriptors of the test process."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let every open and accept inside fail for lack of descriptors; open ones stay.

    poll(2) takes no more of them than the limit is: with one of 0, other threads' would fail.
    """
    # What is left of earlier tests must not be closed meanwhile: that would make room.
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.open(os.devnull, os.O_RDONLY)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
