"""A reload that is prepared: all that can fail is done, and nothing of it is in use yet."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

from gateway.settings.schema import Settings

_log = logging.getLogger("tensorgate")

CloseReplaced = Callable[[], Awaitable[None]]
"""Closes what new settings have replaced. Raises nothing."""

OnApplied = Callable[[Settings], None]
"""Called with settings once they are in use."""


class PreparedReload(NamedTuple):
    """Parts for new settings beside those in use: ``commit`` uses them, ``abort`` closes them.

    ``changes`` describes what has changed. ``commit`` uses the parts by assignments that cannot
    fail, and returns what closes those of before. ``undo`` closes the parts.
    """

    changes: str
    commit: Callable[[], CloseReplaced]
    undo: AsyncExitStack

    async def abort(self) -> None:
        """Close what was made for the new settings."""
        await self.undo.aclose()


def notify_applied(on_applied: OnApplied, settings: Settings) -> None:
    """Call it; its errors are logged, as the settings are in use in any case."""
    try:
        on_applied(settings)
    except Exception:
        _log.exception("the new settings are in use, but not all has taken note of them")
