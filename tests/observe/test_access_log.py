import logging

import pytest

from gateway.observe.access_log import AccessLog
from gateway.observe.call_record import CallRecord


def _record(
    target: str, status: int = 200, size: int = 0, seconds: float = 0, request_id: str = ""
) -> CallRecord:
    record = CallRecord("GET", target, request_id)
    record.status, record.response_bytes, record.seconds = status, size, seconds
    return record


@pytest.mark.parametrize(
    ("status", "size", "seconds", "line"),
    [
        (200, 12, 0.0123, "GET /v2?x=%20 200 12 B 12.3 ms -"),
        (0, 0, 0, "GET /v2?x=%20 0 0 B 0.0 ms -"),
        (502, 3_000_000_000, 3600, "GET /v2?x=%20 502 3000000000 B 3600000.0 ms -"),
    ],
)
def test_call_is_logged_on_one_line(
    caplog: pytest.LogCaptureFixture, status: int, size: int, seconds: float, line: str
) -> None:
    caplog.set_level(logging.INFO)
    AccessLog().write(_record("/v2?x=%20", status, size, seconds))
    (record,) = caplog.records
    assert record.getMessage() == line
    assert (record.name, record.levelname) == ("tensorgate.access", "INFO")


def test_line_ends_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    AccessLog().write(_record("/v2", request_id="a-1"))
    assert caplog.messages == ["GET /v2 200 0 B 0.0 ms a-1"]


def test_level_warning_disables_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    AccessLog().write(_record("/%s%d"))
    assert not caplog.records


def test_percent_signs_of_a_target_are_not_formats(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    AccessLog().write(_record("/%s%d%"))
    assert caplog.messages == ["GET /%s%d% 200 0 B 0.0 ms -"]
