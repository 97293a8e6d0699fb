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
from gateway.proxy.admission.concurrency_limit import Gate
from gateway.proxy.interfaces import Upstream


class Observed(Protocol):
    """A gateway, as far as it can be looked at."""

    revision: Revision
    runtime: Runtime
    draining: bool

    @property
    def listener(self) -> HttpListener:
        """Give what clients connect to."""


def status(gateway: Observed) -> dict[str, Any]:
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
        "places": _places(runtime.shared.gate),
        "held_bytes": runtime.shared.held.total,
        "upstreams": {name: _upstream(each) for name, each in runtime.upstreams.items()},
    }


def _upstream(upstream: Upstream) -> dict[str, Any]:
    return {
        "required": upstream.required,
        "usable": False if upstream.pool.unreachable else upstream.pool.is_usable,
        "unreachable": upstream.pool.unreachable,
        "dialect": _dialect(upstream),
        "places": _places(upstream.gate),
        "endpoints": [asdict(state) for state in upstream.pool.snapshot()],
    }


def _dialect(upstream: Upstream) -> dict[str, str | None]:
    """Tell how the servers are spoken to, and what tells that; nothing where it is not known."""
    speech = upstream.speech
    return {"name": speech.dialect.name if speech.dialect else None, "reason": speech.reason}


def _places(gate: Gate | None) -> dict[str, int] | None:
    """Tell how many exchanges have a place, and how many wait; nothing where there is no limit."""
    return None if gate is None else {"taken": gate.inside, "waiting": gate.waiting}
