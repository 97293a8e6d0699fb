"""The HTTP interface without the HTTP: a call comes in, an answer goes out."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.demo.server import descriptions, documents
from gateway.demo.server.descriptions import Counter
from gateway.demo.server.errors import RequestError
from gateway.demo.server.generation import generate, generate_stream
from gateway.demo.server.inference import infer
from gateway.demo.server.models import MODELS, VERSION, Model
from gateway.demo.server.trace import TraceSettings
from gateway.demo.server.wire import (
    Answer,
    encode_response,
    error_answer,
    json_answer,
    parse_request,
)

_EMPTY: Final = Answer(content_type="text/plain")


@dataclass(frozen=True, slots=True)
class Call:
    """Hold an HTTP request.

    `path` is as it was sent (Triton decodes no percent signs either), `body` is decompressed.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


class Api:
    """Answer calls as Triton does; only where that answers 500 to a client's fault, with 400."""

    def __init__(self) -> None:
        self._loaded = set(MODELS)
        self._counters = {name: Counter() for name in MODELS}
        self._trace = TraceSettings()

    def answer(self, call: Call) -> Answer:
        """Answer one call; errors come back as answers, too."""
        try:
            for methods, pattern, action in _ROUTES:
                if match := pattern.fullmatch(call.path):
                    if call.method not in methods:
                        raise RequestError("Method Not Allowed", 405)
                    return action(self, call, **match.groupdict(default=""))
            raise RequestError("Not Found", 404)
        except RequestError as error:
            return error_answer(error)

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

    def _server_metadata(self, _call: Call) -> Answer:
        return json_answer(descriptions.SERVER)

    def _health(self, _call: Call) -> Answer:
        return _EMPTY

    def _ready(self, _call: Call, model: str, version: str) -> Answer:
        try:
            self._model(model, version)
        except RequestError:
            raise RequestError("Model version not ready") from None
        return _EMPTY

    def _metadata(self, _call: Call, model: str, version: str) -> Answer:
        return json_answer(descriptions.metadata(self._model(model, version)))

    def _config(self, _call: Call, model: str, version: str) -> Answer:
        return json_answer(descriptions.config(self._model(model, version)))

    def _statistics(self, _call: Call, model: str = "", version: str = "") -> Answer:
        if model and (model not in self._loaded or version not in ("", VERSION)):
            raise RequestError(f"requested model '{model}' is not available")
        names = [model] if model else sorted(self._loaded)
        stats = [descriptions.statistics(name, self._counters[name]) for name in names]
        return json_answer({"model_stats": stats})

    def _index(self, call: Call) -> Answer:
        wanted = documents.parse_object(call.body) if call.body else {}
        only_ready = documents.optional(wanted, "ready", False)
        ready = {"version": VERSION, "state": "READY"}
        unloaded = {"version": VERSION, "state": "UNAVAILABLE", "reason": "unloaded"}
        return json_answer(
            [
                {"name": name, **(ready if name in self._loaded else unloaded)}
                for name in sorted(self._loaded if only_ready else MODELS)
            ]
        )

    def _load(self, _call: Call, model: str) -> Answer:
        if model not in MODELS:
            raise RequestError(f"failed to load '{model}', failed to poll from model repository")
        self._loaded.add(model)
        return Answer()

    def _unload(self, _call: Call, model: str) -> Answer:
        self._loaded.discard(model)
        return Answer()

    def _trace_setting(self, call: Call, model: str = "") -> Answer:
        if model and model not in self._loaded:
            raise RequestError(f"Request for unknown model : {model}")
        if call.method == "GET":
            return json_answer(self._trace.get(model))
        return json_answer(self._trace.update(model, documents.parse_object(call.body)))

    def _infer(self, call: Call, model: str, version: str) -> Answer:
        found = self._model(model, version)

        def work() -> Answer:
            request = parse_request(call.headers, call.body)
            return encode_response(model, VERSION, request, infer(found, request))

        return self._counted(found, work)

    def _generate(self, call: Call, model: str, version: str) -> Answer:
        found = self._model(model, version)
        return self._counted(
            found, lambda: json_answer(generate(found, documents.parse_object(call.body)))
        )

    def _generate_stream(self, call: Call, model: str, version: str) -> Answer:
        found = self._model(model, version)
        return self._counted(
            found,
            lambda: Answer(
                content_type="text/event-stream; charset=utf-8",
                events=generate_stream(found, documents.parse_object(call.body)),
            ),
        )

    def _counted(self, model: Model, work: Callable[[], Answer]) -> Answer:
        counter = self._counters[model.name]
        started = time.perf_counter_ns()
        try:
            answer = work()
        except RequestError:
            counter.failed += 1
            counter.failed_ns += time.perf_counter_ns() - started
            raise
        counter.succeeded += 1
        counter.succeeded_ns += time.perf_counter_ns() - started
        counter.last = time.time_ns() // 1_000_000
        return answer


_MODEL: Final = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY: Final = r"/v2/repository(?:/[^/]+)?"
_Action = Callable[..., Answer]

# The first match counts: a model cannot be called "stats".
_ROUTES: Final[list[tuple[tuple[str, ...], re.Pattern[str], _Action]]] = [
    (methods, re.compile(pattern), action)
    for methods, pattern, action in (
        (("GET",), r"/v2", Api._server_metadata),
        (("GET",), r"/v2/health/(?:live|ready)", Api._health),
        (("GET",), r"/v2/models/stats", Api._statistics),
        (("GET",), _MODEL, Api._metadata),
        (("GET",), _MODEL + r"/ready", Api._ready),
        (("GET",), _MODEL + r"/config", Api._config),
        (("GET",), _MODEL + r"/stats", Api._statistics),
        (("POST",), _MODEL + r"/infer", Api._infer),
        (("POST",), _MODEL + r"/generate", Api._generate),
        (("POST",), _MODEL + r"/generate_stream", Api._generate_stream),
        # Only these spellings, and none with a version: not those of the specification.
        (("GET", "POST"), r"/v2/trace/setting", Api._trace_setting),
        (("GET", "POST"), r"/v2/models/(?P<model>[^/]+)/trace/setting", Api._trace_setting),
        (("POST",), _REPOSITORY + r"/index", Api._index),
        (("POST",), _REPOSITORY + r"/models/(?P<model>[^/]+)/load", Api._load),
        (("POST",), _REPOSITORY + r"/models/(?P<model>[^/]+)/unload", Api._unload),
    )
]
