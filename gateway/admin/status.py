"""The status of a gateway, which /status and /metrics show: that of all workers as one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prometheus_client import ProcessCollector

from gateway import __version__
from gateway.admin.history import UNSENT, Minute, Window, endpoint_percentiles
from gateway.build_info import COMPILED, NATIVE
from gateway.observe.families import ENDPOINT_FAILURES, SERVER_DURATION
from gateway.observe.metric_store import MetricStore, clean_label
from gateway.upstream.pool.member import STATES_WORST_FIRST

_SUMMED = (
    "connections",
    "tls_handshakes",
    "requests_in_progress",
    "bodies_in_transit",
    "tasks",
    "buffered_bytes",
)
_OF_ONE_WORKER = ("pid", "draining", *_SUMMED)
"""What is shown of each worker."""
_ENDED = "worker_ended"
"""The kind of the journal's events of processes that ended unexpectedly."""
_ENDED_SECONDS = 60.0
"""For so long, a process that ended unexpectedly is shown."""

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class State:
    """The state of all workers at one time, and what has changed since a few seconds."""

    time: float
    status: Status
    window: Window | None = None
    """The last seconds, for rates."""
    minute: Minute | None = None
    """The last minute, for percentiles."""


def process_numbers(pid: int) -> dict[str, float]:
    """Return what the system says of a process: proc(5). It takes a millisecond for 1,000 files."""
    collector = ProcessCollector(pid=lambda: pid, registry=None)
    return {sample.name: sample.value for each in collector.collect() for sample in each.samples}


def merge_statuses(
    statuses: Sequence[Status],
    store: MetricStore,
    minute: Minute | None = None,
    events: Iterable[Status] = (),
) -> dict[str, Any]:
    """Return the status of all workers as one; ``statuses`` are those of the living ones.

    Each may have its ``process_numbers`` as ``process``. Percentiles are those of ``minute``.
    ``events`` are those of the journal, newest first.
    Numbers are sums. Where workers differ, the worse is shown: an endpoint is healthy or in use
    only if it is so in all of them.
    """
    now = time.time()
    counted = _Counted(store, minute)
    names = dict.fromkeys(name for each in statuses for name in each["upstreams"])
    return {
        "version": __version__,
        "compiled": COMPILED,
        "native": NATIVE,
        "draining": any(each["draining"] for each in statuses),
        "settings": _worst_settings([each["settings"] for each in statuses]),
        **{name: _sum(statuses, name) for name in _SUMMED},
        "concurrency": _sum_concurrency(statuses),
        "workers": [_describe_worker(each, now) for each in statuses],
        "ended_processes": [
            {"name": each["subject"], "why": each["why"], "ended_at": isoformat(each["time"])}
            for each in events
            if each["kind"] == _ENDED and each["time"] > now - _ENDED_SECONDS
        ],
        "process": _merge_process([each.get("process", {}) for each in statuses]),
        "upstreams": {
            name: _merge_upstream(
                name,
                [each["upstreams"][name] for each in statuses if name in each["upstreams"]],
                counted,
            )
            for name in names
        },
    }


def _describe_worker(status: Status, now: float) -> dict[str, Any]:
    lag = status["event_loop_lag"]
    return {
        **{name: status[name] for name in _OF_ONE_WORKER},
        "event_loop_lag": lag and {**lag, "since": isoformat(lag["since"])},
        "updated_at": isoformat(status["time"]),
        "seconds_since_update": round(max(0.0, now - status["time"]), 3),
    }


def isoformat(time: float) -> str:
    """Return a Unix time as /status shows it: ISO 8601, in UTC."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


class _Counted:
    """What was counted of the calls of endpoints, over all workers."""

    def __init__(self, store: MetricStore, minute: Minute | None) -> None:
        self._durations = store.sums(SERVER_DURATION)
        self._failures: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for (upstream, url, kind), (count,) in sorted(store.sums(ENDPOINT_FAILURES).items()):
            self._failures[upstream, url][kind] = int(count)
        self._percentiles = endpoint_percentiles(minute)

    def describe(self, upstream: str, url: str) -> dict[str, Any]:
        """Return numbers and durations of the calls of an endpoint."""
        key = clean_label(upstream), clean_label(url)
        failures = self._failures.get(key, {})
        return {
            "failures_total": sum(failures.values()),
            "failures": failures,
            "calls_total": int(sum(self._durations.get(key, ())[1:])) + failures.get(UNSENT, 0),
            "duration_ms": self._percentiles.found.get(key),
            "duration_window_seconds": self._percentiles.seconds,
        }


def _merge_upstream(name: str, statuses: Sequence[Status], counted: _Counted) -> dict[str, Any]:
    endpoints: defaultdict[str, list[Status]] = defaultdict(list)
    for status in statuses:
        for endpoint in status["endpoints"]:
            endpoints[endpoint["url"]].append(endpoint)
    return {
        "required": statuses[0]["required"],
        "healthy": _worse(each["healthy"] for each in statuses),
        "unreachable_reason": _unreachable_reason(statuses),
        "dialect": _first_known(statuses, "dialect"),
        "inference_protocol": _first_known(statuses, "inference_protocol"),
        "concurrency": _sum_concurrency(statuses),
        "endpoints": [
            _merge_endpoint(states) | counted.describe(name, url)
            for url, states in endpoints.items()
        ],
    }


def _unreachable_reason(statuses: Sequence[Status]) -> str | None:
    """Return what the worker says whose own calls failed: others know it from that one."""
    ordered = sorted(statuses, key=lambda each: -_sum(each["endpoints"], "consecutive_failures"))
    reason: str | None = _first(each["unreachable_reason"] for each in ordered)
    return reason


def _first_known(statuses: Sequence[Status], name: str) -> Any:
    """Return what the first worker that knows it says; without one, why it is not known."""
    said = [status[name] for status in statuses]
    return next((each for each in said if each["name"] is not None), said[0])


def _merge_endpoint(states: Sequence[Status]) -> dict[str, Any]:
    merged = dict(states[0])
    for name, merge in _ENDPOINT_RULES.items():
        merged[name] = merge([each[name] for each in states])
    decisive = next(each for each in states if each["healthy"] is merged["healthy"])
    merged["health_check_result"] = decisive["health_check_result"]
    by_age = sorted(states, key=lambda each: str(each["state_since"]))
    merged["latency_outlier"] = _first(each["latency_outlier"] for each in by_age)
    last = max(states, key=lambda each: each["last_error_at"] or "")
    merged |= {name: last[name] for name in ("last_error", "last_error_at")}
    return merged | _merge_states(states)


def _merge_states(states: Sequence[Status]) -> dict[str, Any]:
    """Return the worst state that a worker finds, why, and since when the first of them does."""
    state = min((each["state"] for each in states), key=STATES_WORST_FIRST.index)
    finders = [each for each in states if each["state"] == state]
    finders.sort(key=lambda each: str(each["state_since"]))
    decisive = finders[0]
    if state != "slow":  # there, another worker may name another model
        decisive = max(
            finders, key=lambda each: (each["consecutive_failures"], len(each["state_text"]))
        )
    return {
        "state": state,
        "state_text": decisive["state_text"],
        "state_since": finders[0]["state_since"],
    }


def _merge_process(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum up the numbers of the system; the start is that of the oldest worker."""
    return {
        name: (min if name.endswith("start_time_seconds") else sum)(
            part[name] for part in parts if name in part
        )
        for name in dict.fromkeys(name for part in parts for name in part)
        if not name.startswith("process_cpu")  # a counter, which a new worker must not set back
    }


def _worst_settings(settings: Sequence[Status]) -> Status:
    failed = [each for each in settings if each["last_failure"] is not None]
    return (failed or settings)[0]


def _sum(parts: Iterable[Status], name: str) -> int:
    return sum(part[name] for part in parts)


def _sum_concurrency(statuses: Iterable[Status]) -> dict[str, int] | None:
    parts = [each["concurrency"] for each in statuses if each["concurrency"] is not None]
    return {name: _sum(parts, name) for name in parts[0]} if parts else None


_SHARED_MEMORY_SIZES = ("size", "allocated", "in_use", "quarantined")


def _sum_shared_memory(parts: Iterable[Status | None]) -> Status | None:
    """Sum up the bytes; a reason why a worker has none is shown."""
    known = [each for each in parts if each is not None]
    if not known:
        return None
    why_not = next((each["why_not"] for each in known if each["why_not"]), "")
    sums = {name: _sum(known, name) for name in _SHARED_MEMORY_SIZES}
    return {**sums, "why_not": why_not}


def _worse(values: Iterable[bool | None]) -> bool | None:
    """Return False if any value is, None if none is known."""
    known = [value for value in values if value is not None]
    return all(known) if known else None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


_ENDPOINT_RULES: Mapping[str, Callable[[list[Any]], Any]] = {
    "requests_in_progress": sum,
    **dict.fromkeys(
        ("consecutive_failures", "consecutive_ejections", "ejection_remaining_seconds"), max
    ),
    "healthy": _worse,
    "drained": any,
    # A name may lead to an address again while calls of before still run there.
    "draining": all,
    "models": _first,
    "dialect": _first,
    "shared_memory": _sum_shared_memory,
}
"""How the fields of an endpoint are merged; others are those of the first worker."""
