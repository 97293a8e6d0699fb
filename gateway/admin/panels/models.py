"""The models: where each is ready, how it is called, and what conversion saves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from gateway.admin.history import Windows, model_percentiles, rounded, summarize
from gateway.admin.panels.calls import has_failed
from gateway.admin.panels.query import parse_count, parse_text
from gateway.admin.savings import Savings
from gateway.observe.call_metrics import DURATION, MODEL_BYTES, MODEL_ELEMENTS
from gateway.observe.metric_store import OTHER, MetricStore, clean_label

_DEFAULT_MODELS, _MAX_MODELS = 100, 1000
_MAX_FAILED = 200
"""Models whose failed calls are noted: the last ones."""
_FAILED_SECONDS = 300.0
_MODEL, _FORM, _STATUS = map(DURATION.labels.index, ("model", "form", "status"))

Status = Mapping[str, Any]


def describe_models(
    time: float,
    status: Status,
    windows: Windows,
    query: Mapping[str, str],
    failed: FailedModels | None = None,
) -> dict[str, Any]:
    """Return the models that are ready or were called: those in use first. Raises ValueError.

    Models without numbers of their own have no rates: their calls are in ``others``, and calls of
    no model are in ``no_model``. So the rates of all add up.
    """
    search = parse_text(query, "search").lower()
    offset = parse_count(query, "offset", 0)
    limit = parse_count(query, "limit", _DEFAULT_MODELS, _MAX_MODELS)
    ready, rates = _ready_models(status), ModelRates(windows)
    failures = failed.recent(time) if failed is not None else {}
    known = dict.fromkeys([*ready, *rates.names, *failures])
    names = [name for name in known if search in name.lower()]
    names.sort(key=lambda name: (-rates.calls_per_second(name), name not in failures, name))
    return {
        "time": time,
        "total": len(names),
        "models": [
            {
                "name": name,
                "ready": ready.get(name, []),
                "last_failure": failures.get(name),
                **rates.describe(name),
            }
            for name in names[offset : offset + limit]
        ],
        "others": rates.describe(OTHER),
        "no_model": rates.describe(""),
    }


def describe_model(
    time: float,
    status: Status,
    windows: Windows,
    totals: ModelTotals,
    savings: Savings,
    name: str,
) -> dict[str, Any]:
    """Return one model: where it is ready, its rates, and what conversion saved."""
    endpoints = [
        {"upstream": upstream, "endpoint": endpoint["url"]}
        for upstream, each in status["upstreams"].items()
        for endpoint in each["endpoints"]
        if endpoint["models"] is not None and name in endpoint["models"]
    ]
    return {
        "time": time,
        "name": name,
        "ready": _ready_models(status).get(name, []),
        **ModelRates(windows).describe(name),
        "endpoints": endpoints,
        "conversion": totals.describe(name, savings),
    }


def _ready_models(status: Status) -> dict[str, list[dict[str, Any]]]:
    """Return for each model how many endpoints of each upstream have it ready."""
    ready: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for upstream, each in status["upstreams"].items():
        # Endpoints with the same models share one list, which is counted once.
        lists = {id(models): models for models in _lists(each) if models is not None}
        times = Counter(map(id, _lists(each)))
        counts: Counter[str] = Counter()
        for key, names in lists.items():
            for name in names:
                counts[name] += times[key]
        for name, count in counts.items():
            ready[name].append(
                {"upstream": upstream, "endpoints": count, "of": len(each["endpoints"])}
            )
    return dict(ready)


def _lists(upstream: Status) -> list[list[str] | None]:
    return [endpoint["models"] for endpoint in upstream["endpoints"]]


class ModelRates:
    """The calls of models in the last seconds, and their times in the last minute."""

    def __init__(self, windows: Windows) -> None:
        window, minute = windows
        self._window = window
        self._percentiles = model_percentiles(minute)
        self._rows: defaultdict[str, list[int]] = defaultdict(list)
        if window is None:
            return
        self._calls = window.calls()
        for row, labels in enumerate(window.labels(DURATION)[: len(self._calls)]):
            self._rows[labels[_MODEL]].append(row)

    @property
    def names(self) -> Iterable[str]:
        """Return the models that have numbers."""
        return [name for name in self._rows if name not in ("", OTHER)]

    def calls_per_second(self, name: str) -> float:
        """Return the calls of a model per second."""
        return float(sum(self._calls[row] for row in self._rows.get(clean_label(name), ())))

    def describe(self, name: str) -> dict[str, Any]:
        """Return rates and times of a model; nothing if it has no numbers of its own."""
        rows = self._rows.get(clean_label(name))
        if self._window is None or not rows:
            return {}
        return {
            **summarize(self._window, rows),
            **self._percentiles.describe((clean_label(name),)),
            "forms_per_second": self._by(rows, _FORM),
            "statuses_per_second": self._by(rows, _STATUS),
        }

    def _by(self, rows: Sequence[int], position: int) -> dict[str, float | None]:
        assert self._window is not None
        labels = self._window.labels(DURATION)
        sums: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            if self._calls[row]:
                sums[labels[row][position]] += float(self._calls[row])
        return {name: rounded(rate) for name, rate in sums.items()}


class FailedModels:
    """The last failed call of each model, as far as the gateway keeps calls.

    A model whose calls all fail has no numbers of its own, as anybody may call any name.
    """

    def __init__(self) -> None:
        self._failures: dict[str, dict[str, Any]] = {}

    def note(self, calls: Iterable[bytes]) -> None:
        """Note calls that have ended."""
        for call in map(orjson.loads, calls):
            name = call.get("model")
            if name and has_failed(call):
                self._failures.pop(name, None)
                failure = {each: call.get(each) for each in ("time", "status", "reason")}
                self._failures[name] = failure
        while len(self._failures) > _MAX_FAILED:
            del self._failures[next(iter(self._failures))]

    def recent(self, now: float) -> dict[str, dict[str, Any]]:
        """Return the last failed call of each model with one in the last minutes."""
        return {
            name: failure
            for name, failure in self._failures.items()
            if failure["time"] >= now - _FAILED_SECONDS
        }


class ModelTotals:
    """What was converted for each model since the start."""

    def __init__(self, store: MetricStore) -> None:
        self._elements = store.sums(MODEL_ELEMENTS)
        self._sizes = store.sums(MODEL_BYTES)

    def describe(self, name: str, savings: Savings) -> dict[str, Any] | None:
        """Return what was converted for a model; None if nothing was."""
        label = clean_label(name)
        if (label,) not in self._elements:
            return None
        # Without room for more series, the bytes count as those of other models.
        client, server = (self._sizes.get((label, side), [0.0])[0] for side in ("client", "server"))
        elements = self._elements[label,][0]
        return {
            "elements": elements,
            "client_bytes": client,
            "server_bytes": server,
            "saved_bytes": max(0.0, client - server),
            **savings.describe(name, elements),
        }
