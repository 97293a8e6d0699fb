import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import FailureLog

REFUSED = GatewayError(ErrorKind.UNREACHABLE, "cannot connect to http://a: Connection refused")
LATE = GatewayError(ErrorKind.SERVER_TIMEOUT, "http://a: nothing moved for 10 s")


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_message_is_logged_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    log = FailureLog(clock)
    for _ in range(50):
        log.write(REFUSED, "1f")
    log.write(LATE)
    clock.now += 10
    log.write(REFUSED, "2f")
    assert caplog.messages == [
        f"request 1f failed with 503: {REFUSED.message}",
        f"request - failed with 504: {LATE.message}",
        "49 more calls failed within 10 s",
        f"request 2f failed with 503: {REFUSED.message}",
    ]


def test_number_of_calls_that_are_not_logged_is_written_when_the_ten_seconds_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = _Clock()
    log = FailureLog(clock)
    for _ in range(3):
        log.write(REFUSED)
    clock.now += 9.9
    log.flush_if_due()
    assert len(caplog.messages) == 1
    clock.now += 0.1
    log.flush_if_due()
    log.flush_if_due()
    log.write(REFUSED)
    assert caplog.messages[1:2] == ["2 more calls failed within 10 s"]
    assert len(caplog.messages) == 3


def test_number_of_different_messages_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    log = FailureLog(clock)
    for number in range(1000):
        log.write(GatewayError(ErrorKind.BAD_RESPONSE, f"http://a returned {number} bytes"))
    assert len(caplog.messages) == 20
    clock.now += 10
    log.write(REFUSED)
    assert caplog.messages[20].startswith("980 more calls failed")


def test_messages_that_differ_by_numbers_have_one_cause(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog(_Clock())
    for size in range(100):
        log.write(GatewayError(ErrorKind.EXHAUSTED, f"{size} bytes are too many", cause="memory"))
    assert caplog.messages == ["request - failed with 503: 0 bytes are too many"]


@pytest.mark.parametrize("kind", [ErrorKind.BAD_REQUEST, ErrorKind.NOT_READY, ErrorKind.INTERNAL])
def test_errors_of_clients_health_checks_and_the_gateway_are_not_logged(
    kind: ErrorKind, caplog: pytest.LogCaptureFixture
) -> None:
    FailureLog(_Clock()).write(GatewayError(kind, "why"))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("status", "grpc_status", "error", "is_logged"),
    [
        (500, -1, "", True),
        (500, 13, "", True),
        (501, 12, "", False),
        (504, 4, "", False),
        (400, -1, "", False),
        (200, -1, "", False),
        (502, -1, "the gateway says why", False),
    ],
)
def test_server_error_is_logged_in_its_words(
    caplog: pytest.LogCaptureFixture, status: int, grpc_status: int, error: str, is_logged: bool
) -> None:
    record = CallRecord("GET", "/x", "1f")
    record.set_endpoint("servers", "http://a")
    record.status, record.grpc_status, record.error = status, grpc_status, error
    record.server_error = f"{status}: no\nmemory"
    log = FailureLog(_Clock())
    for _ in range(3):
        log.observe(record)
    line = f"request 1f failed with {status}: http://a returned {status}: no\\nmemory"
    assert caplog.messages == [line] * is_logged
