"""Which requests are sent again, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is sent again to another endpoint, beyond what cannot have had an effect."""

    no_response: bool = False
    """A request that a server may have taken up: it closed without a byte of an answer."""
    statuses: frozenset[int] = frozenset()
    """A request that a server answered with one of these."""

    def after(self, kind: ErrorKind, is_repeatable: bool) -> bool:
        """Tell whether a request that failed so may be sent again.

        It may where no server has seen the whole of it, or where more is allowed; but never if a
        part of it is gone, which another server would not get.
        """
        allowed = kind.value.retryable or (kind.value.no_response and self.no_response)
        return allowed and is_repeatable


SAFE_RETRIES_ONLY = RetryPolicy()
"""Only what cannot have had an effect."""


class RetryBudget:
    """Lets retries be a share of the requests at most, so that they never multiply an outage.

    ``reserve`` retries are there from the beginning. So many, and the share of what is under way,
    are saved up at most: all that one of several servers has may fail at once.
    """

    def __init__(self, share: float = 0.5, reserve: int = 20) -> None:
        self._share = share
        self._reserve = reserve
        self._left = float(reserve)
        self._seen = 0

    def retry(self, sent: int, under_way: int) -> bool:
        """Tell whether a request may be sent again, which is then counted.

        ``sent`` counts all that was sent so far, retries included; of these, ``under_way`` have
        not ended yet.
        """
        most = self._reserve + self._share * under_way
        earned = self._share * max(0, sent - self._seen)
        # What was saved up is not lost as less is under way: much else may end while much fails.
        self._left = max(self._left, min(most, self._left + earned))
        self._seen = sent
        if self._left < 1:
            return False
        self._left -= 1
        self._seen += 1  # the retry will be among what was sent
        return True
