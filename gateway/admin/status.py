"""The status of a gateway, which /status and /metrics show: that of all workers as one."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import orjson
from prometheus_client import ProcessCollector

from gateway import __version__
from gateway.build_info import COMPILED, NATIVE
from gateway.listener.server import HttpListener
from gateway.observe.call_metrics import SERVER_DURATION, CallMetrics
from gateway.observe.gateway_metrics import ENDPOINT_FAILURES
from gateway.observe.metric_store import MetricStore, clean_label
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.destination import Upstream
from gateway.upstream.pool.member import MemberState

_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
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

_ENDPOINT_FIELDS = tuple(field.name for field in fields(MemberState))

Status = Mapping[str, Any]


class ObservedGateway(Protocol):
    """What the status of a worker is read from."""

    draining: bool
    call_metrics: CallMetrics

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


def worker_status(gateway: ObservedGateway, with_models: bool = True) -> dict[str, Any]:
    """Return the status of this process, for ``encode_status``."""
    listener = gateway.listener
    return {
        "pid": os.getpid(),
        "time": time.time(),
        "draining": gateway.draining,
        "settings": gateway.settings_status,
        "connections": listener.connections,
        "tls_handshakes": listener.tls_handshakes,
        "requests_in_progress": listener.requests,
        "bodies_in_transit": listener.buffers.streams,
        "tasks": len(asyncio.all_tasks()),
        "buffered_bytes": gateway.buffered_bytes,
        "concurrency": _concurrency(gateway.concurrency_limit),
        "upstreams": {
            name: _upstream(each, with_models) for name, each in gateway.upstreams.items()
        },
        "exemplars": gateway.call_metrics.exemplars(),
    }


def encode_status(status: Status) -> bytes:
    """Encode a status as JSON; endpoints that have the same models share one list.

    It may take long, and can run in any thread. Raises orjson.JSONEncodeError.
    """
    lists: dict[tuple[str, ...], int] = {}
    numbers: dict[int, int] = {}

    def refer(models: tuple[str, ...] | None) -> int | None:
        if models is None:
            return None
        number = numbers.get(id(models))
        if number is None:
            number = numbers[id(models)] = lists.setdefault(models, len(lists))
        return number

    upstreams = {
        name: {
            **upstream,
            "endpoints": [
                {name: getattr(each, name) for name in _ENDPOINT_FIELDS}
                | {"models": refer(each.models)}
                for each in upstream["endpoints"]
            ],
        }
        for name, upstream in status["upstreams"].items()
    }
    return orjson.dumps({**status, "upstreams": upstreams, "model_lists": list(lists)})


def decode_status(encoded: bytes) -> dict[str, Any]:
    """Decode a status; endpoints that have the same models refer to the same list."""
    status: dict[str, Any] = orjson.loads(encoded)
    lists = status.pop("model_lists")
    for upstream in status["upstreams"].values():
        for endpoint in upstream["endpoints"]:
            if endpoint["models"] is not None:
                endpoint["models"] = lists[endpoint["models"]]
    return status


def process_numbers(pid: int) -> dict[str, float]:
    """Return what the system says of a process: proc(5). It takes a millisecond for 1,000 files."""
    collector = ProcessCollector(pid=lambda: pid, registry=None)
    return {sample.name: sample.value for each in collector.collect() for sample in each.samples}


def merge_statuses(statuses: Sequence[Status], store: MetricStore) -> dict[str, Any]:
    """Return the status of all workers as one; ``statuses`` are those of the living ones.

    Each may have its ``process_numbers`` as ``process``.
    Numbers are sums. Where workers differ, the worse is shown: an endpoint is healthy or in use
    only if it is so in all of them.
    """
    now = time.time()
    durations, failures = store.sums(SERVER_DURATION), _failures(store)
    names = dict.fromkeys(name for each in statuses for name in each["upstreams"])
    merged: dict[str, Any] = {
        "version": __version__,
        "compiled": COMPILED,
        "native": NATIVE,
        "draining": any(each["draining"] for each in statuses),
        "settings": _worst_settings([each["settings"] for each in statuses]),
    }
    merged |= {name: _sum(statuses, name) for name in _SUMMED}
    merged["concurrency"] = _sum_concurrency(statuses)
    merged["workers"] = [
        {name: each[name] for name in _OF_ONE_WORKER}
        | {"seconds_since_update": round(max(0.0, now - each["time"]), 3)}
        for each in statuses
    ]
    merged["process"] = _merge_process([each.get("process", {}) for each in statuses])
    merged["upstreams"] = {
        name: _merge_upstream(
            name,
            [each["upstreams"][name] for each in statuses if name in each["upstreams"]],
            durations,
            failures,
        )
        for name in names
    }
    return merged


def _upstream(upstream: Upstream, with_models: bool) -> dict[str, Any]:
    state, endpoints = upstream.dialect_state, upstream.pool.snapshot()
    protocol, dialect = upstream.inference_protocol, state.dialect
    if not with_models:
        endpoints = tuple(replace(each, models=None) for each in endpoints)
    return {
        "required": upstream.required,
        "healthy": False if upstream.pool.unreachable else upstream.pool.any_healthy,
        "unreachable_reason": upstream.pool.unreachable,
        "dialect": {"name": dialect.name if dialect else None, "reason": state.reason},
        "inference_protocol": {"name": protocol.name(dialect), "reason": protocol.reason(dialect)},
        "concurrency": _concurrency(upstream.concurrency_limit),
        "endpoints": endpoints,
    }


def _concurrency(limit: ConcurrencyLimit | None) -> dict[str, int] | None:
    if limit is None:
        return None
    return {"active": limit.active, "queued": limit.queued, "max_requests": limit.max_requests}


def _failures(store: MetricStore) -> dict[tuple[str, str], dict[str, int]]:
    """Return the failed calls of each endpoint by their kind, over all workers."""
    found: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for (upstream, url, kind), (count,) in sorted(store.sums(ENDPOINT_FAILURES).items()):
        found[upstream, url][kind] = int(count)
    return found


def _merge_upstream(
    name: str,
    statuses: Sequence[Status],
    durations: Mapping[tuple[str, ...], list[float]],
    failures: Mapping[tuple[str, str], dict[str, int]],
) -> dict[str, Any]:
    endpoints: defaultdict[str, list[Status]] = defaultdict(list)
    for status in statuses:
        for endpoint in status["endpoints"]:
            endpoints[endpoint["url"]].append(endpoint)
    return {
        "required": statuses[0]["required"],
        "healthy": _worse(each["healthy"] for each in statuses),
        "unreachable_reason": _first(each["unreachable_reason"] for each in statuses),
        "dialect": _first_known(statuses, "dialect"),
        "inference_protocol": _first_known(statuses, "inference_protocol"),
        "concurrency": _sum_concurrency(statuses),
        "endpoints": [
            _merge_endpoint(states)
            | _failed_calls(failures.get(_labels(name, url), {}))
            | _calls(durations.get(_labels(name, url)))
            for url, states in endpoints.items()
        ],
    }


def _first_known(statuses: Sequence[Status], name: str) -> Any:
    """Return what the first worker that knows it says; without one, why it is not known."""
    said = [status[name] for status in statuses]
    return next((each for each in said if each["name"] is not None), said[0])


def _labels(upstream: str, url: str) -> tuple[str, str]:
    """Return the labels of an endpoint's series."""
    return clean_label(upstream), clean_label(url)


def _merge_endpoint(states: Sequence[Status]) -> dict[str, Any]:
    merged = dict(states[0])
    merged["requests_in_progress"] = _sum(states, "requests_in_progress")
    for name in ("consecutive_failures", "consecutive_ejections", "ejection_remaining_seconds"):
        merged[name] = max(each[name] for each in states)
    merged["healthy"] = healthy = _worse(each["healthy"] for each in states)
    decisive = next(each for each in states if each["healthy"] is healthy)
    merged["health_check_result"] = decisive["health_check_result"]
    merged["drained"] = any(each["drained"] for each in states)
    # A name may lead to an address again while calls of before still run there.
    merged["draining"] = all(each["draining"] for each in states)
    for name in ("models", "dialect"):
        merged[name] = _first(each[name] for each in states)
    last = max(states, key=lambda each: each["last_error_at"] or "")
    merged |= {name: last[name] for name in ("last_error", "last_error_at")}
    return merged


def _failed_calls(by_kind: dict[str, int]) -> dict[str, Any]:
    return {"failures_total": sum(by_kind.values()), "failures": by_kind}


def _calls(duration: list[float] | None) -> dict[str, Any]:
    """Return the number and the duration of the calls of an endpoint."""
    if duration is None:
        return {"calls_total": 0, "duration_ms": None}
    quantiles = {
        name: round(1000 * SERVER_DURATION.quantile(duration, share), 3)
        for name, share in _QUANTILES
    }
    return {"calls_total": int(sum(duration[1:])), "duration_ms": quantiles}


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


def _worse(values: Iterable[bool | None]) -> bool | None:
    """Return False if any value is, None if none is known."""
    known = [value for value in values if value is not None]
    return all(known) if known else None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)
