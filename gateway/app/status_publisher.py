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

    The status must have the process id as ``pid``.
    """

    def __init__(
        self,
        documents: SharedDocuments,
        slot: int,
        status: Callable[[], Status],
        metrics: GatewayMetrics,
    ) -> None:
        self._documents = documents
        self._slot = slot
        self._status = status
        self._metrics = metrics
        self._is_too_long = False

    async def run(self) -> None:
        """Measure and publish until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._publish()
            for _ in range(_PUBLISH_EVERY):
                due = loop.time() + _LAG_INTERVAL
                await asyncio.sleep(_LAG_INTERVAL)
                self._metrics.event_loop_lag.observe(max(0.0, loop.time() - due))

    async def statuses(self) -> list[Status]:
        """Return the statuses of all living workers: this one's of now, others' of last second."""
        self._publish()
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Status]:
        statuses = [orjson.loads(each) for each in self._documents.read_all() if each]
        return [status for status in statuses if _is_alive(status["pid"])]

    def _publish(self) -> None:
        self._metrics.count_cpu_time()
        status = self._status()
        if self._documents.publish(self._slot, orjson.dumps(status)):
            return
        if not self._is_too_long:
            self._is_too_long = True
            _log.warning("the status is too long to be shared: it lacks the upstreams")
        self._documents.publish(self._slot, orjson.dumps(status | {"upstreams": {}}))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
