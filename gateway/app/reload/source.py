"""The source of the settings: the file, and whether it has changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from gateway.app.build.tls import server_tls_files
from gateway.app.build.warnings import settings_warnings
from gateway.app.loaded_resources import unwatched_files
from gateway.settings.load import LoadedSettings, load_with_positions
from gateway.settings.problems import Problem, SettingsError
from gateway.settings.schema import Settings
from gateway.system.file_watcher import ContentWatcher

_log = logging.getLogger("tensorgate")


class SettingsSource:
    """The settings file, watched together with the certificates that it names."""

    def __init__(self, file: Path, environ: Mapping[str, str]) -> None:
        self.file = file
        self._environ = environ
        self._watch = ContentWatcher([str(file)])
        self._upstream_tls = self._server_tls = ContentWatcher([])
        self._loaded: LoadedSettings | None = None

    def read(self) -> Settings:
        """Read the file; ``changed`` compares with it from now on. Raises SettingsError."""
        if self._loaded is not None and self.file.exists() and not self.file.is_file():
            # Opening a pipe would wait for a writer.
            problem = Problem("", None, None, "is no file that can be read again")
            raise SettingsError(self.file, [problem])
        self._watch.mark_used()
        # At a reload, a file to read may be missing: what was loaded from it stays in use.
        at_start = self._loaded is None
        loaded = load_with_positions(
            self.file, self._environ, with_files=at_start, with_written_files=True
        )
        self._loaded = loaded
        self._upstream_tls = ContentWatcher(unwatched_files(loaded.settings))
        self._server_tls = ContentWatcher(server_tls_files(loaded.settings.tls))
        return loaded.settings

    def log_warnings(self, before: Settings | None = None) -> None:
        """Log what is allowed but unwise in the settings read last, unless it was ``before``."""
        assert self._loaded is not None
        known = set() if before is None else set(settings_warnings(before))
        for warning in settings_warnings(self._loaded.settings):
            if warning not in known:
                _log.warning("%s", self._loaded.problem(*warning).describe(self.file))

    def changed(self, after_failure: bool) -> bool:
        """Tell whether a file has changed since the last call.

        The gateway follows the files of its own certificate without a reload. They count
        ``after_failure`` only, as they may be the reason for it.
        """
        watches = (self._watch, self._upstream_tls, self._server_tls)
        settings, upstream_tls, server_tls = [watch.changed() for watch in watches]
        return settings or upstream_tls or (server_tls and after_failure)
