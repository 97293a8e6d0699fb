"""One line per exchange."""

from __future__ import annotations

import logging

_log = logging.getLogger("tensorgate.access")


class AccessLog:
    """Writes the line of an exchange when it is over."""

    def write(
        self,
        method: str,
        target: str,
        status: int,
        size: int,
        seconds: float,
        request_id: str = "",
    ) -> None:
        """Write a line; ``size`` is the answer's body in bytes, ``status`` 0 if none was sent."""
        shown = (status, size, seconds * 1000, request_id or "-")
        _log.info("%s %s %d %d B %.1f ms %s", method, target, *shown)
