"""The journal: events of several processes as one list."""

import os
import time

import pytest

from gateway.app.journal.journal import (
    EJECTION_ENDED,
    ENDPOINT_EJECTED,
    ENDPOINT_HEALTHY,
    ENDPOINT_UNHEALTHY,
    MAX_EVENTS,
    SETTINGS_RELOADED,
    UPSTREAM_REACHABLE,
    UPSTREAM_UNREACHABLE,
    WORKER_ENDED,
    Event,
    EventKind,
    SharedJournal,
    merge_events,
)

URL = "http://h:1"


def _event(at: float, kind: EventKind, process: int, endpoint: str = URL) -> Event:
    return {
        "time": at,
        "kind": kind.name,
        "process": process,
        "upstream": "u",
        "endpoint": endpoint,
    }


def _merged(*events: tuple[EventKind, int]) -> list[tuple[str, int]]:
    """Return the kinds and processes that are left of events, each a second after the other."""
    found = merge_events([_event(at, kind, pid) for at, (kind, pid) in enumerate(events)])
    return [(each["kind"], each["process"]) for each in found]


def test_event_tells_what_happened_to_whom_by_whom_and_why() -> None:
    shared = SharedJournal(2)
    before = time.time()
    shared.of_process(0).record(
        ENDPOINT_EJECTED, who="outlier detection", why="refused", upstream="u", endpoint=URL
    )
    (event,) = shared.of_process(1).read()
    assert event.pop("time") == pytest.approx(before, abs=10)
    assert event.pop("id")
    assert event == {
        "level": "error",
        "kind": "endpoint_ejected",
        "event": "endpoint ejected",
        "process": os.getpid(),
        "subject": f"{URL} of u",
        "who": "outlier detection",
        "why": "refused",
        "upstream": "u",
        "endpoint": URL,
    }


def test_events_of_all_processes_are_read_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedJournal(2)
    times = iter([3, 1, 2])
    monkeypatch.setattr(time, "time_ns", lambda: next(times) * 10**9)
    for process, name in ((0, "third"), (1, "first"), (1, "second")):
        shared.of_process(process).record(SETTINGS_RELOADED, who="SIGHUP", subject=name)
    assert [each["subject"] for each in shared.of_process(0).read()] == [
        "third",
        "second",
        "first",
    ]


def test_last_thousand_events_are_kept() -> None:
    journal = SharedJournal(1).of_process(0)
    for number in range(MAX_EVENTS + 50):
        journal.record(SETTINGS_RELOADED, who="SIGHUP", why="x" * 60, subject=str(number))
    subjects = [each["subject"] for each in journal.read()]
    assert subjects == [str(number) for number in range(MAX_EVENTS + 49, 49, -1)]


def test_texts_of_servers_are_cut_and_need_not_be_unicode() -> None:
    journal = SharedJournal(1).of_process(0)
    journal.record(ENDPOINT_EJECTED, who="a", why="\udcff" + "x" * 5000, upstream="u" * 5000)
    (event,) = journal.read()
    assert event["why"] == "?" + "x" * 299 + "..."
    assert len(event["upstream"]) < 310


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (ENDPOINT_EJECTED, EJECTION_ENDED),
        (ENDPOINT_UNHEALTHY, ENDPOINT_HEALTHY),
        (UPSTREAM_UNREACHABLE, UPSTREAM_REACHABLE),
    ],
)
def test_transition_that_several_workers_find_is_one_event(bad: EventKind, good: EventKind) -> None:
    found = _merged((bad, 1), (bad, 2), (good, 2), (good, 1), (bad, 2), (bad, 1))
    assert found == [(bad.name, 1), (good.name, 2), (bad.name, 2)]


def test_worker_that_finds_the_same_again_has_missed_the_end() -> None:
    """An ejection may end without a word: too many endpoints are ejected."""
    bad = ENDPOINT_EJECTED
    assert _merged((bad, 1), (bad, 2), (bad, 1)) == [(bad.name, 1), (bad.name, 1)]


def test_what_only_a_dead_worker_knew_is_found_anew() -> None:
    bad = ENDPOINT_UNHEALTHY
    found = _merged((bad, 1), (WORKER_ENDED, 1), (bad, 3), (bad, 2))
    assert found == [(bad.name, 1), (WORKER_ENDED.name, 1), (bad.name, 3)]


def test_what_another_worker_knows_too_outlives_a_dead_one() -> None:
    bad = ENDPOINT_UNHEALTHY
    found = _merged((bad, 1), (bad, 2), (WORKER_ENDED, 1), (bad, 3))
    assert found == [(bad.name, 1), (WORKER_ENDED.name, 1)]


def test_endpoints_have_transitions_of_their_own() -> None:
    events = [_event(1, ENDPOINT_EJECTED, 1), _event(2, ENDPOINT_EJECTED, 2, "http://other")]
    assert merge_events(events) == events
