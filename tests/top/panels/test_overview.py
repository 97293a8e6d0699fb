"""The overview in a terminal."""

from typing import Any

import pytest

from gateway.top.panels.overview import describe
from tests.top import documents
from tests.top.panels.lines import check_body, lines_of


def _lines(width: int = 80, height: int = 24, search: str = "", **more: Any) -> list[str]:
    return lines_of(describe(documents.overview(**more), (width, height), search))


def test_numbers_stand_beside_their_charts() -> None:
    lines = _lines()
    heading = "All calls last 10 s The last 5 min, 10 s per column highest"
    assert " ".join(lines[0].split()) == heading
    assert lines[1].startswith(" Calls               1,204/s  ▂▂▂▂▂▂▂▂▂▃▃▃▃▄▄▄▄")
    assert lines[1].endswith("█              298/s")
    assert lines[2].split()[:3] == ["Errors", "0.31", "%"]
    assert lines[3].split()[:3] == ["4xx", "2", "%"]
    assert lines[4].split() == ["p50,", "last", "minute", "4.21", "ms", "–"]
    assert lines[6].split()[:5] == ["p99,", "last", "minute", "1.48", "s"]
    assert lines[7].split()[:3] == ["In", "progress", "12"]
    assert lines[8] == " 34 connections · received 1.2 MB/s · sent 840 B/s · buffered 1.5 MB"


@pytest.mark.parametrize(("height", "rows"), [(24, 1), (30, 2), (40, 3), (60, 4)])
def test_charts_use_the_height(height: int, rows: int) -> None:
    labels = [line.split("  ")[0].strip() for line in _lines(200, height)]
    assert labels.index("Errors") - labels.index("Calls") == rows


def test_problems_are_sentences_with_their_level() -> None:
    lines = _lines()
    at = lines.index(" 2 problems")
    assert lines[at + 1 : at + 3] == [
        " Error    no endpoint of dead can be used",
        " Warning  operators have drained 1 of 2",
    ]
    assert " Nothing is wrong." in _lines(problems=[])


def test_long_problems_break_into_lines() -> None:
    problem = {"level": "error", "text": "word " * 30}
    lines = _lines(60, problems=[problem])
    at = lines.index(" 1 problem")
    assert [len(line) > 20 for line in lines[at + 1 : at + 4]] == [True, True, True]
    assert lines[at + 2].startswith(" " * 10 + "word")


def test_a_filter_chooses_problems() -> None:
    lines = _lines(search="DRAINED")
    assert " 1 of 2 problems" in lines
    assert not [line for line in lines if "no endpoint" in line]


def test_workers_have_their_states_in_words() -> None:
    lines = _lines(120)
    at = next(number for number, line in enumerate(lines) if line.startswith(" Worker"))
    state = lines[at].index("State")
    states = [line[state:].partition("  ")[0] for line in lines[at + 1 : at + 4]]
    assert states == ["takes calls", "drains", "does not report"]
    assert lines[at + 3].endswith("9 s ago")


def test_a_failed_reload_is_told() -> None:
    settings = {**documents.overview()["settings"], "last_failure": "nonsense: unknown key"}
    assert [line for line in _lines(settings=settings) if "failed: nonsense: unknown key" in line]


def test_percentiles_of_a_young_gateway_are_of_the_time_since_its_start() -> None:
    now = {**documents.overview()["now"], "duration_window_seconds": 7}
    assert _lines(now=now)[4].startswith(" p50, last 7 s ")


_EVENTS = [
    documents.event(),
    documents.event(
        event="settings reloaded", level="info", subject="", who="SIGHUP", why="weight: 1 → 2"
    ),
    documents.event(event="process restarted", level="info", subject="process 7", who="supervisor"),
]


def _with_events(room: int, width: int = 160, search: str = "") -> list[str]:
    body = describe(documents.overview(), (width, 24), search, _EVENTS, room)
    check_body(body, width)
    return lines_of(body)


def test_last_events_are_shown_as_far_as_there_is_room() -> None:
    least = len(_lines())
    assert len(_with_events(0)) == len(_with_events(least + 2)) == least
    one = _with_events(least + 3)
    assert one[least:-1] == ["", one[-2]]
    assert one[-2].split() == ["Time", "Event", "Of", "Why", "By"]
    assert "endpoint ejected" in one[-1]
    assert "http://10.0.0.7:8000 of demo" in one[-1]
    lines = _with_events(least + 50)
    assert len(lines) == least + 5
    assert "the gateway" in lines[-2]
    assert lines[-2].endswith("SIGHUP")


def test_filter_chooses_events() -> None:
    lines = _with_events(100, search="sighup")
    assert lines[-2].split()[0] == "Time"
    assert "settings reloaded" in lines[-1]


def test_events_fit_a_narrow_terminal() -> None:
    assert any("endpoint ejected" in line for line in _with_events(100, width=34))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("text", documents.HOSTILE)
def test_hostile_texts_do_not_break_the_layout(text: str, width: int) -> None:
    settings = {"file": text, "last_failure": text}
    problems = [{"level": text, "text": text}]
    document = documents.overview(problems=problems, settings=settings, version=text, build=text)
    events = [documents.event(event=text, subject=text, who=text, why=text, level=text)]
    check_body(describe(document, (width, 24), "", events, 100), width)


def test_a_new_gateway_without_history_has_dashes() -> None:
    lines = _lines(recent=None, now={}, workers=[], settings=None)
    assert lines[1].split() == ["Calls", "–", "–"]
