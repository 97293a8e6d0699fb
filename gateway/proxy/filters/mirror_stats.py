"""How the requests to a mirror do, told in one line a minute at most."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from gateway.errors import escape_for_log

LOG_INTERVAL = 60.0
"""Seconds between two lines."""

_log = logging.getLogger("tensorgate.mirror")


class MirrorStats:
    """Counts the requests to the upstream ``name``; ``clock`` gives seconds.

    The first failure is told at once. Those that follow are told with the first request that ends a
    minute later, be it well or not.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._sent = self._failed = self._left_out = 0
        self._last = ""
        self._quiet_until = -math.inf

    def sent(self, failure: str) -> None:
        """Count a request that was sent, and why it failed, if it did."""
        self._sent += 1
        if failure:
            self._failed += 1
            self._note("failed", failure)
        self._tell_in_time()

    def left_out(self, why: str) -> None:
        """Count a request that was not sent."""
        self._left_out += 1
        self._note("was not sent", why)
        self._tell_in_time()

    def tell(self) -> None:
        """Tell what has not been told yet, if there is anything."""
        if not self._has_news:
            return
        left_out = f", {self._left_out} were not sent" if self._left_out else ""
        _log.warning(
            "mirror to '%s': %d of %d requests failed%s, last: %s",
            self._name,
            self._failed,
            self._sent,
            left_out,
            self._last,
        )
        self._sent = self._failed = self._left_out = 0

    @property
    def _has_news(self) -> bool:
        return bool(self._failed or self._left_out)

    def _note(self, how: str, why: str) -> None:
        self._last = escape_for_log(why)
        _log.debug("a request to the mirror '%s' %s: %s", self._name, how, self._last)

    def _tell_in_time(self) -> None:
        if self._has_news and (now := self._clock()) >= self._quiet_until:
            self._quiet_until = now + LOG_INTERVAL
            self.tell()
