"""Records which requests take the fast path."""

from __future__ import annotations

import pytest

from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.transport import (
    HeaderLines,
    PendingRequest,
    RequestTemplate,
    ResponseReceiver,
)


@pytest.fixture
def fast_path_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the requests that took the fast path, in order."""
    targets: list[str] = []
    try_send_nowait = HttpEndpoint.try_send_nowait

    def noting(
        endpoint: HttpEndpoint,
        start: RequestTemplate,
        headers: HeaderLines,
        body: bytes,
        receiver: ResponseReceiver,
    ) -> PendingRequest | None:
        sent = try_send_nowait(endpoint, start, headers, body, receiver)
        if sent is not None:
            targets.append(start.target)
        return sent

    monkeypatch.setattr(HttpEndpoint, "try_send_nowait", noting)
    return targets
