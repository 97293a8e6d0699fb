"""Counts calls for Prometheus: by route, operation, model, form and status, and by endpoint."""

from __future__ import annotations

import time
from typing import Final

from gateway.observe import families
from gateway.observe.call_record import INFERENCE, NO_LABELS, AttemptRecord, CallRecord
from gateway.observe.metric_cells import Counter, FineBuckets
from gateway.observe.metric_store import OTHER, Labels, MetricStore, MetricWriter

MAX_MODELS: Final = 100
"""Models with numbers of their own; all further ones count as ``other``."""

_FINE: Final = FineBuckets(families.BUCKETS)

Exemplar = tuple[tuple[str, ...], str, float, float]
"""The label values and the bound of a bucket of DURATION, trace id, seconds, and Unix time."""

_MAX_EXEMPLARS: Final = 200
_EXEMPLAR_INTERVAL: Final = 0.1
"""Seconds between two looks for the trace id of a call in the same bucket."""
_BOUNDS: Final = (*map(str, families.BUCKETS), "+Inf")
"""The buckets of DURATION as Prometheus names them."""
_MODEL: Final = families.CALL_LABELS.index("model")
_OPERATION: Final = families.CALL_LABELS.index("operation")

_CACHED_ENDPOINTS: Final = 2048
_MAX_MODELS_OF_ENDPOINTS: Final = 500
"""Models at endpoints whose latency is measured apart; any further ones of an endpoint together."""
_SERVER_ERROR: Final = 500
_OPERATIONS_OF_MODELS: Final = ("infer", "generate", "metadata")
"""The operations whose success shows that there is such a model."""
_CALLS_FOR_LABEL: Final = 50
"""Successful calls of a model in a worker until it gets one of the second half of the labels."""
_MAX_UNLABELLED: Final = 1000
"""Models without a label whose calls are counted for that."""
_LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at the models of other workers."""
_ABORTED: Final = "aborted"
"""The kind of the error, and the status, of calls whose clients got no response."""


class _CallCells:
    """What calls with the same labels are counted in."""

    def __init__(self, writer: MetricWriter, labels: Labels) -> None:
        route, operation, model = (labels[0],), labels[_OPERATION], labels[_MODEL]
        self.labels: Final = labels
        self.inferred_model: Final = model if operation in INFERENCE and model != OTHER else ""
        self.next_exemplar: Final = [0.0] * (len(families.BUCKETS) + 2)
        """When a call in that bucket may be the next exemplar, on the clock of the records."""
        self.duration: Final = writer.histogram(families.DURATION, labels)
        self.latency: Final = writer.histogram(families.CALL_LATENCY, (model,))
        self.route_latency: Final = writer.histogram(families.ROUTE_LATENCY, route)
        self.request_bytes: Final = writer.counter(families.REQUEST_BYTES, route)
        self.response_bytes: Final = writer.counter(families.RESPONSE_BYTES, route)


class _EndpointCells:
    """What attempts at an endpoint are counted in; their latency by model, if it has a name."""

    def __init__(self, writer: MetricWriter, endpoint: tuple[str, str], model: str) -> None:
        self.duration: Final = writer.histogram(families.SERVER_DURATION, endpoint)
        self.latency: Final = writer.histogram(families.ENDPOINT_LATENCY, (*endpoint, model))
        self.first_byte: Final = writer.histogram(families.FIRST_BYTE, endpoint)
        self.sent: Final = writer.counter(families.SENT_BYTES, endpoint)
        self.received: Final = writer.counter(families.RECEIVED_BYTES, endpoint)
        self.responses: Final[dict[int, Counter]] = {}
        """By the first digit of their status."""


class _ModelCells:
    """What converted calls of a model are counted in."""

    def __init__(self, writer: MetricWriter, model: str) -> None:
        self.elements: Final = writer.counter(families.MODEL_ELEMENTS, (model,))
        self.client_bytes: Final = writer.counter(families.MODEL_BYTES, (model, "client"))
        self.server_bytes: Final = writer.counter(families.MODEL_BYTES, (model, "server"))


class CallMetrics:
    """Counts each call that has ended.

    No label can be driven by clients: a model has numbers of its own only after a server has
    inferred with it, or described it, and only ``max_models`` do. The first half of these labels
    goes to the first models, the second half to models that are used much. ``store`` tells which
    models other workers have counted.
    """

    def __init__(
        self, store: MetricStore, writer: MetricWriter, max_models: int = MAX_MODELS
    ) -> None:
        self._store = store
        self._writer = writer
        self._next_look = 0.0
        self._request_elements = writer.counter(families.ELEMENTS, ("request",))
        self._response_elements = writer.counter(families.ELEMENTS, ("response",))
        self._max_models = max_models
        self._models: set[str] = set()
        self._unlabelled_calls: dict[str, int] = {}
        self._calls: dict[tuple[str, str, str, str, str, int], _CallCells] = {}
        self._endpoints: dict[tuple[str, str, str], _EndpointCells] = {}
        self._models_of_endpoints: set[tuple[str, str, str]] = set()
        self._conversions: dict[tuple[str, str], Counter] = {}
        self._converted_models: dict[str, _ModelCells] = {}
        self._last_calls: _CallCells | None = None
        self._last_labels = NO_LABELS
        self._last_status = 0
        self._last_upstream = ""
        self._exemplars: dict[tuple[tuple[str, ...], int], Exemplar] = {}

    def observe(self, record: CallRecord) -> None:
        """Count a call."""
        labels, upstream = record.labels, record.upstream
        form, calls = labels.client_form, self._last_calls
        # Most calls are like the one before.
        if (
            calls is None
            or labels is not self._last_labels
            or record.status // 100 != self._last_status
            or upstream != self._last_upstream
        ):
            calls = self._find_calls(record)
        bucket = calls.duration.bucket(record.seconds)
        calls.duration.add(bucket, record.seconds)
        part = _FINE.find(bucket, record.seconds)
        calls.latency.count(part)
        calls.route_latency.count(part)
        if record.started >= calls.next_exemplar[bucket]:
            calls.next_exemplar[bucket] = record.started + _EXEMPLAR_INTERVAL
            self._take_exemplar(calls.labels, bucket, record)
        calls.request_bytes.add(float(record.request_bytes))
        calls.response_bytes.add(float(record.response_bytes))
        self._observe_attempts(record, calls.inferred_model)
        if record.retries:
            self._writer.counter(families.RETRIES, (upstream,)).add(float(record.retries))
        if record.server_form and form:
            self._count_conversion(form, calls.labels[_MODEL], record)
        for lane in record.lanes:
            self._writer.counter(families.SHARED_MEMORY_CALLS, lane).add(1.0)
        if record.error:
            self._count_error(record)

    def _count_error(self, record: CallRecord) -> None:
        """Count an error, unless it is a server's own, which the client has got."""
        if record.error_kind is not None:
            kind = record.error_kind.name.lower()
        elif record.answered_by_server:
            return
        else:
            kind = _ABORTED
        self._writer.counter(families.ERRORS, (kind, record.upstream)).add(1.0)

    def observe_mirrored(self, record: CallRecord) -> None:
        """Count the attempts of a mirrored request: it is no call, but its endpoint serves it."""
        self._observe_attempts(record, "")

    def _observe_attempts(self, record: CallRecord, model: str) -> None:
        if record.sent_at and record.endpoint:
            # The time of a call that fails says nothing of the server's latency: it may be none. If
            # the client gives up before a response, it says how long that client waits.
            is_well = (
                record.error_kind is None
                and record.status < _SERVER_ERROR
                and record.first_byte_seconds > 0.0
            )
            cells = self._observe_attempt(record, model, is_well)
            if record.is_from_server:
                self._count_response(cells, record)
        if record.other_attempts:
            for attempt in record.other_attempts:
                self._observe_attempt(attempt, model, False)

    def _find_calls(self, record: CallRecord) -> _CallCells:
        labels, upstream, status = record.labels, record.upstream, record.status // 100
        model = labels.model
        if model and model not in self._models:
            model = self._model_label(record)
        key = labels.route, labels.operation, model, upstream, labels.client_form, status
        calls = self._calls.get(key)
        if calls is None:
            values = *key[:-1], f"{status}xx" if status else _ABORTED
            calls = self._calls[key] = _CallCells(self._writer, values)
        # A model without numbers of its own may get them with its next call.
        self._last_calls = None if model == OTHER else calls
        self._last_labels, self._last_status = labels, status
        self._last_upstream = upstream
        return calls

    def exemplars(self) -> list[Exemplar]:
        """Return recent calls whose clients have them traced: at most one for each bucket."""
        return list(self._exemplars.values())

    def _take_exemplar(self, labels: tuple[str, ...], bucket: int, record: CallRecord) -> None:
        """Keep the trace id of a call, if it has one that its client records."""
        if trace_id := record.sampled_trace_id:
            exemplars = self._exemplars
            exemplars.pop((labels, bucket), None)  # so that the first one is the oldest
            if len(exemplars) >= _MAX_EXEMPLARS:
                del exemplars[next(iter(exemplars))]
            bound = _BOUNDS[bucket - 1]
            exemplars[labels, bucket] = ((*labels, bound), trace_id, record.seconds, time.time())

    def _observe_attempt(
        self, attempt: CallRecord | AttemptRecord, model: str, is_well: bool
    ) -> _EndpointCells:
        key = attempt.upstream, attempt.endpoint, model
        cells = self._endpoints.get(key)
        if cells is None:
            if len(self._endpoints) >= _CACHED_ENDPOINTS:
                self._endpoints.clear()  # the addresses of a host name may change for ever
            cells = self._endpoints[key] = self._endpoint_cells(key)
        seconds, first_byte = attempt.server_seconds, attempt.first_byte_seconds
        bucket = cells.duration.bucket(seconds)
        cells.duration.add(bucket, seconds)
        if is_well:
            cells.latency.count(_FINE.find(bucket, seconds))
        if first_byte == seconds:  # the whole response came at once
            cells.first_byte.add(bucket, seconds)
        elif first_byte:
            cells.first_byte.observe(first_byte)
        cells.sent.add(float(attempt.sent_bytes))
        cells.received.add(float(attempt.received_bytes))
        return cells

    def _count_response(self, cells: _EndpointCells, record: CallRecord) -> None:
        status = record.status // 100
        counter = cells.responses.get(status)
        if counter is None:
            labels = record.upstream, record.endpoint, f"{status}xx" if status else _ABORTED
            counter = cells.responses[status] = self._writer.counter(families.RESPONSES, labels)
        counter.add(1.0)

    def _model_label(self, record: CallRecord) -> str:
        """Return the label of a model that this worker has not counted yet."""
        labels = record.labels
        is_known = (
            labels.operation in _OPERATIONS_OF_MODELS
            and record.is_from_server
            and record.status // 100 == 2
        )
        if not is_known:
            return OTHER
        if record.started >= self._next_look:
            self._next_look = record.started + _LOOK_INTERVAL
            # Those that other workers count, and that earlier ones have counted.
            self._models = self._store.label_values(families.DURATION, "model") - {"", OTHER}
        if labels.model not in self._models:
            if not self._deserves_label(labels.model):
                return OTHER
            self._models.add(labels.model)
        return labels.model

    def _deserves_label(self, model: str) -> bool:
        """Tell whether a model gets numbers of its own: the first ones do, then those in use."""
        labelled, calls = len(self._models), self._unlabelled_calls
        if labelled < self._max_models // 2:
            return True
        if labelled >= self._max_models:
            return False
        count = calls.pop(model, 0) + 1
        if count >= _CALLS_FOR_LABEL:
            return True
        if len(calls) >= _MAX_UNLABELLED:
            calls.clear()
        calls[model] = count
        return False

    def _endpoint_cells(self, key: tuple[str, str, str]) -> _EndpointCells:
        upstream, url, model = key
        apart = self._models_of_endpoints
        if model and key not in apart:
            if len(apart) < _MAX_MODELS_OF_ENDPOINTS:
                apart.add(key)
            else:
                model = ""
        return _EndpointCells(self._writer, (upstream, url), model)

    def _count_conversion(self, client_form: str, model: str, record: CallRecord) -> None:
        key = client_form, record.server_form
        counter = self._conversions.get(key)
        if counter is None:
            counter = self._conversions[key] = self._writer.counter(families.CONVERSIONS, key)
        counter.add(1.0)
        if record.request_elements:
            self._request_elements.add(float(record.request_elements))
        if record.response_elements:
            self._response_elements.add(float(record.response_elements))
        elements = record.request_elements + record.response_elements
        if elements:
            cells = self._converted_models.get(model)
            if cells is None:
                cells = self._converted_models[model] = _ModelCells(self._writer, model)
            cells.elements.add(float(elements))
            cells.client_bytes.add(float(record.request_bytes + record.response_bytes))
            cells.server_bytes.add(float(record.sent_bytes + record.received_bytes))
