"""Publishes a worker's status to the other workers, and measures its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import orjson

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

    A worker that is alone publishes nothing. The status must have the process id as ``pid``.
    Called with False, it leaves out the models of endpoints, of which there may be too many to be
    shared.
    """

    def __init__(
        self,
        documents: SharedDocuments,
        slot: int,
        status: Callable[[bool], Status],
        metrics: GatewayMetrics,
    ) -> None:
        self._documents = documents
        self._slot = slot
        self._status = status
        self._metrics = metrics
        self._shares_models = True

    async def run(self) -> None:
        """Measure and publish until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._metrics.count_cpu_time()
                if self._documents.slots > 1:
                    self._publish()
            except Exception:
                # An error of our own is logged, and must not end the task.
                _log.exception("the status could not be published")
            for _ in range(_PUBLISH_EVERY):
                due = loop.time() + _LAG_INTERVAL
                await asyncio.sleep(_LAG_INTERVAL)
                self._metrics.event_loop_lag.observe(max(0.0, loop.time() - due))

    async def statuses(self) -> list[Status]:
        """Return the statuses of all living workers: this one's of now, others' of last second."""
        self._metrics.count_cpu_time()
        return await asyncio.to_thread(self._read, orjson.dumps(self._status(True)))

    def _read(self, own: bytes) -> list[Status]:
        documents = self._documents.read_all()
        documents[self._slot] = own
        statuses = [orjson.loads(each) for each in documents if each]
        return [status for status in statuses if _is_alive(status["pid"])]

    def _publish(self) -> None:
        if self._shares_models:
            if self._documents.publish(self._slot, orjson.dumps(self._status(True))):
                return
            self._shares_models = False
            _log.info("the lists of models are too long for workers to share them")
        self._documents.publish(self._slot, orjson.dumps(self._status(False)))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False  # another user's process is no worker
    return True
