"""W3C Trace Context as the Recommendation has it, and what a call's trace keeps of its attempts.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

from asyncio import CancelledError

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.http1.head import HeaderField
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import (
    MAX_ATTEMPTS,
    CallTrace,
    find_trace_parent,
    find_trace_state,
    parse_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def _headers(name: str, *values: str) -> list[HeaderField]:
    return [HeaderField(name, name, value, b"", 0, 0) for value in values]


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
        (f"fe-{TRACE}-{SPAN}-01-", True),
    ],
)
def test_valid_traceparent_names_the_callers_span(value: str, is_sampled: bool) -> None:
    parent = parse_traceparent(value)
    assert parent is not None
    assert (parent.trace_id, parent.span_id, parent.is_sampled) == (TRACE, SPAN, is_sampled)


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-",
        f"cc-{TRACE}-{SPAN}-01more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN[1:]}-01",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        f"\xb2\xb2-{TRACE}-{SPAN}-01",
    ],
)
def test_invalid_traceparent_names_none(value: str) -> None:
    assert parse_traceparent(value) is None
    assert find_trace_parent(_headers("traceparent", value)) is None


def test_several_traceparents_name_none() -> None:
    """Section 4.3: even if all are valid, and equal."""
    value = f"00-{TRACE}-{SPAN}-01"
    assert find_trace_parent(_headers("traceparent", value)) is not None
    assert find_trace_parent(_headers("traceparent", value, value)) is None
    assert find_trace_parent(_headers("tracestate", value)) is None


@pytest.mark.parametrize(
    ("values", "state"),
    [
        (("a=1",), "a=1"),
        (("a=1", "b=2"), "a=1,b=2"),
        (("a=1 , b=2\t",), "a=1,b=2"),
        (("a=1,,b=2,",), "a=1,b=2"),
        (("tenant@vendor=1",), "tenant@vendor=1"),
        (("0tenant@vendor=1",), "0tenant@vendor=1"),
        (("a_-*/9=b:c;d",), "a_-*/9=b:c;d"),
        ((f"{'a' * 256}={'b' * 256}",), f"{'a' * 256}={'b' * 256}"),
        ((",".join(f"k{n}=1" for n in range(32)),), ",".join(f"k{n}=1" for n in range(32))),
    ],
)
def test_valid_tracestate_is_kept(values: tuple[str, ...], state: str) -> None:
    assert find_trace_state(_headers("tracestate", *values)) == state


@pytest.mark.parametrize(
    "value",
    [
        "a",
        "a=",
        "a==1",
        "A=1",
        "0a=1",
        "a@=1",
        "a@b@c=1",
        "a@0b=1",
        "a=é",
        f"{'a' * 257}=1",
        f"a={'b' * 257}",
        f"a@{'b' * 15}=1",
        ",".join(f"k{n}=1" for n in range(33)),
        "a=" + "x" * 60_000,
    ],
)
def test_invalid_tracestate_is_dropped(value: str) -> None:
    assert find_trace_state(_headers("tracestate", value)) == ""
    assert find_trace_state(_headers("tracestate", "valid=1", value)) == ""


def _sent(record: CallRecord, trace: CallTrace, endpoint: str = "http://a:1") -> str:
    record.set_endpoint("u", endpoint)
    record.begin_attempt(record.started + 1.0)
    return trace.begin_attempt(record, "POST", "/x")


def _record() -> tuple[CallRecord, CallTrace]:
    record = CallRecord("POST", "/x", started=1.0)
    trace = record.trace = CallTrace(lambda _: None, TRACE, SPAN)
    return record, trace


def test_attempt_that_reached_no_endpoint_stays_in_the_trace() -> None:
    record, trace = _record()
    _sent(record, trace)
    trace.fail_attempt(GatewayError(ErrorKind.UNREACHABLE, "refused"))
    record.forget_attempt()
    (attempt,) = trace.attempts
    assert (attempt.error_type, attempt.error) == ("unreachable", "refused")
    assert attempt.seconds >= 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GatewayError(ErrorKind.SERVER_TIMEOUT, "late"), "server_timeout"),
        (GatewayError(ErrorKind.BAD_RESPONSE, "bad"), "bad_response"),
        (CancelledError(), "aborted"),
        (GatewayError(ErrorKind.NOT_ACCEPTABLE, "the client's fault"), ""),
        (ConnectionError("the client is gone"), ""),
        (None, ""),
    ],
)
def test_attempt_fails_by_its_server_or_by_a_cancellation(
    error: BaseException | None, kind: str
) -> None:
    record, trace = _record()
    _sent(record, trace)
    trace.set_status(200)
    trace.fail_attempt(error)
    trace.end_attempt(record)
    assert trace.attempts[0].error_type == kind


def test_first_reason_of_a_failure_is_kept() -> None:
    record, trace = _record()
    _sent(record, trace)
    trace.set_failure("no_response", "closed")
    trace.fail_attempt(CancelledError())
    trace.end_attempt(record)
    assert trace.attempts[0].error_type == "no_response"


def test_number_of_attempts_is_bounded() -> None:
    record, trace = _record()
    parents = {_sent(record, trace) for _ in range(MAX_ATTEMPTS + 3)}
    assert len(parents) == MAX_ATTEMPTS + 3
    assert (len(trace.attempts), trace.dropped_attempts) == (MAX_ATTEMPTS, 3)


def test_parts_add_their_attempts() -> None:
    record, trace = _record()
    parts = [record.part() for _ in range(MAX_ATTEMPTS + 1)]
    for part in parts:
        assert part.trace is not None
        _sent(part, part.trace)
    record.add_parts(parts)
    assert (len(trace.attempts), trace.dropped_attempts) == (MAX_ATTEMPTS, 1)
    assert trace.has_parts
    assert {part.trace.span_id for part in parts if part.trace} == {trace.span_id}


def test_parts_add_what_their_retries_have_sent() -> None:
    record = CallRecord("GET", "/v2")
    parts = [record.part(), record.part()]
    for part, url, sent in ((parts[0], "a", 1), (parts[0], "b", 10), (parts[1], "c", 100)):
        part.set_endpoint("u", url)
        part.begin_attempt(1.0)
        part.sent_bytes = sent
    record.add_parts(parts)
    assert (record.attempts, record.total_sent_bytes) == (3, 111)
