"""Which way an exchange goes."""

from __future__ import annotations

import pytest

from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.transport import HeaderLines, Receiver, RequestStart, Sent


@pytest.fixture
def went_straight(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the requests that were sent on the straight way, in order."""
    targets: list[str] = []
    send_at_once = HttpEndpoint.send_at_once

    def noting(
        endpoint: HttpEndpoint,
        start: RequestStart,
        headers: HeaderLines,
        body: bytes,
        receiver: Receiver,
    ) -> Sent | None:
        sent = send_at_once(endpoint, start, headers, body, receiver)
        if sent is not None:
            targets.append(start.target)
        return sent

    monkeypatch.setattr(HttpEndpoint, "send_at_once", noting)
    return targets
