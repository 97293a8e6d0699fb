"""A receiver of traces, and a gateway that exports to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from tests.support.gateway import RunningGateway, running_gateway
from tests.support.http_messages import Head
from tests.support.servers.trace_receiver import TraceReceiver, trace_receiver

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}

Traced = Callable[..., AbstractAsyncContextManager[RunningGateway]]


def parent_of(head: Head) -> tuple[str, str, str]:
    """Return trace id, span id and flags of the traceparent that a server got."""
    value = head.get("traceparent")
    assert value is not None
    version, trace_id, span_id, flags = value.split("-")
    assert version == "00"
    return trace_id, span_id, flags


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    """A receiver over HTTP."""
    with trace_receiver() as running:
        yield running


@pytest.fixture
def traced(receiver: TraceReceiver) -> Traced:
    """Return what runs a gateway that traces; all is exported when it has stopped."""

    @asynccontextmanager
    async def run(
        *urls: str, sample: str = "100%", **settings: Any
    ) -> AsyncIterator[RunningGateway]:
        general = {
            "tracing": {**receiver.settings, "sample": sample},
            **settings.pop("general", {}),
        }
        async with running_gateway(*urls, general=general, **settings) as gateway:
            yield gateway

    return run
