"""An attempt holds a lease until its end, and record and trace tell of it."""

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.proxy.attempts.attempt import Attempt
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.pool import Pool
from tests.support.compiled import needs_source
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_destination,
)

UNREACHABLE = GatewayError(ErrorKind.UNREACHABLE, "refused")
TIMED_OUT = GatewayError(ErrorKind.SERVER_TIMEOUT, "late")


def _attempt() -> tuple[Attempt, Pool]:
    endpoint = ScriptedEndpoint(EventLog(), ScriptedUpstreamResponse(), url="http://1")
    pool = make_destination(endpoint).upstream.pool
    record = CallRecord("POST", "/x")
    record.trace = CallTrace(lambda _: None)
    return Attempt("servers", pool.lease(), record), pool


def test_lease_is_given_back_once() -> None:
    attempt, pool = _attempt()
    attempt.end(Outcome.SUCCEEDED)  # of a call that never got its lease
    assert pool.outstanding == [0]
    attempt.hold()
    assert pool.outstanding == [1]
    for _ in range(2):
        attempt.end(Outcome.SUCCEEDED)
        assert pool.outstanding == [0]


@needs_source  # a double of a compiled class
def test_lease_is_given_back_if_the_record_cannot_be_filled() -> None:
    class _BrokenTrace(CallTrace):
        def fail_attempt(self, error: BaseException | None) -> None:
            raise ZeroDivisionError

    attempt, pool = _attempt()
    attempt.record.trace = _BrokenTrace(lambda _: None)
    attempt.hold()
    with pytest.raises(ZeroDivisionError):
        attempt.end_with(TIMED_OUT)
    assert pool.outstanding == [0]


def test_attempt_that_responds_is_measured_and_has_a_span() -> None:
    attempt, _ = _attempt()
    record, trace = attempt.record, attempt.record.trace
    attempt.hold()
    parent = attempt.begin("POST", "/x", is_grpc=False)
    attempt.record_head(503, 0.0)
    assert trace is not None
    (span,) = trace.attempts
    assert parent.endswith(f"-{span.span_id}-01")
    assert (span.endpoint, span.status) == ("http://1", 503)
    assert record.first_byte_seconds == record.server_seconds > 0
    attempt.repeat(Outcome.FAILED, "it returned 503")
    attempt.end(Outcome.FAILED, "it returned 503")
    assert (record.attempts, record.retries, record.received_bytes) == (1, 1, 0)
    assert (span.error_type, span.error) == ("status", "it returned 503")


@pytest.mark.parametrize(
    ("error", "outcome", "is_sent"),
    [
        (UNREACHABLE, Outcome.UNREACHABLE, False),
        (TIMED_OUT, Outcome.TIMED_OUT, True),
        (ZeroDivisionError(), Outcome.UNKNOWN, True),
        (None, Outcome.SUCCEEDED, True),
    ],
)
def test_nothing_counts_as_sent_without_a_connection(
    error: BaseException | None, outcome: Outcome, is_sent: bool
) -> None:
    attempt, _ = _attempt()
    attempt.hold()
    attempt.begin("POST", "/x", is_grpc=False)
    assert attempt.fail(error)[0] is outcome
    attempt.end(outcome)
    record = attempt.record
    assert bool(record.sent_at) is bool(record.server_seconds) is is_sent


def test_part_of_a_call_is_an_attempt_while_its_context_is_open() -> None:
    attempt, pool = _attempt()

    def run() -> None:
        with attempt:
            assert pool.outstanding == [1]
            attempt.begin("POST", "/x", is_grpc=False)
            raise UNREACHABLE

    with pytest.raises(GatewayError):
        run()
    assert pool.outstanding == [0]
    assert not attempt.record.sent_at
