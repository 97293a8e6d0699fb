"""Records which requests take the fast path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.http2.endpoint import Http2Exchange
from gateway.upstream.transport import RequestTemplate, ReservedConnection, ResponseReceiver

WARM_UP = "/v2/warm"
"""The target of requests that only make the gateway connect to a server."""


class _RecordedConnection(ReservedConnection):
    def __init__(self, connection: ReservedConnection, targets: list[str]) -> None:
        self._connection = connection
        self._targets = targets

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        self._connection.send(template, lines, body, receiver)
        if template.target != WARM_UP:
            self._targets.append(template.target)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def fast_path_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the requests that took the fast path, in order, but for warm-ups."""
    targets: list[str] = []
    try_reserve = HttpEndpoint.try_reserve

    def record(endpoint: HttpEndpoint) -> ReservedConnection | None:
        connection = try_reserve(endpoint)
        return None if connection is None else _RecordedConnection(connection, targets)

    monkeypatch.setattr(HttpEndpoint, "try_reserve", record)
    return targets


@pytest.fixture
def fast_path_streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the calls that took the fast path to a server over gRPC, in order."""
    targets: list[str] = []
    send = Http2Exchange.send

    def record(self: Http2Exchange, *arguments: Any) -> None:
        targets.append(arguments[0].target)
        send(self, *arguments)

    monkeypatch.setattr(Http2Exchange, "send", record)
    return targets
