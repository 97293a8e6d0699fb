"""Which files have changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from hashlib import sha256

POLL_INTERVAL = 2.0
"""Seconds between two looks at a file; what is new counts when it looks the same twice."""

_LARGEST = 16 * 2**20
"""Bytes of a file that are looked at: no settings and no certificates are larger."""

_Identity = tuple[int, int, int, int] | None


class FileWatch:
    """Tells whether files have changed since they were used, and not since the last look.

    Files that are written in place are seen half written, and of two files one changes first.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = tuple(files)
        self._used = self._seen = self._identities()

    def changed(self) -> bool:
        """Look at the files, and tell; once they are used as they are, they have not changed."""
        before, self._seen = self._seen, self._identities()
        return self._seen != self._used and self._seen == before

    def mark_used(self) -> None:
        """Note that the files are used as they were at the last look."""
        self._used = self._seen

    def _identities(self) -> tuple[_Identity, ...]:
        return tuple(_identity(file) for file in self._files)


def _identity(file: str) -> _Identity:
    """Give what tells a file from the one before it, at the end of symbolic links too."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def digest(file: str) -> bytes | None:
    """Give what tells the content of a file from any other, None for what cannot be read twice."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            return None  # what a pipe holds can be read once, and not by this
        with open(file, "rb") as opened:
            return sha256(opened.read(_LARGEST)).digest()
    except OSError:
        return None
