"""What the processes share in memory: ejections of endpoints, and counts of closed connections.

No process locks it, and none waits. A slot of the ejection table is two words of 64 bits: a hash of
the endpoint's name, and the ejection, which is written and read in one go, so never torn. The
second word repeats a short hash of the name: if two endpoints take a slot at the same time, neither
gets the ejection of the other. If another endpoint has the slot, the table does not know this one,
and each worker finds out by itself.
"""

from __future__ import annotations

import hashlib
import mmap
from typing import NamedTuple

SLOTS = 1024
"""Endpoints that the table has room for; they take 16 KiB."""
RETENTION = 60.0
"""Seconds after which an ejection that is over leaves its slot to others: all have read it."""

_WORD = 8
_TAG_SHIFT, _TAG_SIZE = 48, 2
"""The highest bits of the second word: the short hash of the name."""
_EJECTIONS_SHIFT, _MAX_EJECTIONS = 40, 0xFF
_MAX_MILLISECONDS = (1 << _EJECTIONS_SHIFT) - 1
"""The lowest bits: a time in milliseconds, enough for 34 years since the machine was started."""


class SharedEjection(NamedTuple):
    """The last ejection of an endpoint, or its end."""

    ejections: int
    """Ejections in a row, at most 255; 0 for an endpoint that is in use again."""
    until: float
    """When the last ejection ends, cut to milliseconds; or when the endpoint was in use again."""


class SharedEjections:
    """The last ejection of each endpoint, for all processes that are forked after it is made.

    Times are in seconds on the clock of ``time.monotonic``, which all processes share. An endpoint
    is known by any text that names it in each of them.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._words = memoryview(mmap.mmap(-1, 2 * _WORD * slots)).cast("Q")

    def publish(self, name: str, ejections: int, until: float, now: float) -> None:
        """Publish that an endpoint is ejected, or with no ejections that it is in use again."""
        words = self._words
        owner, tag, at = self._locate(name)
        if words[at] != owner:
            if words[at] and not _is_over(words[at + 1], now):
                return
            words[at + 1] = 0
            words[at] = owner
        words[at + 1] = _pack(tag, ejections, until if ejections else now)

    def read(self, name: str) -> SharedEjection | None:
        """Return what was published last of an endpoint, if that is known."""
        owner, tag, at = self._locate(name)
        word = self._words[at + 1]
        if self._words[at] != owner or word >> _TAG_SHIFT != tag:
            return None
        return SharedEjection(word >> _EJECTIONS_SHIFT & _MAX_EJECTIONS, _until(word))

    def _locate(self, name: str) -> tuple[int, int, int]:
        """Return the two hashes of a name, neither of which is 0, and where its slot begins."""
        digest = hashlib.blake2b(name.encode(), digest_size=_WORD + _TAG_SIZE).digest()
        owner = int.from_bytes(digest[:_WORD], "little") or 1
        tag = int.from_bytes(digest[_WORD:], "little") or 1
        return owner, tag, 2 * (owner % self._slots)


def shared_counters(count: int) -> list[memoryview]:
    """Return numbers in memory that forked processes share, each as a view of one element."""
    words = memoryview(mmap.mmap(-1, _WORD * count)).cast("Q")
    return [words[i : i + 1] for i in range(count)]


def _pack(tag: int, ejections: int, until: float) -> int:
    # Cut, not rounded: no worker reads back that its own ejection ends later than it does.
    milliseconds = min(int(until * 1000), _MAX_MILLISECONDS)
    return tag << _TAG_SHIFT | min(ejections, _MAX_EJECTIONS) << _EJECTIONS_SHIFT | milliseconds


def _until(word: int) -> float:
    return (word & _MAX_MILLISECONDS) / 1000


def _is_over(word: int, now: float) -> bool:
    return _until(word) + RETENTION < now
