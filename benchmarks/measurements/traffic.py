"""Compares requests per second with Envoy's for traffic as it is, in each form that clients send.

Every request has a head of its own, as tracing and differing lengths make it, and both proxies run
with their defaults, so they log each call. Envoy passes on what the client sends; the gateway
converts it where the server knows a better form. Each proxy has the measured core to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import orjson

from benchmarks.harness.client import BenchmarkError, Connection, Response
from benchmarks.harness.cores import split_cores
from benchmarks.harness.environment import Environment
from benchmarks.harness.load import wrk_load
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import HEADER_LENGTH, ID_PLACE, Request, Values
from benchmarks.harness.rounds import Ratio
from benchmarks.measurements.other_proxies import LoadProfile, Result, Target, compare
from benchmarks.report import Row, at_least
from benchmarks.servers.proxies import envoy_before
from gateway.build_info import COMPILED

_CONNECTIONS = 32
_VARIANTS = 16
"""Bodies of each request, most of them of different lengths."""
_SOURCES_SHARE = 0.5
"""What the gateway must do from its sources, as a share of what it must do compiled."""
_JSON, _BINARY = "application/json", "application/octet-stream"
_GATEWAY, _SOURCES, _ENVOY, _DIRECT = "gateway", "sources", "Envoy", "direct"


@dataclass(frozen=True, slots=True)
class _Content:
    """A body, and the length of its JSON part if it is binary."""

    body: bytes
    json_length: int | None = None


def _json(values: Values) -> _Content:
    spec = {"name": "INPUT0", "shape": [values.size], "datatype": "FP32"}
    return _Content(orjson.dumps({"inputs": [{**spec, "data": values.astype(float).tolist()}]}))


def _binary(values: Values) -> _Content:
    """Build what tritonclient sends, with an id; its length is not always the same."""
    number = int(values.view(np.uint32)[0])
    size = {"binary_data_size": values.nbytes}
    spec = {"name": "INPUT0", "shape": [values.size], "datatype": "FP32", "parameters": size}
    document = {
        "id": str(number % 10 ** (number % 9 + 1)),
        "inputs": [spec],
        "parameters": {"binary_data_output": True},
    }
    text = orjson.dumps(document)
    return _Content(text + values.tobytes(), len(text))


def _raw(values: Values) -> _Content:
    """Leave some values out, so that the length is not always the same."""
    return _Content(values[: 16 - int(values.view(np.uint32)[0]) % 8].tobytes(), 0)


def _instances(values: Values) -> _Content:
    return _Content(orjson.dumps({"instances": values.astype(float).tolist()}))


def _text(values: Values) -> _Content:
    return _Content(orjson.dumps({"text_input": str(values.tolist())}))


def _nothing(_values: Values) -> _Content:
    return _Content(b"")


@dataclass(frozen=True, slots=True)
class _Case:
    """A kind of request, and what the gateway must reach beside Envoy."""

    what: str
    minimum: float
    path: str
    content: Callable[[Values], _Content]
    count: int = 16
    server_form: str = _JSON
    """The form in which the server answers the client; the gateway always asks it for binary."""
    dialect: str = "triton"

    def request(self, differing: bool) -> Request:
        """Return what is sent: different each time, or always the same."""
        variants = [self._variant(number) for number in range(_VARIANTS)]
        return replace(variants[0], variants=variants) if differing else variants[0]

    def _variant(self, number: int) -> Request:
        values = np.random.default_rng(number).standard_normal(self.count, np.float32)
        content = self.content(values)
        lines = [
            f"{'POST' if content.body else 'GET'} {self.path} HTTP/1.1",
            "Host: models.example.com",
            "User-Agent: benchmark/1.0",
            "Accept: */*",
            f"traceparent: 00-4bf92f3577b34da6a3ce929d{ID_PLACE}-00f067aa0ba902b7-01",
            f"x-request-id: {ID_PLACE}-58c3-4f0e-9d3c-6b1f2a7e4c05",
        ]
        if content.body:
            kind = _JSON if content.json_length is None else _BINARY
            lines += [f"Content-Type: {kind}", f"Content-Length: {len(content.body)}"]
        if content.json_length is not None:
            lines.append(f"{HEADER_LENGTH}: {content.json_length}")
        return Request(["\r\n".join((*lines, "", "")).encode() + content.body], content.body)


_INFER = "/v2/models/static_16/infer"
_CASES = (
    _Case("JSON 16 FP32", 1.0, _INFER, _json),
    _Case("JSON 1,000 FP32", 0.9, "/v2/models/static_1000/infer", _json, count=1_000),
    _Case("binary 16 FP32", 1.2, _INFER, _binary, server_form=_BINARY),
    _Case("raw binary, up to 16 FP32", 1.2, _INFER, _raw, server_form=_BINARY),
    _Case("V1 :predict, 16 FP32", 0.9, "/v1/models/static_16:predict", _instances),
    _Case("JSON 16 FP32 to the KServe dialect", 0.8, _INFER, _json, dialect="kserve"),
    _Case("GET …/ready", 1.0, "/v2/models/static_16/ready", _nothing),
    _Case("POST …/generate, 0.3 kB", 1.0, "/v2/models/static_16/generate", _text),
)


def rows(env: Environment, *, differing: bool = True, access_log: bool = True) -> list[Row]:
    """Measure each case; the bounds are for differing heads with the access log on."""
    cores = split_cores()
    load = wrk_load(cores.others)
    bounded = differing and access_log
    heads = "heads all different" if differing else "heads all the same"
    circumstances = f"{heads}, {'logged' if access_log else 'not logged'}, one core{cores.note}"
    measured = []
    with ExitStack() as stack:
        static = stack.enter_context(server("static_server", cores.others))
        servers = dict(zip((_JSON, _BINARY), static.ports, strict=True))
        envoys = {}
        for form, port in servers.items():
            envoy = stack.enter_context(envoy_before(port, cores.measured, access_log))
            envoys[form] = Target(envoy.ports[0], envoy.pid, static.pid)
        gateways = {}
        for dialect in ("triton", "kserve"):
            for from_sources in (False, True) if COMPILED else (False,):
                gateway = stack.enter_context(
                    running_gateway(
                        servers[_BINARY],
                        cores=cores.measured,
                        dialect=dialect,
                        access_log=access_log,
                        from_sources=from_sources,
                    )
                )
                name = _SOURCES if from_sources else _GATEWAY
                gateways[dialect, name] = Target(gateway.port, gateway.pid, static.pid)
        for case in _CASES:
            targets = {
                _DIRECT: Target(servers[case.server_form], static.pid, static.pid),
                _ENVOY: envoys[case.server_form],
                **{name: each for (of, name), each in gateways.items() if of == case.dialect},
            }
            _check(case, targets)
            profile = LoadProfile(case.request(differing), _CONNECTIONS, env.rounds(10), cores)
            results = compare(targets, profile, load)
            measured += _rows_of(case, f"{case.what}, {circumstances}", results, bounded)
    return measured


same_head = partial(rows, differing=False)
not_logged = partial(rows, access_log=False)
same_head_not_logged = partial(rows, differing=False, access_log=False)


def _rows_of(case: _Case, what: str, results: dict[str, Result], bounded: bool) -> list[Row]:
    direct, envoy = results[_DIRECT], results[_ENVOY]
    limited = "" if direct.rate > 2 * envoy.rate else "; the client limits this"
    made = []
    for name in (_GATEWAY, _SOURCES):
        if (result := results.get(name)) is None:
            continue
        from_sources = name == _SOURCES or not COMPILED
        minimum = case.minimum * (_SOURCES_SHARE if from_sources else 1)
        ratio = Ratio.of(result.rates, envoy.rates)
        first = name == _GATEWAY
        compared = ratio.shown(2, f"Envoy's {envoy.rate:,.0f} /s")
        cpu = f"CPU per call {_cpu(result)}, Envoy's {_cpu(envoy)}"
        made.append(
            Row(
                what if first else "… from the sources",
                f"{direct.rate:,.0f} /s" if first else "",
                f"{result.rate:,.0f} /s",
                f"{compared}; {cpu}{limited}",
                at_least(ratio.median, minimum, f"{minimum} × Envoy") if bounded else None,
            )
        )
    return made


def _cpu(result: Result) -> str:
    return f"{result.own / result.rate * 1e6:.0f} µs"


def _check(case: _Case, targets: dict[str, Target]) -> None:
    """Raise BenchmarkError unless all targets answer alike."""
    request = case.request(differing=False)
    answers = []
    for target in targets.values():
        with Connection(target.port) as connection:
            answers.append(_meaning(connection.fetch(request)))
    if any(answer != answers[0] for answer in answers):
        raise BenchmarkError(
            f"{case.what}: not all targets return the server's response: {answers}"
        )


def _meaning(response: Response) -> object:
    """Return the tensor of a response, or all of it if there is none."""
    if response.json_length is not None:
        return response.body[response.json_length :]
    if b'"outputs"' in response.body:
        return orjson.loads(response.body)["outputs"][0]["data"]
    return response.body
