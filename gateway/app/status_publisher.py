"""Publishes a worker's status to the admin process, and measures its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from gateway.admin.status import decode_status, encode_status
from gateway.app.background import BackgroundTask
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.workers.shared_documents import SharedDocuments

_LAG_INTERVAL = 0.25
"""Seconds between two measurements of the event loop."""
_PUBLISH_EVERY = 4
"""Measurements between two publications, which so take place once a second."""

_log = logging.getLogger("tensorgate")

Status = dict[str, Any]


class StatusPublisher(BackgroundTask):
    """Publishes what ``status`` returns in a slot of ``documents``, while its context is open.

    The status must have the process id as ``pid``. Called with False, it leaves out the models of
    endpoints, of which there may be too many to be shared. ``each_second`` is called once a second,
    and ``each_tick`` four times. ``on_lag`` gets the lag of the event loop in seconds.
    """

    def __init__(
        self,
        documents: SharedDocuments,
        slot: int,
        status: Callable[[bool], Status],
        metrics: GatewayMetrics,
        each_tick: Callable[[], None],
        each_second: Callable[[], None],
        on_lag: Callable[[float], None],
    ) -> None:
        self._documents = documents
        self._slot = slot
        self._status = status
        self._metrics = metrics
        self._each_tick = each_tick
        self._each_second = each_second
        self._on_lag = on_lag
        self._shares_models = True
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Measure and publish until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._each_second()
                if self._documents.slots > 1:
                    await self.publish()
            except Exception:
                # An error of our own is logged, and must not end the task.
                _log.exception("the status could not be published")
            for _ in range(_PUBLISH_EVERY):
                try:
                    self._each_tick()
                except Exception:
                    _log.exception("the state of this process could not be updated")
                due = loop.time() + _LAG_INTERVAL
                await asyncio.sleep(_LAG_INTERVAL)
                lag = max(0.0, loop.time() - due)
                self._metrics.event_loop_lag.observe(lag)
                self._on_lag(lag)

    async def publish(self) -> None:
        """Publish the status of now."""
        self._metrics.count_cpu_time()
        async with self._lock:
            if self._shares_models:
                encoded = await asyncio.to_thread(encode_status, self._status(True))
                if self._documents.publish(self._slot, encoded):
                    return
                self._shares_models = False
                _log.info("the lists of models are too long for workers to share them")
            encoded = await asyncio.to_thread(encode_status, self._status(False))
            self._documents.publish(self._slot, encoded)


def read_statuses(documents: SharedDocuments) -> list[Status]:
    """Return the last statuses of all living workers; in any thread."""
    return [status for status in read_last_statuses(documents) if _is_alive(status["pid"])]


def read_last_statuses(documents: SharedDocuments) -> list[Status]:
    """Return the last status of each worker that ever published one; in any thread."""
    return [decode_status(each) for each in documents.read_all() if each]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False  # another user's process is no worker
    return True
