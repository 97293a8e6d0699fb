"""The models: where each is ready, how it is called, and what conversion saves."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import orjson

from gateway.admin.history import (
    FORM,
    MODEL,
    STATUS,
    Percentiles,
    Rate,
    rates_of,
    rounded,
    summarize,
)
from gateway.admin.panels.calls import has_failed, parse_count, parse_text
from gateway.admin.status import State, Status
from gateway.observe import families
from gateway.observe.metric_store import OTHER, MetricStore, clean_label

T = TypeVar("T")

_DEFAULT_MODELS, _MAX_MODELS = 100, 1000
_MAX_FAILED = 200
"""Models whose failed calls are noted: the last ones."""
_FAILED_SECONDS = 300.0
_MAX_MEASURED = 1000
"""Models whose last measurement is kept."""


def describe_models(
    state: State, query: Mapping[str, str], failures: Mapping[str, Status]
) -> dict[str, Any]:
    """Return the models that are ready or were called: those in use first. Raises ValueError.

    Models without numbers of their own have no rates: their calls are in ``others``, and calls of
    no model are in ``no_model``. So the rates of all add up.
    """
    search = parse_text(query, "search").lower()
    offset = parse_count(query, "offset", 0)
    limit = parse_count(query, "limit", _DEFAULT_MODELS, _MAX_MODELS)
    ready, rates = _ready_models(state.status), _ModelRates(state)
    known = dict.fromkeys([*ready, *rates.calls, *failures])
    names = [name for name in known if search in name.lower() and name not in ("", OTHER)]
    names.sort(key=lambda name: (-rates.calls_per_second(name), name not in failures, name))
    return {
        "time": state.time,
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


def describe_model(state: State, store: MetricStore, savings: Savings, name: str) -> dict[str, Any]:
    """Return one model: where it is ready, its rates, and what conversion saved."""
    endpoints = [
        {"upstream": upstream, "endpoint": endpoint["url"]}
        for upstream, each in state.status["upstreams"].items()
        for endpoint in each["endpoints"]
        if name in (endpoint["models"] or ())
    ]
    return {
        "time": state.time,
        "name": name,
        "ready": _ready_models(state.status).get(name, []),
        **_ModelRates(state).describe(name),
        "endpoints": endpoints,
        "conversion": _describe_conversion(store, savings, name),
    }


def _ready_models(status: Status) -> dict[str, list[dict[str, Any]]]:
    """Return for each model how many endpoints of each upstream have it ready."""
    ready: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for upstream, each in status["upstreams"].items():
        # Endpoints with the same models share one list, which is counted once.
        named = [endpoint["models"] for endpoint in each["endpoints"] if endpoint["models"]]
        lists = {id(models): models for models in named}
        times = Counter(map(id, named))
        counts: Counter[str] = Counter()
        for key, names in lists.items():
            for name in names:
                counts[name] += times[key]
        for name, count in counts.items():
            ready[name].append(
                {"upstream": upstream, "endpoints": count, "of": len(each["endpoints"])}
            )
    return dict(ready)


class _ModelRates:
    """The calls of models in the last seconds, and their times in the last minute."""

    def __init__(self, state: State) -> None:
        self._percentiles = Percentiles(state.minute, families.CALL_LATENCY, lambda labels: labels)
        self.calls: defaultdict[str, list[Rate]] = defaultdict(list)
        """The series of each model that has numbers."""
        if state.window is not None:
            for labels in state.window.labels[families.DURATION]:
                self.calls[labels[MODEL]] = []
        for labels, rate in rates_of(state.window, families.DURATION):
            self.calls[labels[MODEL]].append((labels, rate))

    def calls_per_second(self, name: str) -> float:
        """Return the calls of a model per second."""
        return sum(rate for _, rate in self.calls.get(clean_label(name), ()))

    def describe(self, name: str) -> dict[str, Any]:
        """Return rates and times of a model; nothing if it has no numbers of its own."""
        label = clean_label(name)
        if label not in self.calls:
            return {}
        return {
            **summarize(self.calls[label]),
            **self._percentiles.describe((label,)),
            "forms_per_second": self._by(label, FORM),
            "statuses_per_second": self._by(label, STATUS),
        }

    def _by(self, model: str, position: int) -> dict[str, float | None]:
        sums: defaultdict[str, float] = defaultdict(float)
        for labels, rate in self.calls[model]:
            sums[labels[position]] += rate
        return {name: rounded(rate) for name, rate in sums.items()}


def _keep(entries: dict[str, T], name: str, entry: T, most: int) -> None:
    """Keep an entry as the newest one; the oldest goes if there are too many."""
    entries.pop(name, None)
    entries[name] = entry
    if len(entries) > most:
        del entries[next(iter(entries))]


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
                failure = {each: call.get(each) for each in ("time", "status", "reason")}
                _keep(self._failures, name, failure, _MAX_FAILED)

    def recent(self, now: float) -> dict[str, dict[str, Any]]:
        """Return the last failed call of each model with one in the last minutes."""
        return {
            name: failure
            for name, failure in self._failures.items()
            if failure["time"] >= now - _FAILED_SECONDS
        }


def _describe_conversion(store: MetricStore, savings: Savings, name: str) -> dict[str, Any] | None:
    """Return what was converted for a model since the start; None if nothing was."""
    label = clean_label(name)
    if (found := store.sums(families.MODEL_ELEMENTS).get((label,))) is None:
        return None
    # Without room for more series, the bytes count as those of other models.
    sizes = store.sums(families.MODEL_BYTES)
    client, server = (sizes.get((label, side), [0.0])[0] for side in ("client", "server"))
    return {
        "elements": found[0],
        "client_bytes": client,
        "server_bytes": server,
        "saved_bytes": max(0.0, client - server),
        **savings.describe(name, found[0]),
    }


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of the same JSON call, converted and passed through untouched."""

    converted_ms: float
    untouched_ms: float
    elements: int
    """The elements of all tensors, in both directions."""
    at: float = field(default_factory=time.time)


class Savings:
    """What conversion saves in milliseconds: the last measurement of each model."""

    def __init__(self) -> None:
        self._measurements: dict[str, Measurement] = {}

    def add(self, model: str, measurement: Measurement) -> None:
        """Keep a measurement; the oldest goes if there are too many."""
        _keep(self._measurements, model, measurement, _MAX_MEASURED)

    def describe(self, model: str, converted_elements: float) -> dict[str, Any]:
        """Return the measurement of a model, and the estimate for all that was converted.

        That is negative if conversion took longer.
        """
        measured = self._measurements.get(model)
        if measured is None:
            return {"measured": None, "saved_ms_estimate": None}
        saved_ms = measured.untouched_ms - measured.converted_ms
        per_element = saved_ms / max(1, measured.elements)
        return {"measured": asdict(measured), "saved_ms_estimate": per_element * converted_elements}
