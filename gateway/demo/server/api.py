"""The HTTP API of the demo server, without I/O: a request in, a response out."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from gateway.demo.server.models import (
    MODELS,
    VERSION,
    Model,
    TensorSpec,
    full_shape,
    generate,
    generate_stream,
    infer,
)
from gateway.demo.server.tensors import RequestError
from gateway.demo.server.wire import (
    Document,
    HttpRequest,
    HttpResponse,
    encode_infer_response,
    error_response,
    json_response,
    parse_infer_request,
    parse_object,
    validate,
)

SERVER: Final = {
    "name": "tensorgate-demo",
    "version": "1.0",
    "extensions": [
        "classification",
        "model_repository",
        "model_configuration",
        "binary_tensor_data",
        "parameters",
        "statistics",
        "trace",
    ],
}

_EMPTY: Final = HttpResponse(headers={"Content-Type": "text/plain"})

Settings = dict[str, str | list[str]]

_TRACE_DEFAULTS: Final[Settings] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


def _number(least: int) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(r"-?[0-9]{1,10}", text) or not least <= int(text) < 2**31:
            raise ValueError(f"got {text:.20}, expected a number from {least} to {2**31 - 1}")
        return str(int(text))

    return AfterValidator(check)


def _check_levels(levels: list[str]) -> list[str]:
    """Return the levels in the order of Triton."""
    known: list[str] = [level for level in ("TIMESTAMPS", "TENSORS") if level in levels]
    if levels != ["OFF"] and (not levels or set(levels) != set(known)):
        raise ValueError("expected OFF, or TIMESTAMPS and TENSORS")
    return known or levels


class _TraceChanges(Document):
    trace_level: Annotated[list[str], AfterValidator(_check_levels)] | None = None
    trace_rate: Annotated[str, _number(0)] | None = None
    trace_count: Annotated[str, _number(-1)] | None = None
    log_frequency: Annotated[str, _number(0)] | None = None


class TraceSettings:
    """The trace settings; the model name "" stands for the global ones, which others override."""

    def __init__(self) -> None:
        self._overrides: dict[str, Settings] = {}

    def get(self, model: str) -> Settings:
        """Return all settings in effect for a model."""
        return {**_TRACE_DEFAULTS, **self._overrides.get("", {}), **self._overrides.get(model, {})}

    def update(self, model: str, changes: dict[str, Any]) -> Settings:
        """Apply changes, and return all settings; null clears one, unknown names are ignored.

        Raises RequestError for a value out of range, and for `trace_file`.
        """
        if "trace_file" in changes:
            raise RequestError(
                "trace file location can not be updated through network protocol", 501
            )
        checked = validate(_TraceChanges, changes).model_dump(exclude_unset=True)
        merged = {**self._overrides.get(model, {}), **checked}
        self._overrides[model] = {
            name: value for name, value in merged.items() if value is not None
        }
        return self.get(model)


class _IndexOptions(Document):
    ready: bool = False


@dataclass(slots=True)
class CallCounter:
    """The calls to a model; times in nanoseconds, `last` in milliseconds since 1970."""

    succeeded: int = 0
    succeeded_ns: int = 0
    failed: int = 0
    failed_ns: int = 0
    last: int = 0


class Api:
    """Handles requests as Triton does; only a client's error that is 500 there is 400 here."""

    def __init__(self) -> None:
        self._loaded = set(MODELS)
        self._counters = {name: CallCounter() for name in MODELS}
        self._trace = TraceSettings()

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Respond to a request; an error becomes a response, too."""
        try:
            for methods, pattern, action in _ROUTES:
                if match := pattern.fullmatch(request.path):
                    if request.method not in methods:
                        raise RequestError("Method Not Allowed", 405)
                    return action(self, request, **match.groupdict(default=""))
            raise RequestError("Not Found", 404)
        except RequestError as error:
            return error_response(error)

    def _model(self, name: str, version: str) -> Model:
        if name not in MODELS:
            problem = f"'{name}' is not found"
        elif name not in self._loaded:
            problem = f"'{name}' has no available versions"
        elif version not in ("", VERSION):
            problem = f"'{name}' version {version} is not found"
        else:
            return MODELS[name]
        raise RequestError(f"Request for unknown model: {problem}", 404)

    def _ready(self, _request: HttpRequest, model: str, version: str) -> HttpResponse:
        try:
            self._model(model, version)
        except RequestError:
            raise RequestError("Model version not ready") from None
        return _EMPTY

    def _metadata(self, _request: HttpRequest, model: str, version: str) -> HttpResponse:
        return json_response(describe_metadata(self._model(model, version)))

    def _config(self, _request: HttpRequest, model: str, version: str) -> HttpResponse:
        return json_response(describe_config(self._model(model, version)))

    def _statistics(
        self, _request: HttpRequest, model: str = "", version: str = ""
    ) -> HttpResponse:
        if model and (model not in self._loaded or version not in ("", VERSION)):
            raise RequestError(f"requested model '{model}' is not available")
        names = [model] if model else sorted(self._loaded)
        stats = [describe_statistics(name, self._counters[name]) for name in names]
        return json_response({"model_stats": stats})

    def _index(self, request: HttpRequest) -> HttpResponse:
        only_ready = validate(_IndexOptions, parse_object(request.body or b"{}")).ready
        ready = {"version": VERSION, "state": "READY"}
        unloaded = {"version": VERSION, "state": "UNAVAILABLE", "reason": "unloaded"}
        return json_response(
            [
                {"name": name, **(ready if name in self._loaded else unloaded)}
                for name in sorted(self._loaded if only_ready else MODELS)
            ]
        )

    def _load(self, _request: HttpRequest, model: str) -> HttpResponse:
        if model not in MODELS:
            raise RequestError(f"failed to load '{model}', failed to poll from model repository")
        self._loaded.add(model)
        return HttpResponse()

    def _unload(self, _request: HttpRequest, model: str) -> HttpResponse:
        self._loaded.discard(model)
        return HttpResponse()

    def _trace_setting(self, request: HttpRequest, model: str = "") -> HttpResponse:
        if model and model not in self._loaded:
            raise RequestError(f"Request for unknown model : {model}")
        if request.method == "GET":
            return json_response(self._trace.get(model))
        return json_response(self._trace.update(model, parse_object(request.body)))

    def _infer(self, request: HttpRequest, model: str, version: str) -> HttpResponse:
        with self._counted(model, version) as found:
            parsed = parse_infer_request(request.headers, request.body)
            return encode_infer_response(model, VERSION, parsed, infer(found, parsed))

    def _generate(self, request: HttpRequest, model: str, version: str) -> HttpResponse:
        with self._counted(model, version) as found:
            return json_response(generate(found, parse_object(request.body)))

    def _generate_stream(self, request: HttpRequest, model: str, version: str) -> HttpResponse:
        with self._counted(model, version) as found:
            events = generate_stream(found, parse_object(request.body))
        return HttpResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8"}, events=events
        )

    @contextmanager
    def _counted(self, name: str, version: str) -> Iterator[Model]:
        """Count the call to a model that is made in the context."""
        model = self._model(name, version)
        counter = self._counters[name]
        started = time.perf_counter_ns()
        try:
            yield model
        except RequestError:
            counter.failed += 1
            counter.failed_ns += time.perf_counter_ns() - started
            raise
        counter.succeeded += 1
        counter.succeeded_ns += time.perf_counter_ns() - started
        counter.last = time.time_ns() // 1_000_000


_MODEL: Final = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY: Final = r"/v2/repository(?:/[^/]+)?"
_Action = Callable[..., HttpResponse]

# The first match counts, so a model cannot be named "stats".
_ROUTES: Final[list[tuple[tuple[str, ...], re.Pattern[str], _Action]]] = [
    (methods, re.compile(pattern), action)
    for methods, pattern, action in (
        (("GET",), r"/v2", lambda *_: json_response(SERVER)),
        (("GET",), r"/v2/health/(?:live|ready)", lambda *_: _EMPTY),
        (("GET",), r"/v2/models/stats", Api._statistics),
        (("GET",), _MODEL, Api._metadata),
        (("GET",), _MODEL + r"/ready", Api._ready),
        (("GET",), _MODEL + r"/config", Api._config),
        (("GET",), _MODEL + r"/stats", Api._statistics),
        (("POST",), _MODEL + r"/infer", Api._infer),
        (("POST",), _MODEL + r"/generate", Api._generate),
        (("POST",), _MODEL + r"/generate_stream", Api._generate_stream),
        # Triton has these paths, without a version; the specification has others.
        (("GET", "POST"), r"/v2/trace/setting", Api._trace_setting),
        (("GET", "POST"), r"/v2/models/(?P<model>[^/]+)/trace/setting", Api._trace_setting),
        (("POST",), _REPOSITORY + r"/index", Api._index),
        (("POST",), _REPOSITORY + r"/models/(?P<model>[^/]+)/load", Api._load),
        (("POST",), _REPOSITORY + r"/models/(?P<model>[^/]+)/unload", Api._unload),
    )
]


def describe_metadata(model: Model) -> dict[str, Any]:
    """Describe a model; if it batches, each shape has a leading -1."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": "python",
        "inputs": [_tensor_metadata(model, spec) for spec in model.inputs],
        "outputs": [_tensor_metadata(model, spec) for spec in model.outputs],
    }


def describe_config(model: Model) -> dict[str, Any]:
    """Describe a model as Triton's model configuration does: shapes have no batch dimension."""
    return {
        "name": model.name,
        "platform": "",
        "backend": "python",
        "max_batch_size": model.max_batch_size,
        "input": [_tensor_config(spec) for spec in model.inputs],
        "output": [_tensor_config(spec) for spec in model.outputs],
    }


def describe_statistics(name: str, counter: CallCounter) -> dict[str, Any]:
    """Describe the calls to a model; the demo has no queue and no cache."""
    success = {"count": counter.succeeded, "ns": counter.succeeded_ns}
    none = {"count": 0, "ns": 0}
    return {
        "name": name,
        "version": VERSION,
        "last_inference": counter.last,
        "inference_count": counter.succeeded,
        "execution_count": counter.succeeded,
        "inference_stats": {
            "success": success,
            "fail": {"count": counter.failed, "ns": counter.failed_ns},
            "queue": none,
            "compute_input": none,
            "compute_infer": success,
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def _tensor_metadata(model: Model, spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": full_shape(model, spec)}


def _tensor_config(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": spec.shape}
