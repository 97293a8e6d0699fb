"""Latency outliers as pure rules: endpoints that are slow beside siblings or their past, or silent.

An endpoint is silent if calls wait far longer than usual, and there is no response.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FEW_CALLS, MANY_CALLS = 3, 20
"""Calls without which nothing is said, and those from which a smaller factor will do."""
FACTOR, FACTOR_OF_FEW = 3.0, 10.0
_MIN_DIFFERENCE, _MIN_DIFFERENCE_OF_FEW = 0.02, 0.1
"""Seconds: less is what networks, event loops and busy machines do."""
_STILL_SLOW = 0.7
"""The share of these limits at which an endpoint that was slow is slow no more."""
MEMORY = 6.0
"""Seconds whose calls are looked at; if these are few, more."""
_RECENT = 30.0
"""Seconds up to which calls are of about the same time."""
_TWO_MINUTES = 120.0


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of calls that ended in the last seconds."""

    calls: float
    median: float
    """Seconds."""
    seconds: float = MEMORY
    """The time in which these calls ended."""


@dataclass(frozen=True, slots=True)
class ModelLatency:
    """The latency of a model at an endpoint."""

    recent: Sequence[Latency]
    """Of several times until now, the shortest first; all endpoints have the same times."""
    hour: Latency | None = None
    """Of the last hour; None before five to ten minutes are known."""


Latencies = Mapping[str, ModelLatency]
"""By model."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """Why an endpoint is slow."""

    model: str
    latency: Latency
    usual: Latency
    """The median of its siblings in the same time, or its own of the last hour."""
    has_siblings: bool

    @property
    def factor(self) -> float:
        """How many times as long its calls take."""
        return self.latency.median / self.usual.median

    def __str__(self) -> str:
        own, usual = self.latency, self.usual
        where = (
            "at the other endpoints"
            if self.has_siblings
            else f"in the last {describe_span(usual.seconds)}"
        )
        return (
            f"its calls of {self.model} take {describe_seconds(own.median)}"
            f" (median of the last {describe_span(own.seconds)}),"
            f" and {describe_seconds(usual.median)} {where}"
        )


def find_outliers(
    latencies: Mapping[str, Latencies], slow: Mapping[str, str], is_alone: bool
) -> dict[str, Outlier]:
    """Return the endpoints of an upstream that are outliers, each by one model that is slow there.

    ``latencies`` are those of the endpoints that have calls. Models differ, so each is compared
    with itself. ``slow`` are the endpoints that were outliers before, and by which model: that one
    is named as long as it is slow, and else the slowest, so that the sentence stays the same.
    An endpoint that ``is_alone`` in its upstream is compared with its past.
    """
    medians: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    for models in latencies.values():
        for model, each in models.items():
            for latency in _with_enough_calls(each):
                insort(medians[model, latency.seconds], latency.median)
    found: dict[str, Outlier] = {}
    for endpoint, models in latencies.items():
        compared = (
            (model, _with_its_past(each) if is_alone else _with_others(model, each, medians))
            for model, each in models.items()
        )
        outliers = [
            Outlier(model, *pair, not is_alone)
            for model, pair in compared
            if pair is not None and _is_outlier(*pair, endpoint in slow)
        ]
        if outliers:
            named = slow.get(endpoint)
            found[endpoint] = max(outliers, key=lambda each: (each.model == named, each.factor))
    return found


def _with_enough_calls(latency: ModelLatency) -> list[Latency]:
    return [each for each in latency.recent if each.calls >= FEW_CALLS]


def _with_its_past(latency: ModelLatency) -> tuple[Latency, Latency] | None:
    """Return the latency of now and that of the last hour, if both are known."""
    now, past = _with_enough_calls(latency), latency.hour
    return (now[0], past) if now and past is not None else None


def _with_others(
    model: str, latency: ModelLatency, medians: Mapping[tuple[str, float], Sequence[float]]
) -> tuple[Latency, Latency] | None:
    """Return the latency of now and that of the siblings in the same time, if both are known.

    The load of before may have been another one: if there are calls of now, no older ones count.
    """
    known = _with_enough_calls(latency)
    for own in [each for each in known if each.seconds <= _RECENT] or known:
        found = medians[model, own.seconds]
        if len(found) > 1:
            return own, Latency(0.0, _median_of_others(own.median, found), own.seconds)
    return None


def _median_of_others(own: float, medians: Sequence[float]) -> float:
    """Return the lower median of two or more sorted medians without one of them."""
    middle = (len(medians) - 2) // 2
    return medians[middle + (bisect_left(medians, own) <= middle)]


def _is_outlier(latency: Latency, usual: Latency, was_slow: bool) -> bool:
    factor, difference = FACTOR, _MIN_DIFFERENCE
    if latency.calls < MANY_CALLS and not was_slow:
        factor, difference = FACTOR_OF_FEW, _MIN_DIFFERENCE_OF_FEW
    scale = _STILL_SLOW if was_slow else 1.0
    limit = max(usual.median * factor, usual.median + difference)
    return latency.median >= usual.median + (limit - usual.median) * scale


def describe_seconds(value: float) -> str:
    """Return a latency in words."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def describe_span(seconds: float) -> str:
    """Return in words how long a time is of which numbers are."""
    return f"{seconds:.0f} s" if seconds < _TWO_MINUTES else f"{seconds / 60:.0f} min"


_MIN_SILENCE = 5.0
"""Seconds: less is what a server takes to load a model again, or to collect garbage."""
_MEMORY, _MEMORY_OF_SILENCE = 10.0, 60.0
"""Seconds without a call that waits, after which those of before are forgotten: clients that give
up come again, and one cause is one alarm."""

Endpoint = tuple[str, str]
"""Its upstream and its URL."""
_Series = tuple[str, str, str]
"""An upstream, a URL and a model."""


@dataclass(frozen=True, slots=True)
class UsualLatency:
    """The latency of a model until now."""

    calls: float
    p99: float
    """Seconds."""
    seconds: float
    """How long that time was."""
    is_own: bool = True
    """It is of the endpoint itself, not of all endpoints of the upstream."""


@dataclass(frozen=True, slots=True)
class Silence:
    """That an endpoint responds to no call, though calls of a model wait for it."""

    model: str
    since: float
    """When the first of these calls was sent, or the last response ended, if that was later."""
    seconds: float
    """Until now."""
    seconds_when_found: float
    usual: UsualLatency
    """As of then."""

    def __str__(self) -> str:
        usual = self.usual
        # Others respond meanwhile, and a worker that has just started knows no time before.
        when = (
            f"in the {describe_span(usual.seconds - self.seconds_when_found)} before"
            if usual.is_own
            else f"in the last {describe_span(usual.seconds)}, at all endpoints together"
        )
        return (
            f"no response for {describe_span(self.seconds)} to calls of {self.model};"
            f" 99 % of them took at most {describe_seconds(usual.p99)} {when}"
        )


class _Unanswered(NamedTuple):
    """Calls of a model without a response."""

    since: float
    """As of Silence."""
    seen_at: float
    """When one was last known to wait."""


class _Silent(NamedTuple):
    silence: Silence
    seen_at: float
    """When a call was last known to wait."""


class SilentEndpoints:
    """Finds the endpoints that are silent, and remembers them until they respond.

    It also finds those whose clients wait no longer than some seconds, and then come again. Times
    are in seconds, of any one clock.
    """

    def __init__(self) -> None:
        self._unanswered: dict[_Series, _Unanswered] = {}
        self._silent: dict[Endpoint, _Silent] = {}

    def find(
        self,
        now: float,
        waiting: Mapping[_Series, float],
        heard_at: Mapping[Endpoint, float],
        usual: Callable[[str, str, str], UsualLatency | None],
    ) -> dict[Endpoint, Silence]:
        """Return the endpoints that are silent.

        ``waiting`` tells when the oldest call was sent that waits for a response, by upstream, URL
        and model. ``heard_at`` is when each endpoint last responded to anything, or was found to
        be unreachable. ``usual`` returns the latency of a model at an endpoint, None if it is not
        known.
        """
        self._forget(now, heard_at)
        for series, sent_at in waiting.items():
            upstream, url, model = series
            endpoint = upstream, url
            since = max(sent_at, heard_at.get(endpoint, 0.0))
            if (before := self._unanswered.get(series)) is not None:
                since = min(since, before.since)
            self._unanswered[series] = _Unanswered(since, now)
            if (silent := self._silent.get(endpoint)) is not None:
                self._silent[endpoint] = _Silent(silent.silence, now)
                continue
            seconds = now - since
            if seconds >= _MIN_SILENCE:
                latency = usual(upstream, url, model)
                if latency is not None and _is_silence(seconds, latency):
                    found = Silence(model, since, seconds, seconds, latency)
                    self._silent[endpoint] = _Silent(found, now)
        return {
            endpoint: replace(silent.silence, seconds=now - silent.silence.since)
            for endpoint, silent in self._silent.items()
        }

    def _forget(self, now: float, heard_at: Mapping[Endpoint, float]) -> None:
        """Forget calls before a response, and what has not been seen for long."""
        self._unanswered = {
            series: each
            for series, each in self._unanswered.items()
            if each.since >= heard_at.get(series[:2], 0.0) and now < each.seen_at + _MEMORY
        }
        self._silent = {
            endpoint: each
            for endpoint, each in self._silent.items()
            if each.silence.since >= heard_at.get(endpoint, 0.0)
            and now < each.seen_at + _MEMORY_OF_SILENCE
        }


def _is_silence(seconds: float, usual: UsualLatency) -> bool:
    factor = FACTOR if usual.calls >= MANY_CALLS else FACTOR_OF_FEW
    return seconds >= usual.p99 * factor
