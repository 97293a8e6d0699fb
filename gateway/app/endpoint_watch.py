"""Looks each second at what the calls of all workers say of endpoints, and tells the pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gateway.app.process import BackgroundTask
from gateway.app.shared_memory import Waiting
from gateway.observe import families
from gateway.observe.metric_store import Family, MetricStore, clean_label
from gateway.observe.metric_table import Histograms, MetricTable, RecentHistograms, Words, quantiles
from gateway.routing.endpoint_state import NO_CALLS, RecentCalls
from gateway.routing.latency_outliers import (
    FEW_CALLS,
    MEMORY,
    Latencies,
    Latency,
    ModelLatency,
    Silence,
    SilentEndpoints,
    UsualLatency,
)
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.pool import Pool

_INTERVAL = 1.0
_MAX_CPU_SHARE = 0.02
"""With many endpoints it looks less often: it takes at most this share of a core."""
_MINUTE = 60.0
_FAILURE_WINDOWS = (10.0, _MINUTE)
_LATENCY_WINDOWS = (MEMORY, 15.0, _MINUTE)
"""Seconds of calls to look at: the shortest with enough calls, so that an incident is seen soon."""

_UNSENT = Outcome.UNREACHABLE.value
_WITHOUT_RESPONSE = (_UNSENT, Outcome.NO_RESPONSE.value)
"""The kinds of failures of calls that got no byte of a response."""

_log = logging.getLogger("tensorgate")

_Endpoint = tuple[str, str]
"""Its upstream and URL, as labels."""
_Series = tuple[str, ...]
"""The labels of ENDPOINT_LATENCY: those of an endpoint, and a model."""


class _Look(NamedTuple):
    """What was counted since the look before, by endpoint."""

    at: float
    calls: Counter[_Endpoint]
    failures: Counter[_Endpoint]


class _Change:
    """Reads how the series of a family have changed since the last time."""

    def __init__(self, store: MetricStore, family: Family) -> None:
        self._table = MetricTable(store, family)
        self._last: Words | None = None

    def read(self) -> Iterable[tuple[tuple[str, ...], Words]]:
        """Return the labels and the words of each series that has changed."""
        new, old = self._table.read(), self._last
        change = new.copy()
        if old is None:
            change[:] = 0.0  # since when these were counted is not known
        else:
            change[: len(old)] -= old
        self._last = new
        labels = self._table.labels
        return [(labels[row], change[row]) for row in np.flatnonzero(change.any(axis=1)).tolist()]


class RecentLooks:
    """Remembers the calls of each endpoint: of the last minute, and latencies of an hour."""

    def __init__(self, store: MetricStore) -> None:
        self._calls = _Change(store, families.SERVER_DURATION)
        self._failures = _Change(store, families.ENDPOINT_FAILURES)
        self._responses = _Change(store, families.FIRST_BYTE)
        self._latencies = RecentHistograms(store, families.ENDPOINT_LATENCY)
        self._hour: Histograms | None = None
        self._silent = SilentEndpoints()
        self._heard_at: dict[_Endpoint, float] = {}
        """When each endpoint last responded, or could not be connected to, which is no silence."""
        self._looks: deque[_Look] = deque()
        self._last_look = 0.0
        self._succeeded_at: dict[_Endpoint, float] = {}
        self._failed_at: dict[_Endpoint, float] = {}

    def look(self, at: float, now: float) -> None:
        """Read the metrics; ``at`` is on the clock of ``time.monotonic``, ``now`` the Unix time."""
        calls, failures, successes = (Counter[_Endpoint]() for _ in range(3))
        for (upstream, url), words in self._responses.read():
            self._heard_at[upstream, url] = at
            successes[upstream, url] += int(words[1:].sum())
        for (upstream, url, kind), words in self._failures.read():
            failures[upstream, url] += int(words[0])
            if kind not in _WITHOUT_RESPONSE:
                successes[upstream, url] -= int(words[0])
            if kind == _UNSENT:  # and so not measured
                calls[upstream, url] += int(words[0])
                self._heard_at[upstream, url] = at
        for (upstream, url), words in self._calls.read():
            calls[upstream, url] += int(words[1:].sum())
        for endpoint in calls:
            if successes[endpoint] > 0:
                self._succeeded_at[endpoint] = self._last_look
            if failures[endpoint]:
                self._failed_at[endpoint] = self._last_look
        looks = self._looks
        looks.append(_Look(at, calls, failures))
        self._latencies.look(at)
        self._hour = None
        self._last_look = now
        while looks[0].at <= at - _MINUTE:
            looks.popleft()

    def recent_calls(self) -> dict[_Endpoint, RecentCalls]:
        """Return what the last calls of each endpoint say."""
        found: dict[_Endpoint, RecentCalls] = {}
        for seconds in reversed(_FAILURE_WINDOWS):
            calls, failures = Counter[_Endpoint](), Counter[_Endpoint]()
            for look in self._looks:
                if look.at > self._looks[-1].at - seconds:
                    calls.update(look.calls)
                    failures.update(look.failures)
            for endpoint, count in calls.items():
                if count >= FEW_CALLS or endpoint not in found:
                    succeeded = self._succeeded_at.get(endpoint, 0.0)
                    failed = self._failed_at.get(endpoint, 0.0)
                    found[endpoint] = RecentCalls(
                        count, failures[endpoint], seconds, succeeded, failed
                    )
        for endpoint, succeeded in self._succeeded_at.items():
            found.setdefault(endpoint, RecentCalls(succeeded_at=succeeded))
        return found

    def latencies(self) -> dict[_Endpoint, Latencies]:
        """Return the latency of the last calls of each endpoint."""
        recent: defaultdict[_Series, list[Latency]] = defaultdict(list)
        measured = 0.0
        for seconds in _LATENCY_WINDOWS:
            histograms = self._latencies.latest(seconds)
            if histograms.seconds > measured:  # with many endpoints, looks are seldom
                measured = histograms.seconds
                for series, latency in _medians(histograms):
                    recent[series].append(latency)
        hour, known = dict(_medians(self._last_hour())), self._latencies.known
        found: defaultdict[_Endpoint, dict[str, ModelLatency]] = defaultdict(dict)
        for series, each in recent.items():
            upstream, url, model = series
            if model:
                past = hour.get(series) if series in known else None
                found[upstream, url][model] = ModelLatency(each, past)
        return dict(found)

    def silences(self, waiting: Waiting) -> dict[_Endpoint, Silence]:
        """Return the endpoints that respond to none of the calls that wait.

        These were read before the last look, so that it has seen how those that ended did.
        """
        at = self._looks[-1].at
        return self._silent.find(at, waiting, self._heard_at, self._usual_latency)

    def _usual_latency(self, upstream: str, url: str, model: str) -> UsualLatency | None:
        """Return the latency of a model in the last hour: there, or else at all its endpoints."""
        hour = self._last_hour()
        own = [row for row, each in enumerate(hour.labels) if each == (upstream, url, model)]
        all_rows = [row for row, each in enumerate(hour.labels) if each[::2] == (upstream, model)]
        for rows in (own, all_rows):
            words = hour.words[rows].sum(axis=0, keepdims=True)
            calls = float(words[:, 1:].sum())
            if calls >= FEW_CALLS:
                p99 = float(quantiles(families.ENDPOINT_LATENCY, words, 0.99)[0])
                return UsualLatency(calls, p99, hour.seconds, rows is own)
        return None

    def _last_hour(self) -> Histograms:
        if self._hour is None:
            self._hour = self._latencies.hour()
        return self._hour


@dataclass(eq=False)
class EndpointWatch(BackgroundTask):
    """Judges the endpoints of all ``pools`` each second, while its context is open.

    ``waiting`` returns the calls of all workers that wait for a response at a time. ``pools``
    returns the pools by upstream; it is called each time, as a reload replaces them. One worker
    logs what all of them see: the one for which ``leads`` returns True.
    """

    looks: RecentLooks
    waiting: Callable[[float], Waiting]
    pools: Callable[[], Mapping[str, Pool]]
    leads: Callable[[], bool]

    async def run(self) -> None:
        """Look and judge until cancelled."""
        while True:
            pause = _INTERVAL
            try:
                took, recent, latencies = await asyncio.to_thread(self._look)
                pause = max(_INTERVAL, took / _MAX_CPU_SHARE)
                self._judge(recent, latencies)
            except Exception:
                # An error of our own is logged, and must not end the task.
                _log.exception("the states of endpoints could not be found")
            await asyncio.sleep(pause)

    def _look(self) -> tuple[float, dict[_Endpoint, RecentCalls], dict[_Endpoint, Latencies]]:
        began = time.thread_time()
        waiting = self.waiting(time.monotonic())
        self.looks.look(time.monotonic(), time.time())
        recent, latencies = self.looks.recent_calls(), self.looks.latencies()
        for endpoint, silence in self.looks.silences(waiting).items():
            calls = recent.get(endpoint, NO_CALLS)
            recent[endpoint] = replace(calls, silence=str(silence))
        return time.thread_time() - began, recent, latencies

    def _judge(
        self, recent: Mapping[_Endpoint, RecentCalls], latencies: Mapping[_Endpoint, Latencies]
    ) -> None:
        leads = self.leads()
        for upstream, pool in self.pools().items():
            urls = [member.endpoint.url for member in pool.members]
            labels = {url: (clean_label(upstream), clean_label(url)) for url in urls}
            pool.judge(
                {url: recent[label] for url, label in labels.items() if label in recent},
                {url: latencies[label] for url, label in labels.items() if label in latencies},
                leads,
            )


def _medians(histograms: Histograms) -> Iterable[tuple[_Series, Latency]]:
    """Yield the latency of each series that has enough calls."""
    words, seconds = histograms.words, histograms.seconds
    counts = words[:, 1:].sum(axis=1).tolist()
    medians = quantiles(families.ENDPOINT_LATENCY, words, 0.5).tolist()
    for series, calls, median in zip(histograms.labels, counts, medians, strict=True):
        if calls >= FEW_CALLS:
            yield series, Latency(calls, median, seconds)
