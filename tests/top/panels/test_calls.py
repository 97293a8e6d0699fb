"""The calls in a terminal."""

import time

import pytest

from gateway.top.panels.calls import describe
from tests.top import documents
from tests.top.documents import NOW, call, calls
from tests.top.panels.lines import check_body, lines_of

FAILED = {"status": 503, "reason": "cannot connect to http://a:1", "endpoint": ""}


def test_calls_have_status_words_and_reasons() -> None:
    lines = lines_of(describe(calls(call(), call(**FAILED), call(status=0)), 80))
    at = time.strftime("%H:%M:%S", time.localtime(NOW))
    assert lines == [
        " Follows: 3 of 3 calls that the gateway keeps",
        " Ended at      Status           Model         Duration  Endpoint, or error",
        f" {at}.250  200 OK           add            1.33 ms  http://10.0.0.7:8000",
        f" {at}.250  503 Unavailable  add            1.33 ms  cannot connect to http:…",
        f" {at}.250  aborted          add            1.33 ms  http://10.0.0.7:8000",
    ]


def test_a_wide_terminal_shows_forms_sizes_and_phases() -> None:
    line = lines_of(describe(calls(call()), 300))[2]
    for text in ("JSON → binary", "134 B", "1.14 kB", "10.0.0.1", "server 1.02 ms, send 0.2 ms"):
        assert text in line


@pytest.mark.parametrize(
    ("fields", "style"),
    [({}, "green"), ({"status": 404}, "bold red"), ({"grpc_status": 14}, "bold red")],
)
def test_failed_calls_stand_out(fields: documents.Json, style: str) -> None:
    spans = describe(calls(call(**fields)), 80).row(0).spans
    assert str(spans[0].style) == style


@pytest.mark.parametrize(
    ("search", "found"), [("", 2), ("add", 1), ("CANNOT", 1), ("503", 1), ("operation", 0)]
)
def test_a_filter_finds_values_and_no_names_of_fields(search: str, found: int) -> None:
    document = calls(call(), call(model="other", target="/", **FAILED))
    assert describe(document, 80, search=search).count == found


def test_calls_without_an_endpoint_say_where_they_went() -> None:
    several = call(endpoint="", upstream="demo")
    refused = call(endpoint="", answered_by="gateway")
    lines = lines_of(describe(calls(several, refused, call(model="")), 120))
    assert "endpoints of demo" in lines[2]
    assert "no server was asked" in lines[3]
    assert "no model" in lines[4]


def test_the_title_tells_whether_calls_are_followed() -> None:
    paused = lines_of(describe(calls(call()), 80, search="ADD", follows=False))[0]
    assert paused == " Paused: 1 of 1 call that the gateway keeps, with this text"
    assert lines_of(describe(calls(), 80))[0] == " No call has ended yet"


@pytest.mark.parametrize("width", [40, 80, 300])
@pytest.mark.parametrize("text", documents.HOSTILE)
def test_hostile_texts_do_not_break_the_layout(text: str, width: int) -> None:
    names = ("model", "endpoint", "operation", "client_form", "server_form", "client", "request_id")
    one = call(**dict.fromkeys(names, text), timeline=[{"name": text}])
    check_body(describe(calls(one, call(status=500, reason=text)), width), width)
