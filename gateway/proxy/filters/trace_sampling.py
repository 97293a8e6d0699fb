"""Decides which calls are traced, by the sampled flag of their caller or by a ratio."""

from __future__ import annotations

from collections.abc import Callable
from random import random
from typing import Final

from gateway.http1.forwarded import Peer
from gateway.http1.head import RequestHead
from gateway.observe.call_record import CallObserver
from gateway.observe.call_trace import CallTrace, find_trace_parent, find_trace_state


class TraceSampler:
    """Begins the traces of sampled calls.

    A call with a valid ``traceparent`` is traced if that is sampled. Of the others the share
    ``ratio`` is, from 0 to 1. ``report`` gets the records of mirrored copies.
    """

    def __init__(
        self, ratio: float, report: CallObserver, random: Callable[[], float] = random
    ) -> None:
        self._ratio: Final = ratio
        self._report: Final = report
        self._random: Final = random

    def sample(self, head: RequestHead, peer: Peer, http_version: str) -> CallTrace | None:
        """Return the trace of a call that begins; None if it is not sampled."""
        parent = find_trace_parent(head.noted)
        if parent is None:  # section 4.3 of W3C Trace Context: it begins a trace
            if self._random() >= self._ratio:
                return None
            trace = CallTrace(self._report)
        elif parent.is_sampled:
            state = find_trace_state(head.noted)
            trace = CallTrace(self._report, parent.trace_id, parent.span_id, state)
        else:
            return None
        trace.scheme = peer.scheme
        trace.host = head.headers.get("Host", "")
        trace.http_version = "1.0" if head.http_1_0 else http_version
        return trace
