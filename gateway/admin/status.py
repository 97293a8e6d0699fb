"""How a gateway does: for operators to read, and for what collects metrics."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import Any, Protocol

from gateway import __version__
from gateway.app.reload.revision import Revision
from gateway.app.runtime import Runtime
from gateway.build import COMPILED
from gateway.listener.server import HttpListener
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.interfaces import Upstream


class ObservedGateway(Protocol):
    """A gateway, as far as it can be looked at."""

    revision: Revision
    runtime: Runtime
    draining: bool

    @property
    def listener(self) -> HttpListener:
        """Give what clients connect to."""


def status(gateway: ObservedGateway) -> dict[str, Any]:
    """Tell how a gateway does; of several workers, how this one does."""
    listener, runtime = gateway.listener, gateway.runtime
    return {
        "version": __version__,
        "compiled": COMPILED,
        "process": os.getpid(),
        "draining": gateway.draining,
        "settings": asdict(gateway.revision),
        "connections": listener.connections,
        "requests": listener.requests,
        "tasks": len(asyncio.all_tasks()),
        "places": _places(runtime.shared.concurrency_limit),
        "held_bytes": runtime.shared.held.total,
        "upstreams": {name: _upstream(each) for name, each in runtime.upstreams.items()},
    }


def _upstream(upstream: Upstream) -> dict[str, Any]:
    return {
        "required": upstream.required,
        "usable": False if upstream.pool.unreachable else upstream.pool.is_usable,
        "unreachable": upstream.pool.unreachable,
        "dialect": _dialect(upstream),
        "places": _places(upstream.concurrency_limit),
        "endpoints": [asdict(state) for state in upstream.pool.snapshot()],
    }


def _dialect(upstream: Upstream) -> dict[str, str | None]:
    """Tell how the servers are spoken to, and what tells that; nothing where it is not known."""
    dialect_state = upstream.dialect_state
    return {
        "name": dialect_state.dialect.name if dialect_state.dialect else None,
        "reason": dialect_state.reason,
    }


def _places(concurrency_limit: ConcurrencyLimit | None) -> dict[str, int] | None:
    """Tell how many exchanges have a place, and how many wait; nothing where there is no limit."""
    return (
        None
        if concurrency_limit is None
        else {"taken": concurrency_limit.active, "waiting": concurrency_limit.queued}
    )
