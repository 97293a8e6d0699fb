"""Calls are sampled by the flag of their caller, else by the ratio."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.http1.forwarded import Peer
from gateway.http1.head import HeadParser, RequestHead
from gateway.observe.call_trace import CallTrace
from gateway.proxy.filters.forwarded_headers import NOTED_HEADERS
from gateway.proxy.filters.trace_sampling import TraceSampler

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"traceparent: 00-{TRACE}-{SPAN}-{flags}" for flags in ("01", "00"))
STATE = "tracestate: a=1"


def _head(*lines: str) -> RequestHead:
    data = "\r\n".join(("POST /v2 HTTP/1.1", "Host: gw:8080", *lines, "", ""))
    return HeadParser((), NOTED_HEADERS).parse_request(data.encode("latin-1"))


def _never() -> float:
    raise AssertionError("the caller has decided")


def _sample(
    *lines: str, ratio: float = 0.5, random: Callable[[], float] = _never
) -> CallTrace | None:
    sampler = TraceSampler(ratio, lambda _: None, random)
    return sampler.sample(_head(*lines), Peer("10.0.0.1", is_tls=True), "2")


def test_sampled_caller_is_continued() -> None:
    trace = _sample(SAMPLED, STATE, ratio=0.0)
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.state) == (TRACE, SPAN, "a=1")
    assert (trace.scheme, trace.host, trace.http_version) == ("https", "gw:8080", "2")


def test_caller_that_is_not_sampled_is_not_traced() -> None:
    assert _sample(UNSAMPLED, STATE, ratio=1.0) is None


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (STATE,),
        ("traceparent: 00-nonsense", STATE),
        (SAMPLED, SAMPLED, STATE),
        (SAMPLED.upper().replace("TRACEPARENT", "traceparent"), STATE),
    ],
)
def test_call_without_a_valid_parent_begins_a_trace_by_the_ratio(lines: tuple[str, ...]) -> None:
    assert _sample(*lines, random=lambda: 0.5) is None
    assert _sample(*lines, ratio=0.0, random=lambda: 0.0) is None
    trace = _sample(*lines, random=lambda: 0.49)
    assert trace is not None
    assert trace.trace_id not in ("", TRACE, "0" * 32)
    assert len(trace.trace_id) == 32
    assert (trace.parent_id, trace.state) == ("", "")
    assert _sample(*lines, ratio=1.0, random=lambda: 0.999999) is not None


def test_invalid_tracestate_does_not_end_a_trace() -> None:
    trace = _sample(SAMPLED, STATE, "tracestate: =")
    assert trace is not None
    assert (trace.parent_id, trace.state) == (SPAN, "")
