"""What is told of calls that have ended: to operators, and in the access log."""

import json
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from select import PIPE_BUF
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ErrorKind, GatewayError, shorten
from gateway.http1.head import HeaderField
from gateway.observe import recent_calls
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
from gateway.observe.recent_calls import (
    MAX_FAILED,
    MAX_LONG,
    MAX_ORDINARY,
    MAX_SLOW,
    RecentCalls,
    encode_call,
)
from gateway.settings.log import LOG_FIELDS
from tests.support.compiled import needs_source

TRACE = "0af7651916cd43dd8448eb211c80319c"


class _Rings:
    """What was appended, as documents."""

    def __init__(self) -> None:
        self.ordinary: list[dict[str, Any]] = []
        self.notable: list[dict[str, Any]] = []
        self.calls = RecentCalls(3, self._to(self.ordinary), self._to(self.notable))

    @staticmethod
    def _to(documents: list[dict[str, Any]]) -> Callable[[bytes], None]:
        return lambda encoded: documents.append(orjson.loads(encoded))


def _call(target: str = "/v2/x", status: int = 200, seconds: float = 0.01) -> CallRecord:
    record = CallRecord("GET", target)
    record.status, record.seconds = status, seconds
    return record


def _targets(documents: list[dict[str, Any]]) -> list[str]:
    return [each["target"] for each in documents]


CALLS = st.lists(
    st.tuples(
        st.sampled_from([200, 200, 200, 302, 404, 503, 0]),
        st.sampled_from([0.0, 0.001, 0.5, 3.0]) | st.floats(0, 100),
    ),
    max_size=150,
)


@given(CALLS)
def test_failed_and_slowest_calls_are_notable_and_the_last_others_ordinary(
    calls: list[tuple[int, float]],
) -> None:
    rings = _Rings()
    for number, (status, seconds) in enumerate(calls):
        rings.calls.observe(_call(f"{number}", status, seconds))
    assert rings.ordinary == rings.notable == []
    rings.calls.flush()
    failed = [number for number, (status, _) in enumerate(calls) if not 0 < status < 400]
    good = [number for number in range(len(calls)) if number not in failed]
    slowest = sorted(good, key=lambda number: (-calls[number][1], number))[:MAX_SLOW]
    expected = sorted([*failed[-MAX_FAILED:], *slowest])
    assert _targets(rings.notable) == [f"{number}" for number in expected]
    ordinary = [int(target) for target in _targets(rings.ordinary)]
    assert ordinary == sorted(set(ordinary))
    assert set(ordinary) <= set(good) - set(slowest)
    assert len(ordinary) == min(MAX_ORDINARY, len(good) - len(slowest))
    ids = [each["id"] for each in (*rings.ordinary, *rings.notable)]
    assert len(set(ids)) == len(ids)


def test_ordinary_calls_are_the_last_ones() -> None:
    rings = _Rings()
    for number in range(200):
        rings.calls.observe(_call(f"{number}"))
    rings.calls.flush()
    assert _targets(rings.ordinary) == [f"{number}" for number in range(160, 200)]
    assert _targets(rings.notable) == [f"{number}" for number in range(5)]


def test_call_with_an_error_has_failed_whatever_its_status() -> None:
    rings = _Rings()
    for _ in range(MAX_SLOW):
        rings.calls.observe(_call(seconds=9))
    aborted = _call("aborted")
    aborted.set_abort(GatewayError(ErrorKind.INTERNAL, "too slow"))
    rings.calls.observe(aborted)
    rings.calls.flush()
    assert _targets(rings.notable)[-1] == "aborted"
    assert rings.notable[-1]["reason"] == "too slow"
    assert rings.notable[-1]["error_kind"] == "internal"


LONG = "/" + "x" * 9000


def _long_head() -> CallRecord:
    record = _call("long head")
    record.noted = (HeaderField("tracestate", "tracestate", "x" * 9000, b"", 0, 0),)
    return record


@pytest.mark.parametrize("make", [lambda: _call(LONG), _long_head])
def test_long_calls_do_not_push_failed_ones_out(make: Callable[[], CallRecord]) -> None:
    """A client may send any number of them, and describing one takes time."""
    rings = _Rings()
    for _ in range(500):
        rings.calls.observe(make())
    rings.calls.observe(_call("failed", 503))
    rings.calls.flush()
    assert _targets(rings.notable) == ["failed"]
    assert len(rings.ordinary) == MAX_LONG
    rings.calls.observe(make())
    assert len(rings.ordinary) == MAX_LONG + 1


def test_long_calls_that_fail_are_notable() -> None:
    rings = _Rings()
    for number in range(100):
        rings.calls.observe(_call(f"/{number}{LONG}", 200 if number % 2 else 414))
    rings.calls.flush()
    assert [target[:3] for target in _targets(rings.notable)] == ["/0/", "/2/", "/4/", "/6/", "/8/"]
    assert [target[:3] for target in _targets(rings.ordinary)][:2] == ["/1/", "/3/"]


def test_memory_that_is_held_until_the_flush_is_bounded() -> None:
    rings = _Rings()
    records = [
        _call("/" + "x" * 8000 if number % 3 else LONG, 200 if number % 2 else 500)
        for number in range(1000)
    ]
    before = [sys.getrefcount(record) for record in records]
    for record in records:
        rings.calls.observe(record)
    del record
    held = [
        record
        for record, count in zip(records, before, strict=True)
        if sys.getrefcount(record) > count + 1  # and that of zip
    ]
    assert 0 < len(held) <= MAX_ORDINARY + MAX_FAILED + MAX_SLOW
    assert all(len(record.target) <= 8192 for record in held)
    del held
    rings.calls.flush()
    assert [sys.getrefcount(record) for record in records] == before


@needs_source  # compiled code does not look for a name of its own module
def test_nothing_is_held_or_described_again_if_a_call_cannot_be_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rings = _Rings()
    rings.calls.observe(_call("bad", 500))
    with monkeypatch.context() as patch:
        patch.setattr(recent_calls, "encode_call", None)
        with pytest.raises(TypeError):
            rings.calls.flush()
    rings.calls.observe(_call("good"))
    rings.calls.flush()
    assert _targets(rings.notable) == ["good"]


def _document(record: CallRecord) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(encode_call(record, "id", 1000.0))
    return document


def test_call_has_its_fields_and_no_empty_ones() -> None:
    record = _call()
    record.started = 5.0
    record.labels = CallLabels("route", "infer", "m", "", "json")
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    record.noted = (HeaderField("traceparent", "traceparent", parent, b"", 0, 0),)
    record.retries, record.request_elements = 2, 3
    document = _document(record)
    assert document["id"] == "id"
    assert document["time"] == 1000
    assert (document["route"], document["operation"], document["model"]) == ("route", "infer", "m")
    assert (document["retries"], document["request_elements"]) == (2, 3)
    assert document["trace_id"] == TRACE
    for name in ("version", "reason", "grpc_status", "response_elements", "upstream"):
        assert name not in document


def test_other_attempts_are_described() -> None:
    record = _call()
    record.set_endpoint("u", "http://one:1")
    record.begin_attempt(1.0)
    record.first_byte_seconds, record.server_seconds = 0.25, 0.5
    record.sent_bytes, record.received_bytes = 7, 8
    record.set_endpoint("u", "http://two:1")
    document = _document(record)
    assert document["endpoint"] == "http://two:1"
    times, sizes = {"first_byte_ms": 250, "server_ms": 500}, {"sent_bytes": 7, "received_bytes": 8}
    first = {"upstream": "u", "endpoint": "http://one:1", **times, **sizes}
    assert document["other_attempts"] == [first]


@pytest.mark.parametrize(
    "text", ["\ud800", "a\0b", '"<script>"', "🙂", "x" * 100_000, "\udcff" * 9000]
)
def test_any_texts_of_clients_and_servers_are_described_in_short(text: str) -> None:
    record = _call(text, 500)
    record.method = record.client = record.request_id = text[:100]
    record.labels = CallLabels(text[:100], text[:100], text, text, text[:100])
    record.error = text
    encoded = encode_call(record, "id", 0.0)
    assert len(encoded) < 20_000
    document = orjson.loads(encoded)
    assert document["target"][:1] in (text[:1], "?")
    assert len(document["model"]) <= 303


SECONDS = st.floats(0, 1000, allow_nan=False).map(lambda value: round(value, 6))


def _stages(record: CallRecord) -> list[tuple[str, float, float]]:
    return [
        (each["name"], each["start_ms"], each["duration_ms"])
        for each in _document(record)["timeline"]
    ]


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_timeline_adds_up(
    prepare: float, queue: float, upload: float, wait: float, receive: float, send: float
) -> None:
    """The client may take its time for the body: that is a gap before the server's stages."""
    record = _call()
    record.started = 77.0
    record.prepare_seconds, record.queue_seconds = prepare, queue
    record.begin_attempt(77.0 + prepare + upload + queue)
    record.first_byte_seconds, record.server_seconds = wait, wait + receive
    record.seconds = prepare + upload + queue + wait + receive + send
    stages = _stages(record)
    assert all(start >= 0 and duration >= 0 for _, start, duration in stages)
    expected = 1000 * (record.seconds - upload)
    assert sum(duration for *_, duration in stages) == pytest.approx(expected, abs=0.01)
    for (_, start, duration), (_, following, _) in pairwise(stages):
        assert following >= start + duration - 0.01
    _, start, duration = stages[-1]
    assert start + duration == pytest.approx(1000 * record.seconds, abs=0.01)


def test_timeline_of_a_call_that_was_refused_at_once_is_empty() -> None:
    assert _stages(_call(status=404)) == []


def test_timeline_of_a_call_without_a_response_shows_the_wait() -> None:
    record = _call(status=0, seconds=2.0)
    record.started, record.prepare_seconds = 10.0, 0.5
    record.begin_attempt(10.5)
    record.server_seconds = 1.5
    assert _stages(record) == [("prepare", 0, 500), ("server", 500, 1500)]


# The access log


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
