"""Finds files that have changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from hashlib import sha256

POLL_INTERVAL = 2.0
"""Seconds between two looks at a file; a change counts once two looks see the same."""

_MAX_HASHED = 16 * 2**20
"""Bytes of a file that are hashed: settings and certificates are smaller."""

_Identity = tuple[int, int, int, int] | None


class FileWatch:
    """Tells whether files have changed since they were used, and have been stable since.

    A file may be half written at a look, and of two files one changes first.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = tuple(files)
        self._used = self._seen = self._identities()

    def changed(self) -> bool:
        """Look, and tell whether they differ from those in use, but not from the last look."""
        before, self._seen = self._seen, self._identities()
        return self._seen != self._used and self._seen == before

    def mark_used(self) -> None:
        """Record that the files are in use as the last look found them."""
        self._used = self._seen

    def _identities(self) -> tuple[_Identity, ...]:
        return tuple(_identity(file) for file in self._files)


class ContentWatcher:
    """Tells when files have other content than before.

    They may change in any way: by a rename, by a link that leads elsewhere, or in place, where they
    are half written for a while.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = tuple(files)
        self._watch = FileWatch(self._files)
        self._content = self._digests()

    def changed(self) -> bool:
        """Look at the files, and report a change once, after two looks with the same result.

        A file that vanishes is a change. A file that is only touched is none.
        """
        if not self._watch.changed():
            return False
        self._watch.mark_used()
        before = self._content
        self.mark_used()
        return self._content != before

    def mark_used(self) -> None:
        """Take the files as they are now for the state without changes."""
        self._content = self._digests()

    def _digests(self) -> tuple[bytes | None, ...]:
        return tuple(map(digest, self._files))


def _identity(file: str) -> _Identity:
    """Return what identifies a version of a file; symbolic links are followed."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def digest(file: str) -> bytes | None:
    """Return the hash of a file's content; None for a file that cannot be read, or only once."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            return None  # a pipe can be read only once, and not here
        with open(file, "rb") as opened:
            return sha256(opened.read(_MAX_HASHED)).digest()
    except OSError:
        return None
