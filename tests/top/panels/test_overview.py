"""The overview in a terminal."""

from typing import Any

import pytest

from gateway.top.panels.overview import describe
from tests.top import documents
from tests.top.panels.lines import check_body, lines_of


def _lines(width: int = 80, height: int = 24, search: str = "", **more: Any) -> list[str]:
    return lines_of(describe(documents.overview(**more), width, height, search))


def test_numbers_stand_beside_their_charts() -> None:
    lines = _lines()
    heading = "All calls last 10 s The last 5 min, 9 s per column highest"
    assert " ".join(lines[0].split()) == heading
    assert lines[1].startswith(" Calls             1,204/s  ▂▂▂▂▂▂▂▂▂▂▃▃▃▃▄▄▄▄")
    assert lines[1].endswith("█             298/s")
    assert lines[2].split()[:3] == ["Errors", "0.31", "%"]
    assert lines[3].split() == ["Duration", "p50", "4.21", "ms", "–"]
    assert lines[5].split()[:4] == ["Duration", "p99", "1.48", "s"]
    assert lines[6].split()[:3] == ["In", "progress", "12"]
    assert lines[7] == " 34 connections · received 1.2 MB/s · sent 840 B/s · buffered 1.5 MB"


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


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("text", documents.HOSTILE)
def test_hostile_texts_do_not_break_the_layout(text: str, width: int) -> None:
    settings = {"file": text, "last_failure": text}
    problems = [{"level": text, "text": text}]
    document = documents.overview(problems=problems, settings=settings, version=text, build=text)
    check_body(describe(document, width, 24), width)


def test_a_new_gateway_without_history_has_dashes() -> None:
    lines = _lines(recent=None, now={}, workers=[], settings=None)
    assert lines[1].split() == ["Calls", "–", "–"]
