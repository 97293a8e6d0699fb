"""Measures gRPC: calls and messages that pass, beside Envoy, and calls that the gateway converts.

The measured proxy has a core to itself; the client and the server share the others. All targets run
in each round, one after the other, under the same load. Gateway and Envoy write an access log.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from benchmarks.harness.client import Connection
from benchmarks.harness.cores import CoreSplit, pinned_to, split_cores
from benchmarks.harness.environment import Environment, medians, start_offload, time_jobs
from benchmarks.harness.grpc_load import STREAMS, h2load_load, stream_load
from benchmarks.harness.grpc_messages import infer_request, stream_response
from benchmarks.harness.load import wrk_load
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import Request, Values, json_of_doubles, normal
from benchmarks.harness.rounds import Ratio
from benchmarks.measurements.conversion.json_speed import check
from benchmarks.measurements.other_proxies import LoadProfile, Result, Target, compare
from benchmarks.report import Bound, Row, at_least, at_most, milliseconds
from benchmarks.servers.proxies import envoy_before
from benchmarks.servers.raw_server import model_responding
from benchmarks.servers.static_grpc_server import LARGE, SMALL

_CONNECTIONS = 8
_SMALL_RATE, _LARGE_RATE, _CONVERTED_RATE = 1.1, 0.9, 0.7  # × Envoy's
_MAX_JSON_TIME = 1.2  # × that in front of a server over HTTP
_DIRECT, _GATEWAY, _OVER_HTTP, _ENVOY = "direct", "gateway", "over HTTP", "Envoy"


def small(env: Environment) -> list[Row]:
    """Measure small unary calls."""
    return _unary(env, "static_server", "static_16", normal(SMALL), _SMALL_RATE)


def large(env: Environment) -> list[Row]:
    """Measure unary calls of 600 KB in both directions."""
    values = normal(LARGE)
    return _unary(env, "raw_server", model_responding(values.nbytes), values, _LARGE_RATE)


def _unary(
    env: Environment, http_server: str, model: str, values: Values, minimum: float
) -> list[Row]:
    """Measure calls that pass to a server over gRPC, and are converted for one over HTTP."""
    cores = split_cores()
    load = h2load_load(cores.others, values.nbytes)
    request = infer_request(model, values)
    with ExitStack() as stack:
        targets = _targets(stack, (SMALL, LARGE).index(values.size), cores)
        http = stack.enter_context(server(http_server, cores.others))
        # The last port of each of these servers is that for binary tensors.
        converting = running_gateway(http.ports[-1], cores=cores.measured, access_log=True)
        gateway = stack.enter_context(converting)
        targets[_OVER_HTTP] = Target(gateway.port, gateway.pid, http.pid)
        results = compare(targets, _profile(env, request, cores), load)
    what = f"ModelInfer {values.size:,} FP32"
    converted = "… in front of a server over HTTP, which Envoy does not convert"
    bound = _CONVERTED_RATE if values.size == SMALL else None
    return [
        _row(f"{what}, gRPC to gRPC, {_circumstances(cores)}", results, _GATEWAY, minimum),
        _row(converted, results, _OVER_HTTP, bound),
    ]


def stream(env: Environment) -> list[Row]:
    """Measure messages on streams that stay open."""
    cores = split_cores()
    values = normal(SMALL)
    request = infer_request("static", values)
    with ExitStack() as stack:
        targets = _targets(stack, 2, cores)
        stack.enter_context(pinned_to(cores.others))
        load = stream_load(len(stream_response(values)))
        results = compare(targets, _profile(env, request, cores), load)
    what = f"ModelStreamInfer, messages of {SMALL} FP32, {_circumstances(cores)}"
    return [_row(what, results, _GATEWAY, _CONVERTED_RATE)]


def json(env: Environment) -> list[Row]:
    """Compare JSON in front of a server over gRPC with JSON in front of one over HTTP."""
    return [*_small_json(env), _large_json(env)]


def _small_json(env: Environment) -> list[Row]:
    cores = split_cores()
    values = normal(SMALL)
    request = json_of_doubles("static_16", values)
    with ExitStack() as stack:
        targets = {}
        for name, (module, scheme, place) in {
            _GATEWAY: ("static_grpc_server", "grpc", 0),
            _OVER_HTTP: ("static_server", "http", 1),
        }.items():
            behind = stack.enter_context(server(module, cores.others))
            gateway = stack.enter_context(
                running_gateway(
                    behind.ports[place], cores=cores.measured, access_log=True, scheme=scheme
                )
            )
            targets[name] = Target(gateway.port, gateway.pid, behind.pid)
            with Connection(gateway.port) as connection:
                check(connection, request, values)
        # Envoy passes JSON on to the server over HTTP, which is the last one.
        port = behind.ports[0]
        envoy = stack.enter_context(envoy_before(port, cores.measured, access_log=True))
        targets[_ENVOY] = Target(envoy.ports[0], envoy.pid, behind.pid)
        results = compare(targets, _profile(env, request, cores), wrk_load(cores.others))
    to_grpc, to_http, passing = results[_GATEWAY], results[_OVER_HTTP], results[_ENVOY]
    ratio, beside = Ratio.of(to_grpc.rates, passing.rates), Ratio.of(to_grpc.rates, to_http.rates)
    shown = ratio.shown(2, f"Envoy's {passing.rate:,.0f} /s over HTTP")
    return [
        Row(
            f"JSON {SMALL} FP32 in front of a server over gRPC, {_CONNECTIONS} connections, "
            f"logged, one core{cores.note}",
            "",
            f"{to_grpc.rate:,.0f} /s",
            f"{shown}, {beside.median:.2f} × the gateway's {to_http.rate:,.0f} /s over HTTP; "
            f"CPU per call {_cpu(to_grpc)}, over HTTP {_cpu(to_http)}, Envoy's {_cpu(passing)}",
            at_least(ratio.median, _CONVERTED_RATE, f"{_CONVERTED_RATE} × Envoy"),
        )
    ]


def _large_json(env: Environment) -> Row:
    values = normal(LARGE)
    request = json_of_doubles(model_responding(values.nbytes), values)
    with ExitStack() as stack:
        grpc_port = stack.enter_context(server("static_grpc_server")).ports[1]
        jobs = {}
        for name, port, scheme in (
            (_GATEWAY, grpc_port, "grpc"),
            (_OVER_HTTP, env.raw_port, "http"),
        ):
            gateway = stack.enter_context(running_gateway(port, scheme=scheme))
            start_offload(gateway, request)
            connection = stack.enter_context(Connection(gateway.port))
            jobs[name] = partial(connection.time, request)
        times = time_jobs(env.rounds(20), jobs, repeats=5)
    ratio, took = Ratio.of(times[_GATEWAY], times[_OVER_HTTP]), medians(times)
    return Row(
        f"JSON {LARGE:,} FP32 in front of a server over gRPC, 17 digits",
        "",
        milliseconds(took[_GATEWAY]),
        ratio.shown(2, f"the {milliseconds(took[_OVER_HTTP])} over HTTP"),
        at_most(ratio.median, _MAX_JSON_TIME, f"{_MAX_JSON_TIME} ×"),
    )


def _targets(stack: ExitStack, place: int, cores: CoreSplit) -> dict[str, Target]:
    """Run a server over gRPC, a gateway and Envoy; ``place`` is that of the server's port."""
    static = stack.enter_context(server("static_grpc_server", cores.others))
    port = static.ports[place]
    gateway = stack.enter_context(
        running_gateway(port, cores=cores.measured, access_log=True, scheme="grpc")
    )
    envoy = stack.enter_context(envoy_before(port, cores.measured, access_log=True, http2=True))
    return {
        _DIRECT: Target(port, static.pid, static.pid),
        _GATEWAY: Target(gateway.port, gateway.pid, static.pid),
        _ENVOY: Target(envoy.ports[0], envoy.pid, static.pid),
    }


def _profile(env: Environment, request: Request, cores: CoreSplit) -> LoadProfile:
    return LoadProfile(request, _CONNECTIONS, env.rounds(10), cores)


def _circumstances(cores: CoreSplit) -> str:
    return f"{_CONNECTIONS} connections of {STREAMS} streams, logged, one core{cores.note}"


def _row(what: str, results: Mapping[str, Result], name: str, minimum: float | None = None) -> Row:
    result, envoy = results[name], results[_ENVOY]
    direct = results[_DIRECT].rate
    limited = "" if direct > 2 * envoy.rate else "; the client limits Envoy's rate"
    ratio = Ratio.of(result.rates, envoy.rates)
    bound: Bound | None = None
    if minimum is not None:
        bound = at_least(ratio.median, minimum, f"{minimum} × Envoy")
    return Row(
        what,
        f"{direct:,.0f} /s" if name == _GATEWAY else "",
        f"{result.rate:,.0f} /s",
        ratio.shown(2, f"Envoy's {envoy.rate:,.0f} /s")
        + f"; CPU per call {_cpu(result)}, Envoy's {_cpu(envoy)}{limited}",
        bound,
    )


def _cpu(result: Result) -> str:
    return f"{result.own / result.rate * 1e6:,.0f} µs"
