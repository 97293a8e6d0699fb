"""The access log: one line per call."""

from __future__ import annotations

import logging

_log = logging.getLogger("tensorgate.access")


class AccessLog:
    """Writes one line per finished call."""

    def write(
        self,
        method: str,
        target: str,
        status: int,
        size: int,
        seconds: float,
        request_id: str = "",
    ) -> None:
        """Write a line; ``size`` is that of the response body; ``status`` 0 means no response."""
        shown = (status, size, seconds * 1000, request_id or "-")
        _log.info("%s %s %d %d B %.1f ms %s", method, target, *shown)
