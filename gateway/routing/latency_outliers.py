"""Latency outliers as pure rules: whether an endpoint is slow beside its siblings, or its past."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

FEW_CALLS, MANY_CALLS = 3, 20
"""Calls without which nothing is said, and those from which a smaller factor will do."""
_FACTOR, _FACTOR_OF_FEW = 3.0, 10.0
_MIN_DIFFERENCE, _MIN_DIFFERENCE_OF_FEW = 0.02, 0.1
"""Seconds: less is what networks, event loops and busy machines do."""
_STILL_SLOW = 0.7
"""The share of these limits at which an endpoint that was slow is slow no more."""
_MIN_PAST = 5
"""Minutes that must be known of an endpoint that has no siblings."""
MEMORY = 6.0
"""Seconds whose calls are looked at; if these are few, more."""
RECENT = 15.0
"""Seconds up to which calls are of about the same time."""


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of an endpoint's last calls of a model."""

    calls: float
    median: float
    """Seconds."""
    window: float = MEMORY
    """The seconds in which these calls ended."""
    past: Sequence[float] = ()
    """The medians of the minutes of the last hour, without the present one."""


Latencies = Mapping[str, Latency]
"""By model."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """Why an endpoint is slow."""

    model: str
    median: float
    usual: float
    """The median of its siblings, or of its past; in seconds."""
    has_siblings: bool

    @property
    def factor(self) -> float:
        """How many times as long its calls take."""
        return self.median / self.usual

    def __str__(self) -> str:
        where = "at the other endpoints" if self.has_siblings else "in the last hour"
        return (
            f"its calls of {self.model} take {_seconds(self.median)} (median),"
            f" and {_seconds(self.usual)} {where}"
        )


def find_outliers(
    latencies: Mapping[str, Latencies], slow: Collection[str], is_alone: bool
) -> dict[str, Outlier]:
    """Return the endpoints of an upstream that are outliers, each by the model that is slowest.

    ``latencies`` are those of the endpoints that have calls. Models differ, so each is compared
    with itself. ``slow`` are the endpoints that were outliers before. An endpoint that ``is_alone``
    in its upstream is compared with its past.
    """
    # The load of before may have been another one: what is new is not compared with what is old.
    medians: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
    for models in latencies.values():
        for model, latency in models.items():
            if latency.calls >= FEW_CALLS:
                insort(medians[model, False], latency.median)
                if latency.window <= RECENT:
                    insort(medians[model, True], latency.median)
    found: dict[str, Outlier] = {}
    for endpoint, models in latencies.items():
        outliers = [
            Outlier(model, latency.median, usual, not is_alone)
            for model, latency in models.items()
            if latency.calls >= FEW_CALLS
            and (
                usual := _past(latency)
                if is_alone
                else _median_of_others(latency, medians[model, latency.window <= RECENT])
            )
            and _is_outlier(latency, usual, endpoint in slow)
        ]
        if outliers:
            found[endpoint] = max(outliers, key=lambda each: each.factor)
    return found


def _past(latency: Latency) -> float:
    """Return the median of an endpoint's past; 0 if too little is known."""
    return median_low(latency.past) if len(latency.past) >= _MIN_PAST else 0.0


def _median_of_others(latency: Latency, medians: Sequence[float]) -> float:
    """Return the lower median of sorted medians without that of an endpoint; 0 without others."""
    if len(medians) < 2:
        return 0.0
    middle = (len(medians) - 2) // 2
    return medians[middle + (bisect_left(medians, latency.median) <= middle)]


def _is_outlier(latency: Latency, usual: float, was_slow: bool) -> bool:
    factor, difference = _FACTOR, _MIN_DIFFERENCE
    if latency.calls < MANY_CALLS and not was_slow:
        factor, difference = _FACTOR_OF_FEW, _MIN_DIFFERENCE_OF_FEW
    scale = _STILL_SLOW if was_slow else 1.0
    limit = max(usual * factor, usual + difference)
    return latency.median >= usual + (limit - usual) * scale


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
