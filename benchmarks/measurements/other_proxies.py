"""Requests per second on one core: the gateway, which converts, and proxies that do not.

The proxy that is measured has a core to itself; the client and the server share the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import orjson

from benchmarks.harness.client import BenchmarkError, Connection, NotInstalledError
from benchmarks.harness.comparison import Contender, Course, Standing, contest
from benchmarks.harness.cores import Division, divided, staying_on
from benchmarks.harness.environment import Lab
from benchmarks.harness.load import threads, wrk_on
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.ratio import Ratio
from benchmarks.harness.requests import Request, Values, binary, json_of_doubles, normal
from benchmarks.report import Row, at_least
from benchmarks.servers.proxies import envoy_before, nginx_before
from benchmarks.servers.raw_server import model_answering

_SMALL_CONNECTIONS, _SMALL_RATE = 32, 1.0
_LARGE_CONNECTIONS, _LARGE_RATE = 8, 0.8
_LARGE_COUNT = 150_000


def small(lab: Lab) -> list[Row]:
    """Measure small JSON requests, which the gateway alone converts, there and back."""
    cores = divided()
    load = wrk_on(cores.others)
    values = normal(16)
    request = json_of_doubles("static", values)
    with ExitStack() as stack:
        static = stack.enter_context(server("static_server", cores.others))
        json_port, binary_port = static.ports
        gateway = stack.enter_context(running_gateway(binary_port, cores=cores.measured))
        envoy = stack.enter_context(envoy_before(json_port, cores.measured))
        contenders = {
            "direct": Contender(json_port, static.pid, static.pid),
            "gateway": Contender(gateway.port, gateway.pid, static.pid),
            "Envoy": Contender(envoy.ports[0], envoy.pid, static.pid),
        }
        missing: list[Row] = []
        try:
            nginx = stack.enter_context(nginx_before(json_port, cores.measured))
            contenders["nginx"] = Contender(nginx.ports[0], nginx.pid, static.pid)
        except NotInstalledError as error:  # it is for information only
            missing = [Row("… nginx", result=f"not measured: {error}")]
        for contender in contenders.values():
            _check(contender.port, request, values)
        standings = contest(contenders, _course(lab, request, _SMALL_CONNECTIONS, cores), load)
    what = f"JSON 16 FP32, {_SMALL_CONNECTIONS} connections"
    return _rows(what, standings, _SMALL_RATE, cores) + missing


def large(lab: Lab) -> list[Row]:
    """Measure tensors of 600 KB that stay binary, there and back."""
    cores = divided()
    values = normal(_LARGE_COUNT)
    request = binary(model_answering(values.nbytes), values)
    with ExitStack() as stack:
        raw = stack.enter_context(server("raw_server", cores.others))
        port = raw.ports[0]
        gateway = stack.enter_context(running_gateway(port, cores=cores.measured))
        envoy = stack.enter_context(envoy_before(port, cores.measured))
        contenders = {
            "direct": Contender(port, raw.pid, raw.pid),
            "gateway": Contender(gateway.port, gateway.pid, raw.pid),
            "Envoy": Contender(envoy.ports[0], envoy.pid, raw.pid),
        }
        _check_same(contenders, request)
        stack.enter_context(staying_on(cores.others))
        standings = contest(contenders, _course(lab, request, _LARGE_CONNECTIONS, cores), threads)
    what = f"binary {_LARGE_COUNT:,} FP32, {_LARGE_CONNECTIONS} connections"
    return _rows(what, standings, _LARGE_RATE, cores)


def _course(lab: Lab, request: Request, connections: int, cores: Division) -> Course:
    return Course(request, connections, lab.rounds(10), cores)


def _rows(what: str, standings: dict[str, Standing], least: float, cores: Division) -> list[Row]:
    direct, gateway = standings.pop("direct"), standings.pop("gateway")
    ratios = {name: Ratio.of(gateway.rates, other.rates) for name, other in standings.items()}
    return [
        Row(
            f"{what}, one core{cores.note}",
            f"{direct.rate:,.0f} /s",
            f"{gateway.rate:,.0f} /s",
            ", ".join(
                ratios[name].shown(2, f"{name}'s {other.rate:,.0f} /s")
                for name, other in standings.items()
            ),
            at_least(ratios["Envoy"].median, least, f"{least} × Envoy"),
        ),
        Row(
            "… how busy the cores were",
            f"{direct.other_cores:.0%}, by server {direct.server:.0%}, client {direct.client:.0%}",
            gateway.shares,
            ". ".join(f"{name}: {other.shares}" for name, other in standings.items()),
        ),
    ]


def _check(port: int, request: Request, values: Values) -> None:
    """See to it that all give the same answer."""
    with Connection(port) as connection:
        output = orjson.loads(connection.fetch(request).body)["outputs"][0]
    if values.astype(float).tolist() != [float(values.dtype.type(x)) for x in output["data"]]:
        raise BenchmarkError(f"this is not the tensor that the server has: {output}")


def _check_same(contenders: Mapping[str, Contender], request: Request) -> None:
    bodies: set[bytes] = set()
    for contender in contenders.values():
        with Connection(contender.port) as connection:
            bodies.add(connection.fetch(request).body)
    if len(bodies) > 1:
        raise BenchmarkError("not all give the answer that the server gives")
