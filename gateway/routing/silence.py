"""Silent endpoints as pure rules: calls wait far longer than usual, and there is no response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gateway.routing.latency_outliers import (
    FACTOR,
    FACTOR_OF_FEW,
    MANY_CALLS,
    describe_seconds,
    describe_span,
)

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


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """Calls of a model without a response."""

    since: float
    """As of Silence."""
    seen_at: float
    """When one was last known to wait."""


@dataclass(frozen=True, slots=True)
class _Silent:
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
