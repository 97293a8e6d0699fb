import json
import re
import time
from pathlib import Path
from select import PIPE_BUF
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ErrorKind, GatewayError, shorten
from gateway.http1.head import HeaderField
from gateway.observe.access_log import (
    FIELDS,
    AccessLog,
    LineFormat,
    TemplateFormat,
    reason_of,
    write_json,
    write_text,
)
from gateway.observe.call_record import CallLabels, CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.observe.log_writer import LogWriter
from gateway.settings.log import LOG_FIELDS


def _record(
    target: str = "/v2", status: int = 200, size: int = 0, seconds: float = 0
) -> CallRecord:
    record = CallRecord("GET", target)
    record.status, record.response_bytes, record.seconds = status, size, seconds
    return record


def _lines(folder: Path, *records: CallRecord, **options: Any) -> list[str]:
    """Return the lines of calls, without the time."""
    writer = LogWriter(str(folder / "access.log"))
    log = AccessLog(writer, **options)
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


def test_targets_and_errors_cannot_break_a_line(tmp_path: Path) -> None:
    record = _record('/a"b\\c\x85')
    record.error = 'the server said "no\n2026-01-01"'
    assert _lines(tmp_path, record) == [
        r'"GET /a\"b\\c\x85" 200 0 0.0 - - - "the server said \"no\n2026-01-01\""'
    ]


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


def _template(folder: Path, template: str, *records: CallRecord) -> list[str]:
    return _lines(folder, *records, line_format=TemplateFormat(f"{{time}} {template}"))


def test_fields_are_those_that_settings_allow() -> None:
    assert ("time", *FIELDS) == LOG_FIELDS


def test_template_names_fields(tmp_path: Path) -> None:
    record = _record("/v2", 503, 12, 0.5)
    record.labels = CallLabels("r", "infer", "resnet", "2", "json")
    record.set_error(GatewayError(ErrorKind.OVERLOADED, "full"))
    template = "{status}|{route}/{model}:{version} {{duration_ms}} {endpoint} {error_kind}"
    assert _template(tmp_path, template, record) == ["503|r/resnet:2 {500.0} - overloaded"]


def test_values_in_a_template_cannot_add_fields(tmp_path: Path) -> None:
    record = _record("/a b")
    record.labels = CallLabels("", "infer", "m 0.1")
    (line,) = _template(tmp_path, '{status} {model} "{method} {target}" {model}', record)
    assert line == r'200 m\x200.1 "GET /a b" m\x200.1'


def test_endpoint_of_an_address_is_one_field_of_text(tmp_path: Path) -> None:
    record = _record()
    record.upstream, record.endpoint = "u", "http://name:8000 (10.0.0.1)"
    assert _lines(tmp_path, record)[0].split()[-2] == r"http://name:8000\x20(10.0.0.1)"


@pytest.mark.parametrize("text", ["\x01", "\U000e0001", "\U0001f600", '"', "\udc80"])
@pytest.mark.parametrize("line_format", ["text", "json", "{target} {model} {version} {reason}"])
def test_line_fits_into_one_write_to_a_pipe(tmp_path: Path, text: str, line_format: str) -> None:
    record = _record("/" + 3000 * text, 502)
    record.labels = CallLabels("r", "infer", 3000 * text, 3000 * text, "json")
    record.error = 3000 * text
    formats: dict[str, LineFormat] = {"text": write_text, "json": write_json}
    writer = LogWriter(str(tmp_path / "access.log"))
    AccessLog(writer, formats.get(line_format) or TemplateFormat(line_format)).write(record)
    writer.close()
    line = (tmp_path / "access.log").read_bytes()
    assert len(line) <= PIPE_BUF
    if line_format == "json":
        assert json.loads(line)["model"].endswith("...")


@given(text=st.text(st.characters(codec=None)), reason=st.text())
def test_line_of_json_is_one_object_whatever_clients_send(text: str, reason: str) -> None:
    record = _record("/" + text)
    record.labels = CallLabels("r", "infer", text, text, "json")
    record.error, record.request_id = reason, "id"
    line = write_json(record, "now", 500)
    fields = json.loads(line)
    assert "\n" not in line
    assert fields["time"] == "now"
    assert fields["target"].startswith("/")
    assert fields.get("reason", "") == shorten(reason, 500)


def test_json_leaves_out_what_has_no_value() -> None:
    fields = json.loads(write_json(_record(), "now", 500))
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    assert texts == {"time": "now", "method": "GET", "target": "/v2", "answered_by": "gateway"}
    assert (fields.pop("status"), set(fields.values()) - set(texts.values())) == (200, {0})


@pytest.mark.parametrize(
    ("name", "value", "trace_id"),
    [
        ("traceparent", f"00-{10:032x}-{1:016x}-00", f"{10:032x}"),
        ("x-traceparent", f"00-{10:032x}-{1:016x}-01", ""),
        ("traceparent", f"00-{10:031x}-{1:016x}-01", ""),
    ],
)
def test_trace_id_is_that_of_a_valid_traceparent(name: str, value: str, trace_id: str) -> None:
    record = _record()
    record.noted = (HeaderField(name, name, value, b"", 0, 0),)
    assert record.trace_id == trace_id


def test_trace_id_of_a_traced_call_is_that_of_its_spans() -> None:
    record = _record()
    record.trace = CallTrace(lambda _: None)
    assert record.trace_id == record.sampled_trace_id == record.trace.trace_id != ""


def test_call_that_fails_or_is_slow_is_logged_without_a_sample(tmp_path: Path) -> None:
    def call(status: int, seconds: float = 0.0, error: str = "") -> CallRecord:
        record = _record(f"/{status}/{seconds}", status, seconds=seconds)
        record.error = error
        return record

    calls = [
        call(200),
        call(304),
        call(200, 0.499),
        call(200, 0.5),
        call(404),
        call(500),
        call(0, error="the client closed the connection"),
        call(200, 0.1, error="truncated"),
    ]
    lines = _lines(tmp_path, *calls, sample=0.0, slow=0.5)
    assert [line.split()[1].rstrip('"') for line in lines] == [
        "/200/0.5",
        "/404/0.0",
        "/500/0.0",
        "/0/0.0",
        "/200/0.1",
    ]


def test_sample_is_a_share_of_the_successful_calls(tmp_path: Path) -> None:
    assert 300 < len(_lines(tmp_path, *(_record() for _ in range(2000)), sample=0.25)) < 700


def test_failing_call_has_a_reason() -> None:
    for status, error, reason in (
        (200, "", ""),
        (404, "", "the server returned 404"),
        (0, "the client closed the connection", "the client closed the connection"),
    ):
        record = _record(status=status)
        record.attempts, record.error = 1, error
        assert reason_of(record) == reason
