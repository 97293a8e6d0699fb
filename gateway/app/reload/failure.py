"""Why a reload has failed, as an operator reads it."""

from __future__ import annotations

import logging
from pathlib import Path

from gateway.app.build.api_keys import ApiKeysError
from gateway.app.build.listen import ListenError
from gateway.app.build.tls import UpstreamTlsError
from gateway.errors import INTERNAL_ERROR_TEXT
from gateway.settings.problems import SettingsError

_NO_THREAD = "can't start new thread"
"""The text of the RuntimeError that CPython raises where pthread_create fails."""

_log = logging.getLogger("tensorgate")


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
    if isinstance(error, ListenError | UpstreamTlsError | ApiKeysError):
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
