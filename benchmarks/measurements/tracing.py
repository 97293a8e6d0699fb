"""Measures what traces cost: CPU time per call with 1 % of the calls sampled, beside none."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial

from benchmarks.harness.cores import split_cores
from benchmarks.harness.environment import Environment
from benchmarks.harness.load import LoadGenerator, wrk_load
from benchmarks.harness.proc_stats import cpu_time
from benchmarks.harness.processes import Gateway, running_gateway, server
from benchmarks.harness.requests import Request, binary, json_of_doubles, normal
from benchmarks.harness.rounds import Ratio, run_rounds
from benchmarks.report import Row, below

_CONNECTIONS = 32
_SECONDS = 2
_MOST = 1.03
_MODEL = "static_16"
_OFF = "off"
_CONTROL = "none, in another process"
"""A second gateway without traces: it tells how far two processes that do the same are apart."""
_SAMPLES = ("0%", "1%", "100%")


def cost(env: Environment) -> list[Row]:
    """Measure small JSON and binary calls; only 1 % has a bound."""
    cores = split_cores()
    load = wrk_load(cores.others)
    rows = []
    with ExitStack() as stack:
        static = stack.enter_context(server("static_server", cores.others))
        sink = stack.enter_context(server("trace_sink", cores.others))
        gateways = {}
        for sample in (_OFF, _CONTROL, *_SAMPLES):
            receiver = {"endpoint": f"http://127.0.0.1:{sink.ports[0]}", "sample": sample}
            gateways[sample] = stack.enter_context(
                running_gateway(
                    static.ports[1],
                    cores=cores.measured,
                    access_log=True,
                    tracing=receiver if sample in _SAMPLES else None,
                )
            )
        values = normal(16)
        requests = {"JSON": json_of_doubles(_MODEL, values), "binary": binary(_MODEL, values)}
        for form, request in requests.items():
            for each in gateways.values():
                load(each.port, request, _CONNECTIONS, _SECONDS)
            jobs = {name: partial(_cpu, each, request, load) for name, each in gateways.items()}
            times = run_rounds(env.rounds(10), jobs)
            for sample in (_CONTROL, *_SAMPLES):
                ratio = Ratio.of(times[sample], times[_OFF])
                base = statistics.median(times[_OFF])
                bound = below(ratio.median, _MOST, f"{_MOST} ×") if sample == "1%" else None
                rows.append(
                    Row(
                        f"traces of {sample} of {form} calls of 16 FP32{cores.note}",
                        "",
                        ratio.shown(3, f"the CPU time without, {base * 1e6:.1f} µs per call"),
                        "",
                        bound,
                    )
                )
    return rows


def _cpu(gateway: Gateway, request: Request, load: LoadGenerator) -> float:
    """Return the CPU seconds of a gateway per call."""
    before = cpu_time(gateway.pid)
    result = load(gateway.port, request, _CONNECTIONS, _SECONDS)
    return (cpu_time(gateway.pid) - before) / (result.rate * _SECONDS)
