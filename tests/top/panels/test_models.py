"""The models in a terminal."""

import pytest

from gateway.top.panels.models import describe
from tests.top import documents
from tests.top.documents import model
from tests.top.panels.lines import check_body, lines_of


def test_models_have_rates_and_times() -> None:
    silent = {"name": "silent", "ready": []}
    document = {"total": 2, "models": [model("resnet50"), silent]}
    assert lines_of(describe(document, 0, 80)) == [
        " 2 models; percentiles are of the last minute",
        " Model                 Ready         Calls   Errors      4xx       p50       p99",
        " resnet50              1 of 2          7/s      0 %   12.5 %      1 ms      3 ms",
        " silent                not known         –        –        –         –         –",
    ]


def test_a_wide_terminal_shows_statuses_and_forms() -> None:
    line = lines_of(describe({"total": 1, "models": [model("m")]}, 0, 200))[2]
    assert "2xx 7/s" in line
    assert "JSON 6/s, raw bytes 1/s" in line
    assert "demo (1 of 2)" in line


def test_calls_of_no_model_with_numbers_of_its_own_have_rows() -> None:
    """So the rates of all rows add up to those of all calls."""
    calls = {"calls_per_second": 50.0, "error_ratio": 1.0, "client_error_ratio": 0.0}
    document = {"total": 1, "models": [model("m")], "others": calls, "no_model": {}}
    body = describe(document, 0, 80)
    (others,) = lines_of(body)[3:]
    assert others.split() == ["other", "models", "50/s", "100", "%", "0", "%", "–", "–"]
    assert body.first(1) == 1  # where the list of the gateway ends
    assert len(lines_of(describe(document, 0, 80, "m"))) == 3


def test_a_model_that_only_fails_says_why() -> None:
    failure = {"time": 1.0, "status": 503, "reason": "cannot connect"}
    failing = {"name": "bad", "ready": [], "last_failure": failure}
    line = lines_of(describe({"total": 1, "models": [failing]}, 0, 260))[2]
    assert line.startswith(" bad ")
    assert " all fail " in line
    assert line.endswith(" the last one failed with 503: cannot connect")
    once = model("once", last_failure=failure)
    assert "all fail" not in lines_of(describe({"total": 1, "models": [once]}, 0, 80))[2]


def test_rows_that_are_not_read_yet_are_dots() -> None:
    body = describe({"total": 300, "models": [model("m100"), model("m101")]}, 100, 80)
    assert body.count == 300
    assert body.row(99).plain == body.row(102).plain == " …"
    assert body.row(101).plain.startswith(" m101")


def test_without_models_there_is_a_sentence() -> None:
    document = {"total": 0, "models": []}
    none = " No model is known to be ready, and none was called"
    assert lines_of(describe(document, 0, 80))[0] == none
    assert (
        lines_of(describe(document, 0, 80, "x"))[0]
        == " 0 models with this text; percentiles are of the last minute"
    )


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("text", documents.HOSTILE)
def test_hostile_texts_do_not_break_the_layout(text: str, width: int) -> None:
    one = model(text, ready=[{"upstream": text}], forms_per_second={text: 1.0})
    check_body(describe({"total": 1, "models": [one]}, 0, width), width)
