"""An admin site of a gateway whose state a test chooses, and clients of it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from multidict import CIMultiDictProxy

from gateway.admin.application import AdminSite
from gateway.admin.history import History
from gateway.admin.status import State, merge_statuses
from gateway.app.shared_memory import SharedCalls, SharedMemory
from gateway.listener.sockets import open_tcp_sockets
from gateway.observe import families
from gateway.observe.metric_store import MetricStore
from gateway.settings.schema import Settings
from tests.support.addresses import HOST
from tests.support.raw_client import RawClient, connect

URL = "http://h:1"
KEY = "k-1"
SINCE = "2026-01-01T12:00:00.000+00:00"


def endpoint(**fields: Any) -> dict[str, Any]:
    """Return the status of an endpoint that is in use."""
    return {
        "url": URL,
        "requests_in_progress": 1,
        "consecutive_failures": 0,
        "consecutive_ejections": 0,
        "ejection_remaining_seconds": 0.0,
        "healthy": None,
        "health_check_result": "",
        "models": None,
        "draining": False,
        "drained": False,
        "last_error": None,
        "last_error_at": None,
        "dialect": None,
        "state": "in_use",
        "state_text": "",
        "state_since": SINCE,
        "latency_outlier": None,
        "shared_memory": None,
    } | fields


def upstream(*endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the status of an upstream."""
    return {
        "required": True,
        "healthy": None,
        "unreachable_reason": None,
        "dialect": {"name": "triton", "reason": "configured"},
        "inference_protocol": {"name": "http", "reason": "configured"},
        "concurrency": None,
        "endpoints": list(endpoints),
    } | fields


def worker_status(upstreams: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the status of a worker: of one upstream with one endpoint, if none are given."""
    return {
        "pid": os.getpid(),
        "time": time.time(),
        "draining": False,
        "settings": {
            "number": 1,
            "loaded_at": time.time(),
            "last_failure": None,
            "failed_at": None,
        },
        "connections": 3,
        "tls_handshakes": 1,
        "requests_in_progress": 2,
        "tasks": 5,
        "bodies_in_transit": 1,
        "buffered_bytes": 100,
        "event_loop_lag": None,
        "concurrency": None,
        "upstreams": {"u": upstream(endpoint())} if upstreams is None else upstreams,
        "exemplars": [],
    } | fields


def make_settings(**fields: Any) -> Settings:
    """Return settings with one upstream, u."""
    return Settings.model_validate({"upstreams": {"u": {"endpoints": [URL]}}, **fields})


def sampled(store: MetricStore, count: Callable[[], None], seconds: float = 10.0) -> History:
    """Return a history with a sample before something is counted, and one after it."""
    history = History(store, lambda: 0)
    history.sample(100.0, 1_700_000_000.0)
    count()
    history.sample(100.0 + seconds, 1_700_000_000.0 + seconds)
    return history


def state_of(
    status: dict[str, Any], store: MetricStore, history: History | None = None, at: float = 1.0
) -> State:
    """Return the state of a gateway with one worker, and what a history knows of it."""
    window, minute = (history.now, history.minute) if history else (None, None)
    return State(at, merge_statuses([status], store, minute), window, minute)


def make_store() -> MetricStore:
    """Return an empty store of a gateway with one worker."""
    return MetricStore(families.FAMILIES, 3)


class ChosenSource:
    """A gateway for the admin address: it is what a test says."""

    def __init__(self, **settings: Any) -> None:
        self.settings = make_settings(**settings)
        self.metric_store = MetricStore(families.FAMILIES, 2)
        self.statuses: list[dict[str, Any]] = [worker_status()]
        self.reason = ""
        self.error: Exception | None = None
        self.asked = 0
        self.shared_calls = SharedCalls(2)
        self.drained: set[tuple[str, str]] = set()
        self.operators: list[str] = []
        self.journal = SharedMemory().owner_journal

    @property
    def hangs(self) -> bool:
        """Tell that it does not hang."""
        return False

    def requests_in_progress(self) -> int:
        """Return the calls in progress."""
        return 2

    def authorizes(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has the key."""
        return headers.get("Authorization") == f"Bearer {KEY}"

    async def drain_endpoint(self, upstream: str, url: str, drained: bool, operator: str) -> None:
        """Drain an endpoint, or restore it, and record who did."""
        self.operators.append(operator)
        (self.drained.add if drained else self.drained.discard)((upstream, url))

    async def connect(self) -> socket.socket:
        """Return a connection to nobody."""
        raise TimeoutError

    async def connect_captured(self, skips_conversion: bool) -> tuple[socket.socket, socket.socket]:
        """Return a connection to nobody."""
        raise TimeoutError

    async def worker_statuses(self) -> list[dict[str, Any]]:
        """Return the chosen statuses, or raise the chosen error."""
        self.asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return self.statuses

    async def not_ready_reason(self) -> str:
        """Return the chosen reason."""
        return self.reason

    def recent_calls(self, positions: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return the calls that were appended."""
        return self.shared_calls.read(positions)

    def events(self) -> list[dict[str, Any]]:
        """Return the events that were recorded, newest first."""
        return self.journal.read()

    def add_call(self, **fields: Any) -> None:
        """Append a call to the ring of a worker."""
        call = {"id": "1", "time": 1.0, "status": 200, "duration_ms": 1.0, **fields}
        assert self.shared_calls._ordinary[0].append(json.dumps(call).encode())


class RunningSite:
    """A running admin site, and where it listens."""

    def __init__(self, site: AdminSite, source: ChosenSource, url: str) -> None:
        self.site = site
        self.source = source
        self.url = url

    def client(self, own_host: str | None = None) -> AbstractAsyncContextManager[RawClient]:
        """Connect to it, as a client at an address of its own if one is given."""
        return connect(self.url, own_host=own_host)

    @property
    def connections(self) -> int:
        """Return the number of its open connections."""
        server = self.site._runner.server
        return len(server.connections) if server is not None else 0


@asynccontextmanager
async def running_site(
    source: ChosenSource | None = None, sock: socket.socket | None = None
) -> AsyncIterator[RunningSite]:
    """Run an admin site, which listens at a port of its own or at a socket that is given."""
    source = source or ChosenSource()
    if sock is None:
        (sock,) = open_tcp_sockets(HOST, 0)
    name = sock.getsockname()
    url = f"unix:{name}" if isinstance(name, str) else f"http://{name[0]}:{name[1]}"
    async with AdminSite(source) as site:
        site.sockets.listen(sock)
        yield RunningSite(site, source, url)
