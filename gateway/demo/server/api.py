"""The HTTP API of the demo server: its paths, its models' calls and its trace settings."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final

from aiohttp import web
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
    encode_infer_response,
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

BODY: Final = web.RequestKey("body", bytes)
_OUTCOMES: Final = ("success", "fail")

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


class Api:
    """Handles requests as Triton does; only a client's error that is 500 there is 400 here.

    The body of a request, decompressed, is its value `BODY`. An error is raised as RequestError.
    """

    def __init__(self, event_delay: float) -> None:
        self._event_delay = event_delay
        self._loaded = set(MODELS)
        self._calls = {name: {each: Counter[str]() for each in _OUTCOMES} for name in MODELS}
        """How many calls of each outcome there were, and the nanoseconds that they took."""
        self._last_inference = dict.fromkeys(MODELS, 0)
        """Milliseconds since 1970."""
        self._trace = TraceSettings()

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the routes; those without a model in their path come first."""
        yield web.route("GET", "/v2", self._server)
        yield web.route("GET", "/v2/health/{probe:live|ready}", self._health)
        yield web.route("GET", "/v2/models/stats", self._statistics)
        # Triton has these paths, without a version; the specification has others.
        for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
            yield web.route("GET", path, self._trace_setting)
            yield web.route("POST", path, self._trace_setting)
        for path in ("/v2/repository", "/v2/repository/{repository}"):
            yield web.post(f"{path}/index", self._index)
            yield web.post(f"{path}/models/{{model}}/load", self._load)
            yield web.post(f"{path}/models/{{model}}/unload", self._unload)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version:[0-9]+}"):
            yield web.route("GET", path, self._metadata)
            yield web.route("GET", f"{path}/ready", self._ready)
            yield web.route("GET", f"{path}/config", self._config)
            yield web.route("GET", f"{path}/stats", self._statistics)
            yield web.post(f"{path}/infer", self._infer)
            yield web.post(f"{path}/generate", self._generate)
            yield web.post(f"{path}/generate_stream", self._generate_stream)

    def _model(self, request: web.Request) -> Model:
        name, version = _names(request)
        if name not in MODELS:
            problem = f"'{name}' is not found"
        elif name not in self._loaded:
            problem = f"'{name}' has no available versions"
        elif version not in ("", VERSION):
            problem = f"'{name}' version {version} is not found"
        else:
            return MODELS[name]
        raise RequestError(f"Request for unknown model: {problem}", 404)

    async def _server(self, _: web.Request) -> web.Response:
        return json_response(SERVER)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(content_type="text/plain")

    async def _ready(self, request: web.Request) -> web.Response:
        try:
            self._model(request)
        except RequestError:
            raise RequestError("Model version not ready") from None
        return web.Response(content_type="text/plain")

    async def _metadata(self, request: web.Request) -> web.Response:
        return json_response(describe_metadata(self._model(request)))

    async def _config(self, request: web.Request) -> web.Response:
        return json_response(describe_config(self._model(request)))

    async def _statistics(self, request: web.Request) -> web.Response:
        model, version = _names(request)
        if model and (model not in self._loaded or version not in ("", VERSION)):
            raise RequestError(f"requested model '{model}' is not available")
        names = [model] if model else sorted(self._loaded)
        stats = [
            describe_statistics(name, self._last_inference[name], **self._calls[name])
            for name in names
        ]
        return json_response({"model_stats": stats})

    async def _index(self, request: web.Request) -> web.Response:
        only_ready = validate(_IndexOptions, parse_object(request[BODY] or b"{}")).ready
        ready = {"version": VERSION, "state": "READY"}
        unloaded = {"version": VERSION, "state": "UNAVAILABLE", "reason": "unloaded"}
        return json_response(
            [
                {"name": name, **(ready if name in self._loaded else unloaded)}
                for name in sorted(self._loaded if only_ready else MODELS)
            ]
        )

    async def _load(self, request: web.Request) -> web.Response:
        model, _ = _names(request)
        if model not in MODELS:
            raise RequestError(f"failed to load '{model}', failed to poll from model repository")
        self._loaded.add(model)
        return web.Response(content_type="application/json")

    async def _unload(self, request: web.Request) -> web.Response:
        self._loaded.discard(request.match_info["model"])
        return web.Response(content_type="application/json")

    async def _trace_setting(self, request: web.Request) -> web.Response:
        model, _ = _names(request)
        if model and model not in self._loaded:
            raise RequestError(f"Request for unknown model : {model}")
        if request.method == "GET":
            return json_response(self._trace.get(model))
        return json_response(self._trace.update(model, parse_object(request[BODY])))

    async def _infer(self, request: web.Request) -> web.Response:
        with self._counted(request) as model:
            parsed = parse_infer_request(request.headers, request[BODY])
            return encode_infer_response(model.name, VERSION, parsed, infer(model, parsed))

    async def _generate(self, request: web.Request) -> web.Response:
        with self._counted(request) as model:
            return json_response(generate(model, parse_object(request[BODY])))

    async def _generate_stream(self, request: web.Request) -> web.StreamResponse:
        with self._counted(request) as model:
            events = generate_stream(model, parse_object(request[BODY]))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        with suppress(ConnectionResetError):  # the client may leave at any time
            for number, event in enumerate(events):
                if number > 0:
                    await asyncio.sleep(self._event_delay)
                await stream.write(event)
        return stream

    @contextmanager
    def _counted(self, request: web.Request) -> Iterator[Model]:
        """Count the call to a model that is made in the context."""
        model = self._model(request)
        started, outcome = time.perf_counter_ns(), "fail"
        try:
            yield model
            outcome = "success"
            self._last_inference[model.name] = time.time_ns() // 1_000_000
        finally:
            count = self._calls[model.name][outcome]
            count.update(count=1, ns=time.perf_counter_ns() - started)


def _names(request: web.Request) -> tuple[str, str]:
    """Return the model and the version in a path; empty if there is none."""
    return request.match_info.get("model", ""), request.match_info.get("version", "")


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


def describe_statistics(
    name: str, last: int, success: Counter[str], fail: Counter[str]
) -> dict[str, Any]:
    """Describe the calls to a model; the demo has no queue and no cache."""
    none = {"count": 0, "ns": 0}
    idle = ("queue", "compute_input", "compute_output", "cache_hit", "cache_miss")
    counts = {"success": success, "fail": fail, "compute_infer": success}
    return {
        "name": name,
        "version": VERSION,
        "last_inference": last,
        "inference_count": success["count"],
        "execution_count": success["count"],
        "inference_stats": {
            **dict.fromkeys(idle, none),
            **{each: none | count for each, count in counts.items()},
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
