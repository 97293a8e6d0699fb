"""What all workers of a gateway share in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.observe.call_metrics import CALL_FAMILIES
from gateway.observe.gateway_metrics import GATEWAY_FAMILIES
from gateway.observe.metric_store import MetricStore
from gateway.workers.shared_documents import SharedDocuments
from gateway.workers.shared_state import SharedEjections


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """It is made before the first fork, and outlives workers and reloads."""

    ejections: SharedEjections
    metric_store: MetricStore
    """A segment for each worker, and one more for the supervisor."""
    statuses: SharedDocuments
    """The status of each worker, as JSON."""

    @classmethod
    def for_workers(cls, workers: int) -> Self:
        """Make the memory for so many workers."""
        families = CALL_FAMILIES + GATEWAY_FAMILIES
        store = MetricStore(families, workers + 1)
        return cls(SharedEjections(), store, SharedDocuments(workers))

    @property
    def supervisor_segment(self) -> int:
        """Return the number of the supervisor's segment in the metric store."""
        return self.metric_store.segments - 1
