"""Watch files for a change of their content."""

from collections.abc import Iterable

from gateway.system.file_watcher import FileWatch, digest


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
