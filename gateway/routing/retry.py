"""Retries: which failed requests may be sent again, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What a route retries beyond requests that cannot have had an effect."""

    no_response: bool = False
    """Requests after which the server closed without a byte; it may have processed them."""
    statuses: frozenset[int] = frozenset()
    """Requests to which the server responded with one of these statuses."""

    def allows(self, kind: ErrorKind, is_repeatable: bool) -> bool:
        """Tell whether a request that failed with this error may be sent again.

        A request is not repeatable if part of its body is gone. Without a further policy, only
        errors after which no server can have seen the whole request allow a retry.
        """
        allowed = kind.value.retryable or (kind.value.no_response and self.no_response)
        return allowed and is_repeatable


SAFE_RETRIES_ONLY = RetryPolicy()
"""Retries only what cannot have had an effect."""


class RetryBudget:
    """Limits retries to a share of the requests, so that they never multiply an outage.

    ``share`` is at most 1. Requests earn retries, of which at most
    ``min_concurrency`` and the share of the calls in flight are saved up: all calls to one of
    several servers may fail at once. The first ``min_concurrency`` need not be earned.
    """

    def __init__(self, share: float = 0.5, min_concurrency: int = 20) -> None:
        self._share = share
        self._min_concurrency = min_concurrency
        self._left = float(min_concurrency)
        self._sent_before = 0

    def try_spend(self, sent: int, in_flight: int) -> bool:
        """Spend a retry if one is left.

        ``sent`` counts all requests so far, retries included; ``in_flight`` those of them that
        have not ended.
        """
        limit = self._min_concurrency + self._share * in_flight
        earned = self._share * max(0, sent - self._sent_before)
        # A shrinking limit takes nothing away: other calls may end while many fail.
        self._left = max(self._left, min(limit, self._left + earned))
        self._sent_before = sent
        if self._left < 1:
            return False
        self._left -= 1
        self._sent_before += 1  # the retry itself will be among what was sent
        return True
