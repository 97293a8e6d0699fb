"""How many requests are sent again."""

from __future__ import annotations


class RetryBudget:
    """Lets retries be a share of the requests at most, so that they never multiply an outage.

    ``reserve`` retries are there from the beginning, and so many are saved up at most.
    """

    def __init__(self, share: float = 0.5, reserve: int = 20) -> None:
        self._share = share
        self._reserve = reserve
        self._left = float(reserve)

    def request(self) -> None:
        """Note a request that is sent for the first time."""
        self._left = min(self._reserve, self._left + self._share)

    def retry(self) -> bool:
        """Tell whether a request may be sent again, which is then counted."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
