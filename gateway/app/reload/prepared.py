"""A reload that is prepared: all that can fail is done, and nothing of it is in use yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

CloseReplaced = Callable[[], Awaitable[None]]
"""Closes what new settings have replaced. Raises nothing."""


class PreparedReload:
    """Parts for new settings beside those in use: ``commit`` uses them, ``abort`` closes them.

    ``changes`` describes what has changed. ``swap`` uses the parts by assignments that cannot
    fail. ``undo`` closes the parts.
    """

    def __init__(
        self, changes: str, swap: Callable[[], CloseReplaced], undo: AsyncExitStack
    ) -> None:
        self.changes = changes
        self._swap = swap
        self._undo = undo

    def commit(self) -> CloseReplaced:
        """Use the new settings from now on; return what closes those of before."""
        return self._swap()

    async def abort(self) -> None:
        """Close what was made for the new settings."""
        await self._undo.aclose()
