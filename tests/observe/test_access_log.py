import re
import time
from pathlib import Path

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.access_log import AccessLog
from gateway.observe.call_record import CallRecord
from gateway.observe.log_writer import LogWriter


def _record(
    target: str = "/v2", status: int = 200, size: int = 0, seconds: float = 0
) -> CallRecord:
    record = CallRecord("GET", target)
    record.status, record.response_bytes, record.seconds = status, size, seconds
    return record


def _lines(folder: Path, *records: CallRecord) -> list[str]:
    """Return the lines of calls, without the time."""
    writer = LogWriter(str(folder / "access.log"))
    log = AccessLog(writer)
    for record in records:
        log.write(record)
    writer.close()
    times, lines = [], []
    for line in (folder / "access.log").read_text().splitlines():
        at, _, rest = line.partition(" ")
        times.append(at)
        lines.append(rest)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each) for each in times)
    return lines


@pytest.mark.parametrize(
    ("status", "size", "seconds", "line"),
    [
        (200, 12, 0.0123, '"GET /v2?x=%20" 200 12 12.3 - - - -'),
        (0, 0, 0, '"GET /v2?x=%20" 0 0 0.0 - - - -'),
        (502, 3_000_000_000, 3600, '"GET /v2?x=%20" 502 3000000000 3600000.0 - - - -'),
    ],
)
def test_call_is_logged_on_one_line(
    tmp_path: Path, status: int, size: int, seconds: float, line: str
) -> None:
    assert _lines(tmp_path, _record("/v2?x=%20", status, size, seconds)) == [line]


def test_line_has_request_id_upstream_endpoint_and_error(tmp_path: Path) -> None:
    record = _record(status=503)
    record.request_id, record.upstream, record.endpoint = "a-1", "triton", "http://host:8000"
    record.set_error(GatewayError(ErrorKind.UNREACHABLE, "cannot connect to http://host:8000"))
    assert _lines(tmp_path, record) == [
        '"GET /v2" 503 0 0.0 a-1 triton http://host:8000 "cannot connect to http://host:8000"'
    ]


def test_targets_and_errors_cannot_break_a_line(tmp_path: Path) -> None:
    record = _record('/a"b\\c\x85')
    record.error = 'the server said "no\n2026-01-01"'
    assert _lines(tmp_path, record) == [
        r'"GET /a\"b\\c\x85" 200 0 0.0 - - - "the server said \"no\n2026-01-01\""'
    ]


def test_long_targets_and_errors_are_cut(tmp_path: Path) -> None:
    """A line fits into a write to a pipe, which other writers do not mix with theirs."""
    record = _record("/" + "x" * 60_000)
    record.error = "y" * 60_000
    (line,) = _lines(tmp_path, record)
    assert "xxx..." in line
    assert "yyy..." in line
    assert len(line) < 4000


def test_time_is_that_of_the_end_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1_767_268_800.0, 1_767_268_800.0999, 1_767_268_801.5])
    writer = LogWriter(str(tmp_path / "log"))
    log = AccessLog(writer)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: next(times))
        for _ in range(3):
            log.write(_record())
    writer.close()
    assert [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()] == [
        "2026-01-01T12:00:00.000Z",
        "2026-01-01T12:00:00.099Z",
        "2026-01-01T12:00:01.500Z",
    ]
