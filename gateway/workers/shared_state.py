"""What workers tell each other of endpoints, in memory that they share.

Nobody locks it, and nobody waits. A slot is two words of 64 bits: whose it is, a hash; and what is
said, which is written and read at a go, so that it is never torn. It bears a second, short hash of
its owner: where two take a slot at the same time, what one of them says is not taken for the
other's. Where a slot is another's, the board just does not know, and each worker finds out alone.
"""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass

SLOTS = 1024
"""Places for news; they take 16 KiB."""
RETENTION = 60.0
"""Seconds after which what was said is over, and its slot free for others: all have read it."""

_WORD = 8
_TAG_AT, _TAG_SIZE = 48, 2
"""In the word that is said: above it, the owner's short hash."""
_EJECTIONS_AT, _MOST_EJECTIONS = 40, 0xFF
_LAST_MS = (1 << _EJECTIONS_AT) - 1
"""Below it, milliseconds: enough for 34 years since the machine was started."""


@dataclass(frozen=True, slots=True)
class SharedEjection:
    """What is said of an endpoint."""

    ejections: int
    """In a row, of which no more than 255 are told; 0 for an endpoint that answers again."""
    until: float
    """When the last of them ends, cut to milliseconds; or when it was said that it answers."""


class SharedEjections:
    """Holds the last news of each endpoint for all processes that are forked after it was made.

    Times are in seconds on the clock of ``time.monotonic``, which all processes share. An endpoint
    is known by any text that names it in each of them.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._words = memoryview(mmap.mmap(-1, 2 * _WORD * slots)).cast("Q")

    def publish(self, name: str, ejections: int, until: float, now: float) -> None:
        """Say that an endpoint is ejected; or that it answers, with no ejections."""
        words = self._words
        owner, tag, at = self._place(name)
        if words[at] != owner:
            if words[at] and not _is_over(words[at + 1], now):
                return
            words[at + 1] = 0
            words[at] = owner
        words[at + 1] = _said(tag, ejections, until if ejections else now)

    def read(self, name: str) -> SharedEjection | None:
        """Give what was said last of an endpoint, if that is known."""
        owner, tag, at = self._place(name)
        said = self._words[at + 1]
        if self._words[at] != owner or said >> _TAG_AT != tag:
            return None
        return SharedEjection(said >> _EJECTIONS_AT & _MOST_EJECTIONS, _until(said))

    def _place(self, name: str) -> tuple[int, int, int]:
        """Give the two hashes of a name, neither of which is 0, and where its slot begins."""
        digest = hashlib.blake2b(name.encode(), digest_size=_WORD + _TAG_SIZE).digest()
        owner = int.from_bytes(digest[:_WORD], "little") or 1
        tag = int.from_bytes(digest[_WORD:], "little") or 1
        return owner, tag, 2 * (owner % self._slots)


def _said(tag: int, ejections: int, until: float) -> int:
    # Cut, not rounded: nobody hears of his own ejection that it ends later than he thinks.
    milliseconds = min(int(until * 1000), _LAST_MS)
    return tag << _TAG_AT | min(ejections, _MOST_EJECTIONS) << _EJECTIONS_AT | milliseconds


def _until(said: int) -> float:
    return (said & _LAST_MS) / 1000


def _is_over(said: int, now: float) -> bool:
    return _until(said) + RETENTION < now
