"""What the parent writes to a worker, and the worker's answer.

It lies in memory that both can map, so that it may be of any length, while the channel carries no
more than two descriptors: of that memory, and of a pipe for the answer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self

MAX_REPLY_SIZE = 4000
"""Bytes, which a pipe takes at once."""
DONE = b"+"
"""The answer of a worker that has done what the letter says; any other one tells why it has not."""


class ReceivedUpdate:
    """A letter in a worker's hands, until its context ends; this owns the two descriptors."""

    def __init__(self, memory: int, reply: int) -> None:
        # The place in the file is common to all workers that read it.
        self.content = os.pread(memory, os.fstat(memory).st_size, 0)
        os.close(memory)
        self._reply = reply

    def answer(self, fault: str) -> None:
        """Tell why it could not be done; an empty text says that it has been done."""
        with suppress(OSError):  # the parent is gone, or does not wait any more
            os.write(self._reply, fault.encode()[:MAX_REPLY_SIZE] or DONE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let it go; without an answer, the parent sees that none comes."""
        os.close(self._reply)
