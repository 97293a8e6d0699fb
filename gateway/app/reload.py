"""Reloads of the settings: what is read, what it changes, and why it could not be used."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gateway.app.build.listening import UnusableSettingsError
from gateway.app.build.tls import server_tls_files
from gateway.app.journal import RELOAD_REFUSED, SETTINGS_RELOADED, EventKind
from gateway.app.loaded_resources import LoadedResources, unwatched_files
from gateway.app.preflight.settings_checks import settings_warnings
from gateway.app.process import log_addresses, set_log_level
from gateway.app.shared_memory import Revision, SharedMemory
from gateway.errors import INTERNAL_ERROR_TEXT
from gateway.observe.families import RELOAD_FAILURES, RELOADS
from gateway.observe.metric_store import MetricWriter
from gateway.settings.load import LoadedSettings, load_with_positions
from gateway.settings.problems import Problem, SettingsError
from gateway.settings.schema import Settings
from gateway.sizes import LISTED_NAMES
from gateway.system.file_watcher import ContentWatcher

_NO_THREAD = "can't start new thread"
"""The text of the RuntimeError that CPython raises where pthread_create fails."""

_log = logging.getLogger("tensorgate")

CloseReplaced = Callable[[], Awaitable[None]]
"""Closes what new settings have replaced. Raises nothing."""


class PreparedReload(NamedTuple):
    """Parts for new settings beside those in use: ``commit`` uses them, ``abort`` closes them.

    ``commit`` uses the parts by assignments that cannot fail, and returns what closes those of
    before.
    """

    commit: Callable[[], CloseReplaced]
    abort: Callable[[], Awaitable[None]]


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


class ReloadLog:
    """Tells all processes which settings are in use, and logs and counts each reload.

    ``writer`` is for the metrics of the process that reads the settings.
    """

    def __init__(self, source: SettingsSource, shared: SharedMemory, writer: MetricWriter) -> None:
        self.source = source
        self._shared = shared
        self._reloads = writer.counter(RELOADS)
        self._failures = writer.counter(RELOAD_FAILURES)
        self._revision = Revision(time.time(), str(source.file))
        self._update()

    def is_due(self, settings: Settings) -> bool:
        """Tell whether files have changed, and the settings in use say that they are watched."""
        return settings.watch and self.source.changed(self._revision.last_failure is not None)

    def record_reload(self) -> None:
        """Record that the settings that were read are in use, and count the reload."""
        self._update(
            loaded_at=time.time(),
            number=self._revision.number + 1,
            last_failure=None,
            failed_at=None,
            reloads=self._revision.reloads + 1,
        )
        self._reloads.add(1.0)

    def log_reload(
        self,
        changes: str,
        settings: Settings,
        before: Settings,
        addresses: tuple[Sequence[str], Sequence[str]],
        requested: bool,
    ) -> None:
        """Log what has changed; ``addresses`` are those of now and before.

        ``settings`` are those that were read.
        """
        set_log_level(settings)
        _log.info("settings reloaded from %s: %s", self.source.file, changes)
        self._record(SETTINGS_RELOADED, changes, requested)
        if settings.workers != before.workers:
            text = "workers: %s takes effect after a restart; until then it is %s"
            _log.warning(text, settings.workers, before.workers)
        self.source.log_warnings(before)
        log_addresses(*addresses)

    def record_failure(self, reason: str, requested: bool) -> None:
        """Record and log why the settings that were read are not in use.

        The same reason is logged again only if an operator requested the reload.
        """
        is_new = reason != self._revision.last_failure
        failures = self._revision.reload_failures + 1
        self._update(last_failure=reason, failed_at=time.time(), reload_failures=failures)
        self._failures.add(1.0)
        if is_new or requested:
            _log.error("settings not reloaded: %s; keeping the previous settings", reason)
            self._record(RELOAD_REFUSED, reason, requested)

    def _update(self, **changes: Any) -> None:
        self._revision = self._revision._replace(**changes)
        self._shared.set_revision(self._revision)

    def _record(self, kind: EventKind, why: str, requested: bool) -> None:
        who = "SIGHUP" if requested else "file watch"
        self._shared.owner_journal.record(kind, who=who, why=why, subject=str(self.source.file))


def describe_changes(now: LoadedResources, before: LoadedResources) -> str:
    """Describe what has changed: ``upstreams +new -old ~other, routes changed``."""
    new = {spec.name: spec for spec in now.upstream_specs}
    old = {spec.name: spec for spec in before.upstream_specs}
    upstreams = [f"+{name}" for name in new if name not in old]
    upstreams += [f"-{name}" for name in old if name not in new]
    upstreams += [f"~{name}" for name in new if name in old and new[name] != old[name]]
    sections = [
        name
        for name in Settings.model_fields
        if name != "upstreams" and getattr(now.settings, name) != getattr(before.settings, name)
    ]
    shown = " ".join(upstreams[:LISTED_NAMES])
    if len(upstreams) > LISTED_NAMES:
        shown += f" and {len(upstreams) - LISTED_NAMES} more"
    parts = [f"upstreams {shown}"] if upstreams else []
    parts += [f"{', '.join(sections)} changed"] if sections else []
    return ", ".join(parts) or "no setting that applies now has changed"


def failure_text(error: Exception, file: Path) -> str:
    """Describe in one line why settings cannot be used: the first problem, and how many.

    What ``failure_reason`` says holds here too.
    """
    if not isinstance(error, SettingsError):
        return f"{file}: {failure_reason(error)}"
    count = len(error.problems)
    more = f" ({count} problems)" if count > 1 else ""
    return error.problems[0].describe(file) + more


def failure_reason(error: Exception) -> str:
    """Describe in one line why the parts for new settings cannot be made.

    An error of our own is logged with its traceback.
    """
    if isinstance(error, UnusableSettingsError):
        return str(error)
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return (
            "the system allows no more threads: a limit of processes (ulimit -u, pids.max of the "
            "container, TasksMax of systemd) or of memory is reached"
        )
    if isinstance(error, MemoryError):
        return "the system has no more memory"
    if isinstance(error, OSError):
        return f"the system refuses a part of the new settings: {error.strerror or error}"
    _log.error("the settings reload failed with an unexpected error", exc_info=error)
    return INTERNAL_ERROR_TEXT
