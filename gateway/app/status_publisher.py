"""The status of a worker, which it publishes for the admin process; and how its event loop does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import orjson

from gateway.app.process import BackgroundTask
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.destination import Upstream
from gateway.upstream.pool.member import MemberState
from gateway.workers.shared_records import SharedDocuments
from gateway.workers.worker_watch import is_alive

LAG_INTERVAL = 0.25
"""Seconds between two measurements of the event loop."""
LAGS_FROM, WELL_BELOW = 0.1, 0.05
"""Seconds of lag from which an event loop is said to lag, and below which it is well again."""
MEASUREMENTS = 20
"""So many of the newest measurements are looked at: those of five seconds."""
_PUBLISH_EVERY = 4
"""Measurements between two publications, which so take place once a second."""

_log = logging.getLogger("tensorgate")

_FIELDS = tuple(field.name for field in fields(MemberState))

Status = dict[str, Any]


def describe_upstream(upstream: Upstream, with_models: bool) -> Status:
    """Return the status of an upstream, for ``encode_status``."""
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
        "concurrency": describe_concurrency(upstream.concurrency_limit),
        "endpoints": endpoints,
    }


def describe_concurrency(limit: ConcurrencyLimit | None) -> dict[str, int] | None:
    """Return how many calls a limit lets run and has in its queue, if there is one."""
    if limit is None:
        return None
    return {"active": limit.active, "queued": limit.queued, "max_requests": limit.max_requests}


def encode_status(status: Mapping[str, Any]) -> bytes:
    """Encode a status as JSON; endpoints that have the same models share one list.

    It may take long, and can run in any thread. Raises orjson.JSONEncodeError.
    """
    lists: dict[tuple[str, ...], int] = {}
    numbers: dict[int, int] = {}

    def encode(endpoint: MemberState) -> dict[str, Any]:
        models, described = endpoint.models, {name: getattr(endpoint, name) for name in _FIELDS}
        if models is not None:
            if id(models) not in numbers:
                numbers[id(models)] = lists.setdefault(models, len(lists))
            described["models"] = numbers[id(models)]
        return described

    option = orjson.OPT_PASSTHROUGH_DATACLASS
    upstreams = orjson.Fragment(orjson.dumps(status["upstreams"], encode, option))
    return orjson.dumps({**status, "upstreams": upstreams, "model_lists": list(lists)})


def decode_status(encoded: bytes) -> Status:
    """Decode a status; endpoints that have the same models refer to the same list."""
    status: Status = orjson.loads(encoded)
    lists = status.pop("model_lists")
    for upstream in status["upstreams"].values():
        for endpoint in upstream["endpoints"]:
            if endpoint["models"] is not None:
                endpoint["models"] = lists[endpoint["models"]]
    return status


class EventLoopWatch:
    """Says since when the event loop of this process lags, and what share of a core it gets.

    One long pause is no lag: the median of five seconds counts.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=MEASUREMENTS)
        """The lag of each, the time, and the CPU time of the process until then, in seconds."""
        self._since: float | None = None
        self._text = ""

    def observe(self, lag: float) -> None:
        """Note by how many seconds a timer was late; logs when that becomes too much, or ends."""
        self._measured.append((lag, time.monotonic(), time.process_time()))
        if len(self._measured) < MEASUREMENTS:
            return
        usual = sorted(each for each, _, _ in self._measured)[MEASUREMENTS // 2]
        if usual >= LAGS_FROM or (self._since is not None and usual >= WELL_BELOW):
            (_, began, used), (_, end, used_at_end) = self._measured[0], self._measured[-1]
            share = (used_at_end - used) / max(end - began, 1e-9)
            self._text = f"lags by {usual * 1000:.0f} ms and uses {share:.0%} of a core"
            if self._since is None:
                self._since = time.time()
                _log.warning("the event loop %s: all calls wait meanwhile", self._text)
        elif self._since is not None:
            self._since = None
            _log.info("the event loop lags no more")

    def describe(self) -> dict[str, Any] | None:
        """Return ``text`` and ``since``, a Unix time, while the event loop lags; else None."""
        return None if self._since is None else {"text": self._text, "since": self._since}


@dataclass(eq=False)
class StatusPublisher(BackgroundTask):
    """Publishes what ``status`` returns in a slot of ``documents``, while its context is open.

    The status must have the process id as ``pid``. Called with False, it leaves out the models of
    endpoints, of which there may be too many to be shared. ``each_second`` is called once a second,
    and ``each_tick`` four times.
    """

    documents: SharedDocuments
    slot: int
    status: Callable[[bool], Mapping[str, Any]]
    metrics: GatewayMetrics
    each_tick: Callable[[], None]
    each_second: Callable[[], None]
    event_loop: EventLoopWatch = field(default_factory=EventLoopWatch)
    _shares_models: bool = field(default=True, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self) -> None:
        """Measure and publish until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.each_second()
                if self.documents.slots > 1:
                    await self.publish()
            except Exception:
                # An error of our own is logged, and must not end the task.
                _log.exception("the status could not be published")
            for _ in range(_PUBLISH_EVERY):
                try:
                    self.each_tick()
                except Exception:
                    _log.exception("the state of this process could not be updated")
                due = loop.time() + LAG_INTERVAL
                await asyncio.sleep(LAG_INTERVAL)
                lag = max(0.0, loop.time() - due)
                self.metrics.event_loop_lag.observe(lag)
                self.event_loop.observe(lag)

    async def publish(self) -> None:
        """Publish the status of now."""
        async with self._lock:
            if self._shares_models:
                encoded = await asyncio.to_thread(encode_status, self.status(True))
                if self.documents.publish(self.slot, encoded):
                    return
                self._shares_models = False
                _log.info("the lists of models are too long for workers to share them")
            encoded = await asyncio.to_thread(encode_status, self.status(False))
            self.documents.publish(self.slot, encoded)


def read_statuses(documents: SharedDocuments) -> list[Status]:
    """Return the last statuses of all living workers, or of all that ever ran if none lives.

    It may be called in any thread.
    """
    statuses = [decode_status(each) for each in documents.read_all() if each]
    return [status for status in statuses if is_alive(status["pid"])] or statuses
