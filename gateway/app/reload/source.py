"""Where the settings come from, and whether there are newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gateway.app.build.tls import server_tls_files
from gateway.app.reload.resources import unwatched_files
from gateway.settings.file_watch import ContentWatcher
from gateway.settings.load import load_with_positions
from gateway.settings.problems import Problem, SettingsError
from gateway.settings.schema import Settings


class SettingsSource:
    """The settings file, and the files that it names."""

    def __init__(self, file: Path, environ: Mapping[str, str]) -> None:
        self.file = file
        self._environ = environ
        self._watch = ContentWatcher([str(file)])
        self._named = self._of_clients = ContentWatcher([])
        self._was_read = False

    def read(self) -> Settings:
        """Read the file, and look at it from now on for what is newer. Raises SettingsError."""
        if self._was_read and self.file.exists() and not self.file.is_file():
            # A pipe would have this wait for a writer.
            problem = Problem("", None, None, "is no file that can be read again")
            raise SettingsError(self.file, [problem])
        self._watch.mark_used()
        # Later on, what is used already stays in use where its file has vanished.
        at_start = not self._was_read
        settings = load_with_positions(self.file, self._environ, with_files=at_start).settings
        self._was_read = True
        self._named = ContentWatcher(unwatched_files(settings))
        self._of_clients = ContentWatcher(server_tls_files(settings.tls))
        return settings

    def changed(self, after_failure: bool) -> bool:
        """Look at the files, and tell of a change, once.

        The files of TLS with clients are renewed by themselves; they count ``after_failure``, for
        which they may be the reason.
        """
        watches = (self._watch, self._named, self._of_clients)
        own, named, of_clients = [watch.changed() for watch in watches]
        return own or named or (of_clients and after_failure)


def failure_text(error: Exception, file: Path) -> str:
    """Tell in one line why settings cannot be used: the first of their faults, and how many."""
    if not isinstance(error, SettingsError):
        return f"{file}: {error}"
    count = len(error.problems)
    more = f" ({count} problems)" if count > 1 else ""
    return error.problems[0].describe(file) + more
