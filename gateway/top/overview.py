"""The overview: rates and how they changed, problems, workers, settings, and the last events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from gateway.top import formatting
from gateway.top.document import Document, count, flag, number, numbers, objects, text
from gateway.top.formatting import Points, sparkline, squeeze
from gateway.top.plain_text import fit, plain, width_of, wrap
from gateway.top.table import (
    ERROR,
    GOOD,
    QUIET,
    STRONG,
    WARNING,
    Body,
    Cell,
    Column,
    Table,
    line,
    numeric,
    said,
    sentence,
)

_LABEL, _VALUE = 16, 10
_MOST = 17
"""Cells for the highest value, with its word."""
_LEAST_CHART = 8
_ROWS_FOR_CHARTS = {50: 4, 40: 3, 30: 2}
"""The rows of a chart by the height of the terminal."""
_LATE = 5.0
"""Seconds after which a worker's silence is worth a word, as the gateway has it."""
_PROBLEM_LINES = 3


@dataclass(frozen=True, slots=True)
class _Metric:
    label: str
    now: str
    say: Callable[[float | None], str]
    style: str
    share_of_calls: str = ""
    """The curve that is shown as a share of all calls."""
    alarm: str = ""
    """The style of a value above 0."""
    is_percentile: bool = False


_METRICS = (
    _Metric("Calls", "calls_per_second", formatting.rate, "cyan"),
    _Metric("Errors", "error_ratio", formatting.percent, "red", "errors_per_second", ERROR),
    _Metric(
        "4xx",
        "client_error_ratio",
        formatting.percent,
        "yellow",
        "client_errors_per_second",
        WARNING,
    ),
    *(
        _Metric(name, f"{name}_ms", formatting.milliseconds, "blue", is_percentile=True)
        for name in ("p50", "p95", "p99")
    ),
    _Metric("In progress", "requests_in_progress", formatting.count, "magenta"),
)


def describe_overview(
    overview: Document,
    size: tuple[int, int],
    search: str = "",
    events: Sequence[Document] = (),
    room: int = 0,
) -> Body:
    """Return the lines of the overview; ``search`` chooses among its problems and events.

    ``size`` is that of the terminal. The newest events are shown as far as the ``room`` lines that
    there are for all allow.
    """
    width, height = size
    lines = [
        *_metrics(overview, width, height),
        _traffic(overview, width),
        line(),
        *_problems(overview, width, search),
        line(),
        *_workers(overview, width),
        line(),
        *_settings(overview, width),
    ]
    now = number(overview, "time") or 0.0
    return Body((), [*lines, *_journal(events, width, room - len(lines), search, now)])


def _metrics(overview: Document, width: int, height: int) -> list[Text]:
    rows = next((rows for least, rows in _ROWS_FOR_CHARTS.items() if height >= least), 1)
    room = width - 1 - _LABEL - _VALUE - 3
    with_most = room >= _MOST + _LEAST_CHART
    chart_width = max(0, room - (_MOST + 1 if with_most else 1))

    def row(texts: Sequence[str], styles: Sequence[str]) -> Text:
        label, value, chart, most = texts
        shown = (
            f" {fit(label, _LABEL)} ",
            f"{fit(value, _VALUE, right=True)}  ",
            fit(chart, chart_width),
            f" {fit(most, _MOST, right=True)}" if with_most else "",
        )
        return line(*zip(shown, styles, strict=True))

    step = number(overview, "recent", "step_seconds") or 1.0
    end = number(overview, "recent", "end") or 0.0
    lines, title = [], ""
    for metric in _METRICS:
        history = _history(overview, metric)
        points, span = squeeze(history, end, step, chart_width)
        each = f", {formatting.seconds(span * step)} per column" if span * step > 1 else ""
        title = f"The last {formatting.seconds(step * len(history))}{each}" if history else ""
        value, label = number(overview, "now", metric.now), metric.label
        if metric.is_percentile:
            seconds = number(overview, "now", "duration_window_seconds")
            label += f", {formatting.last_seconds(seconds)}"
        highest = max((each for each in points if each is not None), default=None)
        *above, lowest = sparkline(points, rows, 0.01 if metric.share_of_calls else None)
        style = metric.alarm if value else ""
        styles = ("", style or STRONG, metric.style, QUIET)
        lines += [row(("", "", chart, ""), styles) for chart in above]
        lines.append(row((label, metric.say(value), lowest, metric.say(highest)), styles))
    return [row(("All calls", "last 10 s", title, "highest"), [STRONG] * 4), *lines]


def _history(overview: Document, metric: _Metric) -> Points:
    if not metric.share_of_calls:
        return numbers(overview, "recent", metric.now)
    calls = numbers(overview, "recent", "calls_per_second")
    errors = numbers(overview, "recent", metric.share_of_calls)
    return [
        None if all_calls is None else (failed or 0.0) / all_calls if all_calls else 0.0
        for all_calls, failed in zip(calls, errors, strict=False)
    ]


def _traffic(overview: Document, width: int) -> Text:
    now = overview.get("now")
    parts = (
        formatting.plural(number(now, "connections"), "connection"),
        f"received {formatting.size_rate(number(now, 'request_bytes_per_second'))}",
        f"sent {formatting.size_rate(number(now, 'response_bytes_per_second'))}",
        f"buffered {formatting.size(number(now, 'buffered_bytes'))}",
    )
    return sentence(" · ".join(parts), width)


def _problems(overview: Document, width: int, search: str) -> list[Text]:
    problems = objects(overview, "problems")
    if not problems:
        return [sentence("Nothing is wrong.", width, GOOD)]
    wanted, now = search.lower(), number(overview, "time") or 0.0
    fitting = [each for each in problems if wanted in text(each, "text").lower()]
    of = f"{len(fitting)} of " if search else ""
    title = f"{of}{formatting.plural(len(problems), 'problem')}"
    return [
        sentence(title, width, STRONG),
        *(each for problem in fitting for each in _problem(problem, width, now)),
    ]


def _problem(problem: Document, width: int, now: float) -> list[Text]:
    is_error = text(problem, "level") == "error"
    level, style = ("Error", ERROR) if is_error else ("Warning", WARNING)
    told, since = text(problem, "text"), formatting.unix_time(text(problem, "since"))
    if since is not None:
        told = f"since {formatting.clock(since, now)}: {told}"
    parts = wrap(plain(told), max(1, width - 11), _PROBLEM_LINES)
    first = line((f" {level:8}", style), (f" {parts[0]}", ""))
    return [first, *(line((f"{'':10}{part}", "")) for part in parts[1:])]


def _process(worker: Document) -> Cell:
    return f"process {text(worker, 'pid')}", ""


def _state(worker: Document) -> Cell:
    if (number(worker, "seconds_since_update") or 0.0) > _LATE:
        return "does not report", ERROR
    return ("drains", WARNING) if flag(worker, "draining") else ("takes calls", GOOD)


def _last_report(worker: Document) -> Cell:
    return f"{formatting.whole_seconds(number(worker, 'seconds_since_update'))} ago", QUIET


_WORKER_COLUMNS = (
    Column("Worker", _process, 15),
    Column("State", _state, 15),
    numeric("Connections", formatting.count, "connections", rank=1, width=11),
    numeric("In progress", formatting.count, "requests_in_progress", rank=1, width=11),
    numeric("Buffered", formatting.size, "buffered_bytes", rank=2, width=9),
    numeric("Tasks", formatting.count, "tasks", rank=4, width=5),
    Column("Last report", _last_report, 11, rank=3, right=True),
)


def _workers(overview: Document, width: int) -> list[Text]:
    table = Table(_WORKER_COLUMNS, width)
    return [table.heading(), *map(table.row, objects(overview, "workers"))]


_EVENT_STYLES = {"error": ERROR, "warning": WARNING}
_EVENT_WORDS = ("event", "subject", "why", "who")


def _event(event: Document) -> Cell:
    return text(event, "event"), _EVENT_STYLES.get(text(event, "level"), "")


def _subject(event: Document) -> Cell:
    return text(event, "subject") or "the gateway", ""


_EVENT_COLUMNS = (
    Column("Event", _event, 22, 0, 30),
    Column("Of", _subject, 18, 30, 60, rank=1, middle=True),
    Column("Why", said("why"), 18, 40, 200, rank=1),
    Column("By", said("who", QUIET), 17, 0, 30, rank=2),
)


def _journal(
    events: Sequence[Document], width: int, room: int, search: str, now: float
) -> list[Text]:
    """Return the last events; nothing without room for one, a blank line and the titles."""

    def time(event: Document) -> Cell:
        return formatting.short_clock(number(event, "time"), now), QUIET

    wanted = search.lower()
    fitting = [
        each for each in events if any(wanted in text(each, name).lower() for name in _EVENT_WORDS)
    ]
    if not (shown := fitting[: max(0, room - 2)]):
        return []
    table = Table((Column("Time", time, 8), *_EVENT_COLUMNS), width)
    return [line(), table.heading(), *map(table.row, shown)]


def _settings(overview: Document, width: int) -> list[Text]:
    settings, now = overview.get("settings"), number(overview, "time") or 0.0
    loaded, started = number(settings, "loaded_at"), number(overview, "started_at")
    facts = [
        (
            "Gateway",
            f"version {text(overview, 'version')}, {text(overview, 'build')}, Python"
            f" {text(overview, 'python')}, started {formatting.clock(started, now)}",
        ),
        ("Settings", f"{text(settings, 'file') or 'no file'}"),
        (
            "",
            f"number {text(settings, 'number')} in use since {formatting.clock(loaded, now)},"
            f" {formatting.plural(count(settings, 'reloads'), 'reload')},"
            f" {formatting.plural(count(settings, 'reload_failures'), 'failed reload')}",
        ),
    ]
    lines = [_fact(label, value, width) for label, value in facts]
    if failure := text(settings, "last_failure"):
        at = formatting.clock(number(settings, "failed_at"), now)
        lines.append(_fact("", f"the reload at {at} failed: {failure}", width, ERROR))
    return lines


def _fact(label: str, value: str, width: int, style: str = "") -> Text:
    shown = fit(plain(value), max(0, width - 11)).rstrip()
    assert width_of(label) <= 9
    return line((f" {label:9} ", STRONG), (shown, style))
