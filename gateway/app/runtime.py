"""What exchanges run on, as the settings say."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from gateway.app.routes import build_routes
from gateway.app.upstreams import build_upstreams
from gateway.codec.loans import Lender
from gateway.exchange.keys import KeyGroup
from gateway.exchange.straight import Straight
from gateway.settings.schema import Settings


class Runtime:
    """Holds the upstreams and the routes to them."""

    def __init__(
        self,
        settings: Settings,
        contexts: Mapping[str, ssl.SSLContext],
        lender: Lender | None,
        keys: Mapping[str, KeyGroup],
    ) -> None:
        self.upstreams = build_upstreams(settings, contexts)
        self.routes = build_routes(settings, self.upstreams, lender, keys)
        self.straight = Straight(self.routes)

    async def close(self) -> None:
        """Let go of all that is held, when no exchange is under way."""
        self.straight.close()
        for upstream in self.upstreams.values():
            await upstream.metadata.close()
            await upstream.pool.close()
