"""Which way an exchange goes."""

from __future__ import annotations

import pytest

from gateway.exchange.base import StraightClient
from gateway.exchange.straight import Straight
from gateway.exchange.straight_exchange import Plan, StraightExchange


@pytest.fixture
def went_straight(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the requests that were sent on the straight way, in order."""
    targets: list[str] = []
    begin = Straight.begin

    def noting(
        straight: Straight, plan: Plan, body: bytes, client: StraightClient
    ) -> StraightExchange | None:
        exchange = begin(straight, plan, body, client)
        if exchange is not None:
            targets.append(plan.start.target)
        return exchange

    monkeypatch.setattr(Straight, "begin", noting)
    return targets
