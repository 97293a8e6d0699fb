"""The models: where each one is ready, and how it is called."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gateway.top import formatting
from gateway.top.document import Document, by_name, count, field, number, objects, text
from gateway.top.panels.body import ERROR, QUIET, STRONG, WARNING, Body, sentence
from gateway.top.table import Cell, Column, Layout, line

_COLUMNS = (
    Column("Model", 12, 19, 60, middle=True),
    Column("Ready", 9),
    Column("Calls", 8, right=True),
    Column("Errors", 7, rank=1, right=True),
    Column("4xx", 7, rank=2, right=True),
    Column("p50", 8, rank=1, right=True),
    Column("p95", 8, rank=2, right=True),
    Column("p99", 8, rank=1, right=True),
    Column("Statuses", 18, 28, 40, rank=3),
    Column("Forms", 20, 26, 40, rank=4),
    Column("Ready at", 20, 30, 60, rank=5),
)


def describe(models: Document, offset: int, width: int, search: str = "") -> Body:
    """Return the rows; ``offset`` is the position of the first model that was read."""
    layout = Layout(_COLUMNS, width)
    read, total = objects(models, "models"), count(models, "total")
    wait = line((" …", QUIET))
    others = [] if search else _others(models)

    def row(index: int) -> Text:
        if index >= total:
            return layout.row(others[index - total])
        return layout.row(_model(read[index - offset])) if 0 <= index - offset < len(read) else wait

    told = formatting.plural(total, "model") + (" with this text" if search else "")
    known = next((number(each, "duration_window_seconds") for each in read), None)
    told += f"; percentiles are of the {formatting.last_seconds(known)}"
    if not total and not search:
        told = "No model is known to be ready, and none was called"
    heading = [sentence(told, width, STRONG), layout.heading()]
    return Body(heading, total + len(others), row, lambda index: min(index, total))


def _others(models: Document) -> list[Sequence[Cell]]:
    """Return the rows of calls that are of no model with numbers of its own: so all add up."""
    named = (("other models", "others"), ("no model", "no_model"))
    return [
        ((name, QUIET), ("", ""), *_rates(calls), ("", ""))
        for name, key in named
        if number(calls := field(models, key), "calls_per_second")
    ]


def _model(model: Document) -> Sequence[Cell]:
    ready, where = _readiness(model)
    return ((text(model, "name"), ""), ready, *_rates(model), where)


def _readiness(model: Document) -> tuple[Cell, Cell]:
    """Return on how many endpoints a model is ready, and where."""
    ready, failure = objects(model, "ready"), field(model, "last_failure")
    if failure and number(model, "calls_per_second") is None:
        reason = text(failure, "reason")
        told = f"the last one failed with {count(failure, 'status')}"
        return ("all fail", ERROR), (f"{told}: {reason}" if reason else told, ERROR)
    endpoints = sum(count(each, "endpoints") for each in ready)
    of = sum(count(each, "of") for each in ready)
    known = (f"{endpoints} of {of}", "") if ready else ("not known", QUIET)
    return known, (", ".join(_ready_at(each) for each in ready), "")


def _rates(model: object) -> Sequence[Cell]:
    errors, refused = number(model, "error_ratio"), number(model, "client_error_ratio")
    return (
        (formatting.rate(number(model, "calls_per_second")), ""),
        (formatting.percent(errors), ERROR if errors else ""),
        (formatting.percent(refused), WARNING if refused else ""),
        (formatting.milliseconds(number(model, "p50_ms")), ""),
        (formatting.milliseconds(number(model, "p95_ms")), ""),
        (formatting.milliseconds(number(model, "p99_ms")), ""),
        (formatting.rates(by_name(model, "statuses_per_second")), ""),
        (formatting.rates(by_name(model, "forms_per_second"), are_forms=True), ""),
    )


def _ready_at(ready: Document) -> str:
    return f"{text(ready, 'upstream')} ({count(ready, 'endpoints')} of {count(ready, 'of')})"
