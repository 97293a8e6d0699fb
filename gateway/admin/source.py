"""What the admin address needs of the gateway: of this process, or of all workers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

from multidict import CIMultiDictProxy

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

    @property
    def hangs(self) -> bool:
        """Tell whether there are workers, and none of them runs."""

    def requests_in_progress(self) -> int:
        """Return the calls in progress, of a quarter of a second ago; in any thread."""

    async def worker_statuses(self) -> list[Status]:
        """Return the statuses of all living workers."""

    async def not_ready_reason(self) -> str:
        """Return why the gateway is not ready, or an empty text."""

    async def connect(self) -> socket.socket:
        """Return a connection that is served as that of a client over a Unix socket.

        Raises TimeoutError.
        """

    async def connect_captured(self, skips_conversion: bool) -> tuple[socket.socket, socket.socket]:
        """Return such a connection for one call, and a socket that gets what is captured of it.

        That is a list of attempts as JSON, sent when the call has ended. The call may skip
        conversion. Raises TimeoutError.
        """

    def authorizes(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has a key that allows actions."""

    async def drain_endpoint(self, upstream: str, url: str, drained: bool, operator: str) -> None:
        """Drain an endpoint in all workers, or restore it, for an operator. Raises ValueError."""

    def recent_calls(self, positions: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return the recent calls, as JSON, that came after positions, and the next positions.

        Without positions, it returns all that there are.
        """

    def events(self) -> list[dict[str, Any]]:
        """Return the last events of all processes, newest first; in any thread."""
