"""The admin address of a gateway: what it shows, and its server."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from gateway.admin.application import build_application
from gateway.admin.server import AdminServer
from gateway.admin.source import GatewaySource
from gateway.admin.view import GatewayView


class AdminSite(AdminServer):
    """Serves the pages of ``source``, and samples its metrics, while its context is open."""

    def __init__(self, source: GatewaySource) -> None:
        self._view = GatewayView(source)
        super().__init__(build_application(source, self._view))

    async def __aenter__(self) -> Self:
        """Start to sample and to serve."""
        await super().__aenter__()
        await self._view.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections."""
        await self.drain(0.0)
        await self._view.__aexit__(kind, error, traceback)
