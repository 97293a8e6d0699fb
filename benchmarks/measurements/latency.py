"""Measures the latency that an idle gateway adds to a small request.

Gateway and server share a core, as in one pod, and the client has the others. Without pinning, the
three share cores differently in each run. Waking a sleeping core takes as long in a virtual machine
as all the gateway's work, and would count twice or not at all.
"""

from __future__ import annotations

from benchmarks.harness.client import Connection
from benchmarks.harness.cores import pinned_to, split_cores
from benchmarks.harness.environment import Environment, medians, time_jobs
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import json_of_doubles, normal
from benchmarks.report import Row, below, milliseconds

_MAX_ADDED = 0.0002  # seconds


def added(env: Environment) -> list[Row]:
    """Compare with a server that has its JSON response ready, one request at a time."""
    request = json_of_doubles("static", normal(16))
    cores = split_cores()
    with server("static_server", cores.measured) as static:
        json_port, binary_port = static.ports
        with (
            running_gateway(binary_port, cores=cores.measured) as gateway,
            Connection(gateway.port) as to_gateway,
            Connection(json_port) as to_server,
            pinned_to(cores.others),
        ):
            times = time_jobs(
                env.rounds(3000),
                {
                    "direct": lambda: to_server.time(request),
                    "gateway": lambda: to_gateway.time(request),
                },
            )
    took = medians(times)
    added = took["gateway"] - took["direct"]
    return [
        Row(
            f"JSON 16 FP32, the server's response ready, client apart{cores.note}",
            milliseconds(took["direct"]),
            milliseconds(took["gateway"]),
            f"{milliseconds(added)} added",
            below(added, _MAX_ADDED, milliseconds(_MAX_ADDED)),
        )
    ]
