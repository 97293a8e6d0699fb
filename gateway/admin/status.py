"""The status of a gateway, which /status and /metrics show."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from gateway import __version__
from gateway.build_info import COMPILED
from gateway.listener.server import HttpListener
from gateway.observe.call_metrics import SERVER_DURATION
from gateway.observe.metric_store import MetricStore
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.destination import Upstream

_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


class ObservedGateway(Protocol):
    """What the admin pages read of a gateway."""

    draining: bool

    @property
    def metric_store(self) -> MetricStore:
        """Return the counters and histograms of all workers."""

    @property
    def listener(self) -> HttpListener:
        """Return the listener of clients."""

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        """Return the upstreams by name."""

    @property
    def concurrency_limit(self) -> ConcurrencyLimit | None:
        """Return the limit of all calls together, if there is one."""

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of bodies that are buffered."""

    @property
    def settings_status(self) -> dict[str, Any]:
        """Return which settings are in use, and why newer ones are not."""

    async def not_ready_reason(self) -> str:
        """Return why the gateway is not ready, or an empty text."""


def status(gateway: ObservedGateway) -> dict[str, Any]:
    """Return the status of a gateway; of several workers, that of this one, but for durations."""
    listener = gateway.listener
    durations = gateway.metric_store.sums(SERVER_DURATION)
    return {
        "version": __version__,
        "compiled": COMPILED,
        "pid": os.getpid(),
        "draining": gateway.draining,
        "settings": gateway.settings_status,
        "connections": listener.connections,
        "requests_in_progress": listener.requests,
        "tasks": len(asyncio.all_tasks()),
        "concurrency": _concurrency(gateway.concurrency_limit),
        "buffered_bytes": gateway.buffered_bytes,
        "upstreams": {name: _upstream(each, durations) for name, each in gateway.upstreams.items()},
    }


def _upstream(
    upstream: Upstream, durations: Mapping[tuple[str, ...], list[float]]
) -> dict[str, Any]:
    return {
        "required": upstream.required,
        "healthy": False if upstream.pool.unreachable else upstream.pool.any_healthy,
        "unreachable_reason": upstream.pool.unreachable,
        "dialect": _dialect(upstream),
        "concurrency": _concurrency(upstream.concurrency_limit),
        "endpoints": [
            asdict(state) | _calls(durations.get((upstream.name, state.url)))
            for state in upstream.pool.snapshot()
        ],
    }


def _calls(duration: list[float] | None) -> dict[str, Any]:
    """Return the number and the duration of the calls of an endpoint, over all workers."""
    if duration is None:
        return {"calls_total": 0, "duration_ms": None}
    quantiles = {
        name: round(1000 * SERVER_DURATION.quantile(duration, share), 3)
        for name, share in _QUANTILES
    }
    return {"calls_total": int(sum(duration[1:])), "duration_ms": quantiles}


def _dialect(upstream: Upstream) -> dict[str, str | None]:
    """Return the dialect of the servers, if it is known, and what showed it."""
    state = upstream.dialect_state
    return {"name": state.dialect.name if state.dialect else None, "reason": state.reason}


def _concurrency(limit: ConcurrencyLimit | None) -> dict[str, int] | None:
    return None if limit is None else {"active": limit.active, "queued": limit.queued}
