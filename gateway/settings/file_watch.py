"""Whether files that hold settings, or that settings name, say something new."""

from collections.abc import Iterable

from gateway.system.files import FileWatch, digest


class ContentWatcher:
    """Tells when files hold something else than before.

    They may be replaced in any way: by another file of the name, by a link that leads elsewhere,
    or in place, where they are half written for a while.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = tuple(files)
        self._watch = FileWatch(self._files)
        self._content = self._digests()

    def changed(self) -> bool:
        """Look at the files; tell of a change once, when two looks in a row have seen the same.

        That a file has vanished is a change; that it was touched is none.
        """
        if not self._watch.changed():
            return False
        self._watch.mark_used()
        before = self._content
        self.mark_used()
        return self._content != before

    def mark_used(self) -> None:
        """Note that the files are used as they are now, so that this is no change any more."""
        self._content = self._digests()

    def _digests(self) -> tuple[bytes | None, ...]:
        return tuple(map(digest, self._files))
