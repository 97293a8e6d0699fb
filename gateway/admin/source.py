"""What the admin address needs of the gateway: of this process, or of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gateway.observe.metric_store import MetricStore
from gateway.settings.schema import Settings

Status = dict[str, Any]
"""What ``worker_status`` returns, which came through JSON."""


class GatewaySource(Protocol):
    """What the admin address reads of a gateway."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""

    @property
    def metric_store(self) -> MetricStore:
        """Return the counters and histograms of all workers."""

    def requests_in_progress(self) -> int:
        """Return the calls in progress, of a quarter of a second ago; in any thread."""

    async def worker_statuses(self) -> list[Status]:
        """Return the statuses of all living workers."""

    async def not_ready_reason(self) -> str:
        """Return why the gateway is not ready, or an empty text."""

    def recent_calls(self, positions: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return the recent calls, as JSON, that came after positions, and the next positions.

        Without positions, it returns all that there are.
        """
